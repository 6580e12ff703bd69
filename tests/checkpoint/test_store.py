"""Checkpoints as files: what is read is what was written, or it is said that it is not."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import CheckpointError
from scaleflow.interfaces import Snapshot

HOST = {"epoch": 2, "values": {"train/loss": 0.1 + 0.2}, "best": {"value": None, "step": None}}


def snapshot(step: int, size: int = 7) -> Snapshot:
    tensors = {
        "model/0": np.random.default_rng(step).normal(size=(size, 3)).astype(np.float32),
        "model/1": np.array([1, 2**32 - 1], np.uint32),
        "optimizer/0": np.array(step, np.int64),
        "optimizer/1": np.array([np.nan, np.inf, -0.0], np.float16),
        "training/sums": np.array([1 / 3, 1e300]),
    }
    return Snapshot(step, tensors, HOST)


def same(one: Snapshot, other: Snapshot) -> bool:
    return (
        one.step == other.step
        and one.host == other.host
        and set(one.tensors) == set(other.tensors)
        and all(
            (value.dtype, value.shape, value.tobytes())
            == (other.tensors[name].dtype, other.tensors[name].shape, other.tensors[name].tobytes())
            for name, value in one.tensors.items()
        )
    )


def written_and_read(folder: str) -> list[Any]:
    from scaleflow.checkpoint import CheckpointStore

    shelf = CheckpointStore(folder)
    before = shelf.steps()
    for step in (30, 5, 123456789):
        shelf.write(snapshot(step))
    shelf.write(snapshot(5))  # once more
    return [before, shelf.steps(), *(same(shelf.read(step), snapshot(step)) for step in shelf.steps())]


@pytest.mark.parametrize("place", ["{}/checkpoints", "{}/checkpoints/", "ram://test{}/checkpoints"])
def test_a_checkpoint_is_read_as_it_was_written(isolated: Callable[..., Any], tmp_path: Path, place: str) -> None:
    assert isolated(written_and_read, place.format(tmp_path)) == [[], [5, 30, 123456789], True, True, True]


def write_beside(folder: str) -> list[Any]:
    from scaleflow.checkpoint import CheckpointStore

    shelf = CheckpointStore(folder)
    shelf.check_writable()
    shelf.write(snapshot(5))
    listed = json.loads(Path(shelf.path_of(5), "checkpoint.json").read_text())["files"]
    shelf.delete(5)
    return ["mine" in listed, shelf.steps()]


def test_files_of_others_in_the_folder_of_checkpoints_stay(isolated: Callable[..., Any], tmp_path: Path) -> None:
    mine = [tmp_path / "can-be-written", *(tmp_path / f"step-0000000{step}" / "mine" for step in (5, 7))]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    assert isolated(write_beside, str(tmp_path)) == [False, []]
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(mine)


def test_a_plain_reader_of_tensorflows_opens_one(isolated: Callable[..., Any], tmp_path: Path) -> None:
    assert isolated(read_plainly, str(tmp_path)) == snapshot(4).tensors["model/0"].tolist()


def read_plainly(folder: str) -> Any:
    import tensorflow as tf

    from scaleflow.checkpoint import CheckpointStore

    place = CheckpointStore(folder).write(snapshot(4))
    return tf.train.load_checkpoint(f"{place}/tensors").get_tensor("model/0").tolist()


def flip(place: Path) -> None:
    (data,) = place.glob("tensors.data*")
    content = bytearray(data.read_bytes())
    content[10] ^= 1
    data.write_bytes(content)


def cut(place: Path) -> None:
    (data,) = place.glob("tensors.data*")
    data.write_bytes(data.read_bytes()[:-1])


def lose_index(place: Path) -> None:
    (place / "tensors.index").unlink()


def cut_manifest(place: Path) -> None:
    (place / "checkpoint.json").write_text((place / "checkpoint.json").read_text()[:40])


def of_another_format(place: Path) -> None:
    said = json.loads((place / "checkpoint.json").read_text())
    (place / "checkpoint.json").write_text(json.dumps({**said, "format": 99}))


def flip_in_manifest(place: Path) -> None:
    """What is still JSON, and says something else."""
    said = (place / "checkpoint.json").read_text()
    (place / "checkpoint.json").write_text(said.replace('"epoch": 2', '"epoch": 3'))


DAMAGES = [flip, cut, lose_index, cut_manifest, of_another_format, flip_in_manifest]


def newest_of_damaged(folder: str, damages: list[Callable[[Path], None]]) -> list[Any]:
    from scaleflow.checkpoint import CheckpointManager, CheckpointStore
    from scaleflow.interfaces import Checkpoint

    found = []
    for number, damage in enumerate(damages):
        shelf = CheckpointStore(f"{folder}/{number}")
        shelf.write(snapshot(1))
        damage(Path(shelf.write(snapshot(2))))
        notes: list[str] = []
        keeper = CheckpointManager(Checkpoint(), shelf.folder, lambda event, notes=notes: notes.append(event.text))
        newest = keeper.load_newest()
        found.append((newest and newest.step, len(notes), "step 2 is damaged" in notes[0], shelf.steps()))
    return found


def test_a_damaged_one_is_put_aside_and_the_one_before_it_taken(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(newest_of_damaged, str(tmp_path), DAMAGES)
    assert found == [(1, 1, True, [1])] * len(DAMAGES)
    assert (tmp_path / "0" / "step-00000002" / "damaged.json").is_file()


def write_after_a_death(folder: str) -> tuple[list[int], list[str]]:
    from scaleflow.checkpoint import CheckpointStore

    shelf = CheckpointStore(folder)
    for step in (1, 2):
        shelf.write(snapshot(step))
    Path(shelf.path_of(2), "checkpoint.json").unlink()  # it died before it was through
    found = shelf.steps()
    shelf.write(snapshot(3))
    return found, sorted(path.name for path in Path(folder).iterdir())


def test_one_that_was_not_finished_does_not_count_and_goes_with_the_next(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    assert isolated(write_after_a_death, str(tmp_path)) == ([1], ["step-00000001", "step-00000003"])


def measure_memory(folder: str) -> list[float]:
    """The MB that writing takes besides the tensors, and the MB of the tensors, which are read back."""
    from scaleflow.checkpoint import CheckpointStore, store

    store.PART_BYTES = 1 << 24
    shelf = CheckpointStore(folder)
    shelf.write(snapshot(1))  # what TensorFlow allocates once
    tensors = {f"model/{n}": np.full((1 << 20,), n, np.float32) for n in range(40)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shelf.write(Snapshot(2, tensors, HOST))
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert same(shelf.read(2), Snapshot(2, tensors, HOST))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # reading takes a copy, so this is not blind
    files = len(list(Path(shelf.path_of(2)).glob("tensors.data-*")))
    return [taken / 1024, after / 1024, sum(value.nbytes for value in tensors.values()) / 1e6, files]


def test_writing_takes_no_second_copy_of_all_tensors(isolated: Callable[..., Any], tmp_path: Path) -> None:
    taken, after, size, files = isolated(measure_memory, str(tmp_path))
    assert taken < 0.5 * size < 0.8 * size < after
    assert files == 10


def write_without_room(folder: str) -> tuple[str, list[int], bool]:
    from scaleflow.checkpoint import CheckpointStore

    shelf = CheckpointStore(folder)
    shelf.write(snapshot(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    try:
        shelf.write(snapshot(2, size=100_000))
    except CheckpointError as error:
        return str(error), shelf.steps(), same(shelf.read(1), snapshot(1))
    raise AssertionError("it fitted")


def test_a_full_disk_is_an_error_that_names_the_place_and_leaves_the_others(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    message, steps, is_whole = isolated(write_without_room, str(tmp_path))
    assert message.startswith(f"the checkpoint at step 2 could not be written to {tmp_path}: ")
    assert "large" in message  # File too large
    assert (steps, is_whole) == ([1], True)
