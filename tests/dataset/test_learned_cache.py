"""What is learned of files is learned once: the second run gets the same, reads less, and says so."""

from __future__ import annotations

import datetime
import errno
import json
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dataset.files import holds, options, refused, write
from tests.dataset.test_table import make, table, write_table

PARTS = "columns, rows, types and statistics"


def refuse_to_learn(patch: pytest.MonkeyPatch) -> None:
    """Has everything fail that learns of a table."""

    def fail(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("this was learned before")

    patch.setattr("scaleflow.dataset.tables.files.TableFiles.read_schema", fail)
    patch.setattr("scaleflow.dataset.tables.files.TableFiles._list_blocks", fail)
    for name in ("check_column_types", "describe_known_target", "choose_kind", "find_forms"):
        patch.setattr(f"scaleflow.dataset.tables.learning.{name}", fail)
    patch.setattr("scaleflow.dataset.tables.rows.are_plain_numbers", fail)
    for name in ("Number", "Category", "WordBag", "Date"):
        patch.setattr(f"scaleflow.dataset.tables.columns.{name}.learn", fail)


def learn(source: Any, seed: int = 0, validation: float = 0.2) -> tuple[list[str], Any]:
    """The notes about the cache, and all that a run reads and learns of a table before it traces anything."""
    from scaleflow.dataset.batches.preprocessing import choose_preprocessing, learn_on_chief
    from scaleflow.dataset.batches.splits import SingleProcess, hold_out_examples
    from scaleflow.interfaces import DivisionKeys, Split

    splits = {name: source.load(name) for name in source.splits}
    train, *_ = hold_out_examples(
        splits["train"], validation, Split("random"), DivisionKeys(), seed, lambda event: None
    )
    learned = learn_on_chief(choose_preprocessing(source, options()), train, SingleProcess())
    rows = {name: (each.faults, each.rows.malformed, each.head(1000).parts) for name, each in splits.items()}
    return source.learned_cache.notes, (source.inputs, source.outputs, source.notes, learned, rows)


def learn_twice(base: Path) -> Any:
    frame = table(200)
    files = [write_table(base / f"table{suffix}", frame) for suffix in (".csv", ".parquet", ".jsonl")]
    write(base / "splits/train.csv", files[0].read_text() + "1,2,3\n")
    write_table(base / "splits/test.csv", frame[:20])
    found = []
    for file, learn_on in [*((file, rows) for file in files for rows in (50, None)), (base / "splits", 50)]:
        kept = str(base / f"kept-{len(found)}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("scaleflow.dataset.tables.files.TEXT_BLOCK", 2000)  # several blocks
            first = learn(make(file, cache_dir=kept, learn_on=learn_on))
            refuse_to_learn(patch)
            found.append((str(file), first, learn(make(file, cache_dir=kept, learn_on=learn_on))))
    return found


def test_a_second_run_gets_the_same_and_learns_nothing(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(learn_twice, tmp_path)
    today = datetime.date.today()
    days = (today, today - datetime.timedelta(1))  # it may have begun before midnight
    for file, (notes, first), (again, second) in found:
        assert notes == []
        assert again in [[f"{PARTS} of {file} from the cache (learned {day})"] for day in days]
        np.testing.assert_equal(second, first)  # exactly, NaN being equal to NaN
    assert len(found) == 7


def change(base: Path) -> Any:
    file = write_table(base / "table.csv", table())
    text, status = file.read_text(), file.stat()
    kept: dict[str, Any] = {"cache_dir": str(base / "kept"), "learn_on": 50}

    def recalled(seed: int = 0, validation: float = 0.2, data: Path = file, **arguments: Any) -> str:
        """What comes from the cache."""
        notes, _ = learn(make(data, **{**kept, **arguments}), seed, validation)
        return notes[0].partition(" of ")[0] if notes else ""

    found = {"first": recalled(), "second": recalled()}
    found["seed"] = recalled(seed=1)
    found["validation"] = recalled(validation=0.5)
    found["split_seed"] = recalled(split_seed=1)
    found["drop"] = recalled(drop=["town"])
    found["categorical"] = recalled(categorical=["file"])
    found["missing"] = recalled(missing=["", "nothing"])
    found["learn_on"] = recalled(learn_on=40)
    found["kind"] = recalled(kind="classification")
    found["vocabulary"] = recalled(vocabulary=4)
    found["encoding"] = recalled(encoding="latin-1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scaleflow.dataset.reading.learned_cache.CODE", "another version")
        found["code"] = recalled()
    found["name"] = recalled(data=file.rename(base / "other.csv"))
    found["size"] = recalled(data=write(file, text + text.splitlines()[-1] + "\n"))
    write(file, text.replace("Bonn", "Rome"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    found["time"] = recalled()
    write(file, text)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    found["restored"] = recalled()
    return found


def test_changed_files_are_learned_again(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(change, tmp_path)
    types = "columns, rows and types"
    assert found == {
        **dict.fromkeys(("first", "code", "encoding", "name", "size", "time", "restored"), ""),
        "second": PARTS,
        **dict.fromkeys(("seed", "validation", "vocabulary"), types),
        **dict.fromkeys(("split_seed", "drop", "categorical", "learn_on"), "columns and rows"),
        "missing": "columns",
        "kind": "columns, rows and statistics",  # those of the inputs
    }


def spoil(base: Path) -> Any:
    file = write_table(base / "table.csv", table())
    kept = base / "kept"
    whole = learn(make(file, cache_dir=str(kept)))[1]
    found = []
    for damage in (
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-2]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"numbers", b"dates")),
        lambda path: path.write_bytes(b"\xff\x00"),
        lambda path: path.write_text("[]\n[]"),
    ):
        entries = list(kept.glob("*.learned.jsonl"))
        assert len(entries) == 5
        for path in entries:
            damage(path)
        found.append(learn(make(file, cache_dir=str(kept))))
    restored = learn(make(file, cache_dir=str(kept)))
    write(base / "a file", "")
    unwritable = learn(make(file, cache_dir=str(base / "a file/kept")))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XDG_CACHE_HOME")
        patch.setattr("os.path.expanduser", lambda path: path)  # as without a home folder
        homeless = learn(make(file))
    assert not Path("~").exists()
    messages = refused([partial(make, file, cache_dir=value) for value in (3, "s3://bucket/kept")])
    left = {path.name.partition(".")[2] for path in kept.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("filelock.FileLock.acquire", no_locks)
        unlocked = [learn(make(file, cache_dir=str(base / "unlocked"))) for _ in range(2)]
    return whole, found, restored, unwritable, homeless, messages, left, unlocked


def no_locks(*arguments: Any, **named: Any) -> None:
    """Fails as on a file system that has no locks."""
    raise OSError(errno.ENOLCK, "No locks available")


def test_no_problem_of_the_cache_is_an_error(isolated: Callable[..., Any], tmp_path: Path) -> None:
    whole, found, restored, unwritable, homeless, messages, left, unlocked = isolated(spoil, tmp_path)
    for notes, again in found:
        assert [note for note in notes if "is damaged; what it says is learned again (dataset.cache_dir)" in note]
        np.testing.assert_equal(again, whole)
    assert len(found[0][0]) == 5
    assert restored[0][0].startswith(PARTS)
    for (notes, again), reason in ((unwritable, "Not a directory"), (homeless, "there is no home folder")):
        assert len(notes) == 1
        holds(notes, [["table.csv is not kept for later runs", f"cannot be written: {reason} (dataset.cache_dir)"]])
        np.testing.assert_equal(again, whole)
    holds(messages, [["dataset.cache_dir=3: expected a path or null"], ["dataset.cache_dir=s3://", "not an address"]])
    assert left <= {"learned.jsonl", "learned.lock"}
    (notes, again), (later_notes, later) = unlocked
    assert notes == []
    assert later_notes[0].startswith(PARTS)
    np.testing.assert_equal([again, later], [whole, whole])


def learn_together(base: Path) -> Any:
    from filelock import FileLock

    from scaleflow.dataset.reading.learned_cache import LearnedCache

    path = str(write(base / "a.csv", "a"))
    began, waits = threading.Event(), threading.Event()
    learned: list[str] = []

    class Lock(FileLock):
        def acquire(self, *arguments: Any, **named: Any) -> Any:
            if began.is_set():
                waits.set()
            return super().acquire(*arguments, **named)

    def learn(name: str) -> str:
        began.set()
        assert waits.wait(60)
        learned.append(name)
        return name

    values: dict[str, Any] = {}

    def recall(name: str) -> None:
        values[name] = LearnedCache(str(base / "kept"), path).recall("rows", [path], 1, partial(learn, name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scaleflow.files.cache.FileLock", Lock)
        threads = [threading.Thread(target=recall, args=(name,)) for name in ("first", "second")]
        threads[0].start()
        assert began.wait(60)
        threads[1].start()
        for thread in threads:
            thread.join()
    return values, learned, len(list((base / "kept").glob("*.jsonl")))


def test_jobs_that_run_at_once_learn_once(isolated: Callable[..., Any], tmp_path: Path) -> None:
    values, learned, entries = isolated(learn_together, tmp_path)
    assert values == {"first": "first", "second": "first"}
    assert learned == ["first"]
    assert entries == 1


def test_files_that_were_not_used_for_long_are_deleted(tmp_path: Path) -> None:
    from scaleflow.files.cache import KEPT_DAYS, Cache

    cache = Cache(str(tmp_path), "tokens")

    def make(key: str, suffix: str = ".uint8") -> Path:
        path = cache.locate_file(key, suffix)
        cache.write_once(path, lambda: [key.encode()])
        return path

    old, used, recent, other = make("a"), make("b"), make("c"), make("d", ".learned.jsonl")
    for path in tmp_path.iterdir():
        days = KEPT_DAYS + (-1 if path == recent else 1)
        os.utime(path, (path.stat().st_mtime - days * 86_400,) * 2)
    mine = write(tmp_path / "words.uint8", "mine")
    os.utime(mine, (0, 0))
    cache.write_once(used, lambda: [b"again"])
    new = make("e")
    assert {each.name for each in tmp_path.iterdir() if each.suffix != ".lock"} == {
        each.name for each in (used, recent, other, mine, new)
    }
    assert not old.with_suffix(".lock").exists()
    assert used.read_bytes() == b"b"


def count_records(base: Path) -> Any:
    from tests.dataset.test_tfrecord import make, numbered, written

    path = written(base / "data.tfrecord", [numbered(n) for n in range(8)])
    damaged = written(base / "damaged.tfrecord", [numbered(n) for n in range(8)])
    damaged.write_bytes(damaged.read_bytes()[:-5])
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            sources = [make(each, cache_dir=str(base / "kept")) for each in (path, damaged)]
            streams = [source.load("train") for source in sources]
            records = [[list(map(np.asarray, each)) for each in stream.dataset] for stream in streams]
            found.append(([(len(each), each.faults) for each in streams], records))
            patch.setattr("scaleflow.dataset.tfrecord.TFRecord._count_file", None)
    return found, [source.learned_cache.notes for source in sources]


def test_records_are_counted_once(isolated: Callable[..., Any], tmp_path: Path) -> None:
    (first, second), notes = isolated(count_records, tmp_path)
    np.testing.assert_equal(second, first)
    assert "the file is cut off or damaged from here on" in first[0][1][1][0]
    for name, (note,) in zip(("data", "damaged"), notes, strict=True):
        assert note.startswith(f"records of {tmp_path}/{name}.tfrecord from the cache (learned ")


def train(folder: str) -> Any:
    import scaleflow

    os.chdir(folder)
    write_table(Path("table.csv"), table(300))
    words = ("dataset=table", "dataset.data_dir=table.csv", "dataset.target=price", "dataset.columns=[town,file,sold]")
    words = (*words, "dataset.cache=none", "dataset.learn_on=100", "dataset.cache_dir=kept", "model=mlp")
    words = (*words, "training.max_steps=4", "debug=inline", "tracking=none", "hardware=cpu")
    metrics, notes = [], []
    for run in range(2):
        found = scaleflow.run(*words, folder=f"run-{run}")
        metrics.append({name: value for name, value in found.metrics.items() if "loss" in name})
        lines = Path(f"run-{run}/events.jsonl").read_text().splitlines()
        notes.append([text for line in lines if "from the cache" in (text := json.loads(line).get("text", ""))])
    return metrics, notes


@pytest.mark.slow
def test_a_run_with_the_cache_has_the_losses_of_one_without(isolated: Callable[..., Any], tmp_path: Path) -> None:
    metrics, notes = isolated(train, str(tmp_path))
    assert {"val/loss", "test/loss"} <= set(metrics[0])
    assert metrics[1] == metrics[0]
    assert notes[0] == []
    assert notes[1][0].startswith(f"{PARTS} of table.csv from the cache")


def test_the_fingerprint_covers_the_code_of_tables_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    from scaleflow.dataset.reading import learned_cache

    read: list[str] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path.name), read_bytes(path))[1])
    assert learned_cache.fingerprint_code() == learned_cache.CODE
    assert {"table.py", "kinds.py", "values.py", "blocks.py", "learned_cache.py"} <= set(read)
