import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces.events import DatasetDescribed
from scaleflow.runs import EventWriter, RunFolder, data_digest
from scaleflow.runs.data_digest import (
    DIGEST_VERSION,
    digest_files,
    find_data_files,
    identify_split,
    list_split_changes,
    read_split_digests,
)
from scaleflow.runs.identity import compare, record_parts


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(data_digest, "SETTLED_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache/scaleflow/digests"


def find_changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    changes = compare(record_parts({}, before), record_parts({}, now), ("files",))
    return {each.name: str(each).split()[-1] for each in changes}


def write(name: str, content: bytes) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content)
    return name


def test_every_byte_of_a_file_counts() -> None:
    paths = [write("a.csv", b"x" * 3_000_000), write("b.csv", b"")]
    before = digest_files([*paths, "none.csv", "s3://bucket/a.csv", "a\0b"])
    assert list(before) == paths
    assert all(digest.startswith("all:") and len(digest) == 36 for digest in before.values())
    write("a.csv", b"x" * 1_234_567 + b"y" + b"x" * 1_765_432)
    write("c.csv", b"new")
    now = digest_files(["a.csv", "c.csv"])
    assert find_changed_files(before, now) == {"a.csv": "changed", "b.csv": "gone", "c.csv": "new"}
    assert find_changed_files(before, before) == {}


