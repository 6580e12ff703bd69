"""Which files are data, without TensorFlow: suffixes, and globs as those of a disk."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

from scaleflow.dataset.reading.files import find_files, has_suffix, matches_glob
from tests.dataset.files import write


@pytest.mark.parametrize(
    ("name", "is_data"),
    [
        *((f"part.csv{rest}", True) for rest in ("", ".gz", ".zst", "-00000", "-00000-of-00004", "-00001-of-00002.gz")),
        *((f"part.CSV.gz{rest}", True) for rest in ("", "-00000-of-00004")),
        *((f"part.csv{rest}", False) for rest in (".bak", ".tmp", ".gz.part", "-old", "~", ".crc", ".json", ".1")),
        ("part.csvx", False),
        ("csv", False),
    ],
)
def test_a_data_file_is_known_by_the_end_of_its_name(name: str, is_data: bool) -> None:
    assert has_suffix(name, (".tsv", ".csv")) == is_data


def test_a_copy_beside_a_file_is_not_read(tmp_path: Path) -> None:
    for name in ("part.csv", "part.csv.bak", "more.csv.gz", "part.csv~"):
        write(tmp_path / name, "x")
    assert find_files(str(tmp_path), (".csv",)) == {"all": [f"{tmp_path}/more.csv.gz", f"{tmp_path}/part.csv"]}


@pytest.mark.parametrize(
    "pattern",
    [
        "*.csv",
        "**/*.csv",
        "*/*.csv",
        "a/**",
        "**",
        "a/*/2.csv",
        "a/[b-c]/?.csv",
        "**/.h/*",
        "a/.*",
        "a**/*.csv",
        "a/b",
        "*.csv/**",
    ],
)
def test_a_glob_in_a_store_matches_as_on_a_disk(tmp_path: Path, pattern: str) -> None:
    names = ["0.csv", "a/.5.csv", "a/.h/4.csv", "a/1.csv", "a/b/2.csv", "a/b/7.txt", "a/b/c/3.csv", "ab/6.csv"]
    for name in names:
        write(tmp_path / name, "x")
    on_disk = [each for each in glob.glob(pattern, root_dir=tmp_path, recursive=True) if (tmp_path / each).is_file()]  # noqa: PTH207
    assert [name for name in names if matches_glob(name.split("/"), pattern.split("/"))] == sorted(on_disk)
