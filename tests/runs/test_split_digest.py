from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces.events import DatasetDescribed
from scaleflow.runs import EventWriter, RunFolder, split_digest
from scaleflow.runs.split_digest import DIGEST_VERSION, identify_split, list_split_changes, read_split_digests

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
    monkeypatch.setattr(split_digest, "MAX_FILES", 2)
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


@pytest.mark.parametrize("older", [{"digest": "bb", "examples": 9}, make_split("bb", version=1), {"version": None}])
def test_digests_of_another_version_are_not_compared(older: Any) -> None:
    assert list_split_changes({"train": older}, {"train": make_split()}) == []
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
