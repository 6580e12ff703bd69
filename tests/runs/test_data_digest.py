import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from scaleflow.runs import data_digest
from scaleflow.runs.data_digest import digest_files, find_changed_files, find_data_files


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(data_digest, "SETTLED_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache/scaleflow/digests/files.db"


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
    shutil.rmtree(cache.parent)
    write(str(cache), b"no database")
    assert find_changed_files(first, digest_files(["a.csv", "b.csv"])) == {"a.csv": "changed", "b.csv": "changed"}


def test_the_oldest_digests_are_deleted(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(data_digest, "MAX_ENTRIES", 3)
    for number in range(5):
        digest_files([write(f"{number}.csv", b"")])
    rows = sqlite3.connect(cache).execute("SELECT path FROM digests").fetchall()
    assert [Path(path).name for (path,) in rows] == ["2.csv", "3.csv", "4.csv"]


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