def test_a_file_is_read_once_until_it_changes(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    read = []
    real = data_digest.hash_file
    monkeypatch.setattr(data_digest, "hash_file", lambda path, *rest: read.append(path) or real(path, *rest))  # type: ignore[func-returns-value]
    paths = [write("a.csv", b"abc"), write("b.csv", b"def")]
    first = digest_files(paths)
    assert digest_files(paths) == first
    assert read == paths
    status = Path("a.csv").stat()
    write("a.csv", b"abd")
    os.utime("a.csv", ns=(status.st_atime_ns, status.st_mtime_ns))  # as `cp -p` and archives do
    assert find_changed_files(first, digest_files(paths)) == {"a.csv": "changed"}
    assert read == [*paths, "a.csv"]
    monkeypatch.setattr(data_digest, "SETTLED_SECONDS", 60.0)  # it may change again within the clock's resolution
    write("b.csv", b"deg")
    digest_files(["b.csv"])
    digest_files(["b.csv"])
    assert read[3:] == ["b.csv", "b.csv"]
    (kept,) = (each for each in cache.glob("*.jsonl") if b"a.csv" in each.read_bytes())
    kept.write_bytes(kept.read_bytes()[:-3])
    assert find_changed_files(first, digest_files(["a.csv", "b.csv"])) == {"a.csv": "changed", "b.csv": "changed"}
    shutil.rmtree(cache)
    write(str(cache), b"no folder")
    assert find_changed_files(first, digest_files(["a.csv", "b.csv"])) == {"a.csv": "changed", "b.csv": "changed"}


def test_the_oldest_digests_are_deleted(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(data_digest, "MAX_FILES", 3)
    paths = [write(f"{number}.csv", b"") for number in range(5)]
    digest_files(paths)
    (kept,) = cache.glob("*.jsonl")
    assert [Path(name).name for name in json.loads(kept.read_text().split("\n")[1])] == ["2.csv", "3.csv", "4.csv"]


def test_large_files_are_sampled_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_digest, "WHOLE_BYTES", 2_000_000)
    paths = [write("large.bin", bytes(2_000_000)), write("small.bin", b"small")]
    whole, both = digest_files(paths[:1]), digest_files(paths)
    assert [digest.split(":")[0] for digest in both.values()] == ["sample", "all"]
    assert find_changed_files(whole, both) == {"small.bin": "new"}  # other parts of large.bin
    write("large.bin", bytes(1_999_999) + b"x")  # the last piece
    assert find_changed_files(both, digest_files(paths)) == {"large.bin": "changed"}


def test_the_files_of_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data/b/2.png", "data/a/1.png", "data/.hidden/3.png", "data/mlflow.db", "data/out/events.jsonl"):
        write(name, b"")
    for name in (
        "data/out/config.yaml",
        "words.txt",
        "auto/x",
        "sets/mnist/1.0/x.tfrecord",
        "sets/cifar/y",
        "c[1].csv",
    ):
        write(name, b"")
    assert find_data_files({"data_dir": " data ", "kind": "auto", "size": [1, 2]}) == ["data/a/1.png", "data/b/2.png"]
    assert find_data_files({"data_dir": "data/*/*.png"}) == ["data/a/1.png", "data/b/2.png"]
    assert find_data_files({"path": "words.txt", "cache_dir": "data/a"}) == ["words.txt"]
    assert find_data_files({"data_dir": "sets", "name": "mnist/plain:1.0"}) == ["sets/mnist/1.0/x.tfrecord"]
    assert find_data_files({"data_dir": "c[1].csv"}) == ["c[1].csv"]
    assert find_data_files({"data_dir": "s3://bucket/x"}) == find_data_files({"data_dir": None}) == []
    monkeypatch.setattr(data_digest, "MAX_FILES", 1)
    assert find_data_files({"data_dir": "data"}) == ["data/a/1.png"]


FILES = {"/data/a/1.png": "all:11", "/data/b/2.png": "all:22"}


def make_split(digest: str = "aa", examples: int = 1000, covers: str = "all", version: Any = DIGEST_VERSION) -> Any:
    return {"digest": digest, "examples": examples, "covers": covers, "version": version}


def test_files_count_where_the_split_is_not_digested_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identify_split("aa", "all", FILES) == {"digest": "aa", "covers": "all", "version": DIGEST_VERSION}
    assert identify_split("aa", "all records", {})["covers"] == "all records"
    first = identify_split("aa", "all records", FILES)
    assert first["covers"] == "files"
    assert len(first["digest"]) == 16
    moved = {path.replace("/data", "/elsewhere"): digest for path, digest in FILES.items()}
    assert identify_split("aa", "all records", moved) == first
    for other in ({**FILES, "/data/b/2.png": "all:33"}, {"/data/a/1.png": "all:11", "/data/c/2.png": "all:22"}):
        assert identify_split("aa", "all records", other)["digest"] != first["digest"]
    assert identify_split("aa", "", {"/a": "sample:11"})["covers"] == "a sample of each large file"
    monkeypatch.setattr(data_digest, "MAX_FILES", 2)
    assert identify_split("aa", "", FILES)["covers"] == "the first 2 files"


def test_changed_splits_of_two_runs_are_named() -> None:
    before = {"train": make_split(), "validation": make_split("bb"), "test": make_split("cc")}
    now = {"train": make_split("dd"), "validation": make_split("bb", 900), "extra": make_split()}
    assert list_split_changes(before, before) == []
    files = [{"train": make_split(digest, covers="files")} for digest in ("aa", "bb")]
    assert list_split_changes(*files) == ["the files of train changed (1,000 examples as before)"]
    assert list_split_changes(before, now) == [
        "values of train changed (1,000 examples as before)",
        "validation had 1,000 examples and has 900",
        "the split test is gone",
        "the split extra is new",
    ]


@pytest.mark.parametrize("other", [make_split("bb", version=1), {"version": None}])
def test_digests_of_another_version_are_not_compared(other: Any) -> None:
    assert list_split_changes({"train": other}, {"train": make_split()}) == []
    assert list_split_changes({"train": make_split("bb", covers="files")}, {"train": make_split()}) == []


def test_the_newest_digests_of_a_run_count(tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    assert read_split_digests(files) == {}
    emit = EventWriter(files.events)
    emit(DatasetDescribed("a", splits={"train": make_split("aa")}))
    emit(DatasetDescribed("a", splits={"train": make_split("bb")}))
    emit.close()
    assert read_split_digests(files)["train"]["digest"] == "bb"


def test_evaluate_compares_digests_of_one_version() -> None:
    from types import SimpleNamespace

    from scaleflow.worker.evaluate import emit_change

    notes: list[Any] = []
    for before in (make_split("cc", version=2), make_split("bb"), make_split("aa")):
        state: Any = SimpleNamespace(state=SimpleNamespace(splits={"test": before}))
        emit_change("test", state, make_split("aa"), notes.append)
    assert len(notes) == 1  # of bb
    emit_change("new", state, make_split("aa"), notes.append)
    assert len(notes) == 1
