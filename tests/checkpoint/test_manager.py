"""When a checkpoint is due, which ones stay, and the thread that writes them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import CheckpointError
from scaleflow.interfaces import Best, Checkpoint, Snapshot

#: What the host keeps if there is no best checkpoint.
NO_BEST = {"best": {"step": None}}


def kept(folder: str, options: Checkpoint, saves: list[tuple[int, bool]]) -> tuple[list[int], list[int], int | None]:
    """The steps that are on disk after some saves, those that were told of, and the best."""
    import numpy as np

    from scaleflow.checkpoint import CheckpointManager, CheckpointStore

    told: list[int] = []
    keeper = CheckpointManager(options, folder, lambda event: told.append(event.step))
    known = None
    for step, is_best in saves:
        known = step if is_best else known
        keeper.save(Snapshot(step, {"a": np.array(step)}, {"best": {"step": known}}), is_best)
        keeper.wait()
    best = keeper.load_best()
    return CheckpointStore(folder).steps(), told, best and best.step


PLAIN = [(step, False) for step in (1, 2, 3, 4)]
WITH_BEST = [(1, False), (2, True), (3, False), (4, False), (5, False)]
WITH_BETTER = [(1, True), (2, False), (3, True), (4, False), (5, False)]


@pytest.mark.parametrize(
    ("options", "saves", "steps", "best"),
    [
        (Checkpoint(), PLAIN, [3, 4], None),
        (Checkpoint(keep=1), PLAIN, [4], None),
        (Checkpoint(keep=9), PLAIN, [1, 2, 3, 4], None),
        (Checkpoint(best=Best()), WITH_BEST, [2, 4, 5], 2),
        (Checkpoint(best=Best()), WITH_BETTER, [3, 4, 5], 3),
        (Checkpoint(keep=1, best=Best()), WITH_BETTER, [3, 5], 3),
    ],
)
def test_the_newest_are_kept_and_the_best(
    isolated: Callable[..., Any], tmp_path: Path, options: Checkpoint, saves: Any, steps: list[int], best: int | None
) -> None:
    assert isolated(kept, str(tmp_path), options, saves) == (steps, [step for step, _ in saves], best)


def due() -> list[Any]:
    from scaleflow.checkpoint import CheckpointManager

    steps = CheckpointManager(Checkpoint(every_epochs=3, every_steps=10), "unused", print)
    seconds = CheckpointManager(Checkpoint(every_epochs=None, every_seconds=5.0), "unused", print)
    return [
        [steps.steps_left(step) for step in (0, 7, 10)],
        [steps.is_due(step, 1e9) for step in (9, 10, 11)],
        [steps.is_due_after(epoch) for epoch in (1, 2, 3, 6)],
        seconds.steps_left(3),
        [seconds.is_due(3, passed) for passed in (4.9, 5.0)],
        seconds.is_due_after(3),
    ]


def test_one_is_due_by_steps_seconds_or_epochs(isolated: Callable[..., Any]) -> None:
    assert isolated(due) == [
        [10, 3, 10],
        [False, True, False],
        [False, False, True, True],
        None,
        [False, True],
        False,
    ]


class Slow:
    """Takes until it is told."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.begun = threading.Event()
        self.written: list[int] = []

    def __call__(self, item: int) -> None:
        self.begun.set()
        assert self.may_go_on.wait(60)
        self.written.append(item)


def write_slowly() -> list[int]:
    from scaleflow.checkpoint.manager import BackgroundWriter

    slow = Slow()
    writer = BackgroundWriter(slow)
    writer.put(1)
    assert slow.begun.wait(60)
    for item in (2, 3, 4):
        writer.put(item)  # does not wait
    slow.may_go_on.set()
    writer.wait()
    return slow.written


def test_a_save_does_not_wait_for_the_one_before_and_the_newest_takes_its_place(isolated: Callable[..., Any]) -> None:
    assert isolated(write_slowly) == [1, 4]


def write_and_forget() -> bool:
    from scaleflow.checkpoint.manager import BackgroundWriter

    writer = BackgroundWriter(lambda snapshot: None)
    snapshot = Snapshot(1, {}, {})
    writer.put(snapshot)
    writer.wait()
    is_gone = weakref.ref(snapshot)
    del snapshot
    return is_gone() is None


def test_written_checkpoints_do_not_stay_in_memory(isolated: Callable[..., Any]) -> None:
    assert isolated(write_and_forget)


def write_what_must_stay() -> list[int]:
    from scaleflow.checkpoint.manager import BackgroundWriter

    slow = Slow()
    writer = BackgroundWriter(slow)
    writer.put(1)
    assert slow.begun.wait(60)
    writer.put(2, replaceable=False)
    threading.Timer(0.2, slow.may_go_on.set).start()
    writer.put(3)
    writer.wait()
    return slow.written


def test_the_best_one_is_written_before_a_newer_one_waits(isolated: Callable[..., Any]) -> None:
    assert isolated(write_what_must_stay) == [1, 2, 3]


def fail_to_write() -> list[str]:
    from scaleflow.checkpoint.manager import BackgroundWriter

    def write(item: int) -> None:
        raise ValueError("no")

    writer, messages = BackgroundWriter(write), []
    writer.put(1)
    for again in (writer.wait, lambda: writer.put(2), writer.wait):
        try:
            again()
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def test_a_failure_is_told_to_whoever_comes_next(isolated: Callable[..., Any]) -> None:
    assert isolated(fail_to_write) == ["a checkpoint could not be written: ValueError: no"] * 3


def write_for_ever(place: str) -> list[Any]:
    """A disk that does not answer: what is saved meanwhile waits, and whoever needs it gives up in time."""
    import numpy as np

    from scaleflow.checkpoint import CheckpointManager
    from scaleflow.checkpoint import manager as manager_module

    manager_module.NOTE_SECONDS = 0.0
    told: list[str] = []
    kept = CheckpointManager(Checkpoint(write_seconds=0.3), place, lambda event: told.append(event.text))
    begun, never = threading.Event(), threading.Event()

    def write(snapshot: Snapshot) -> str:
        begun.set()
        never.wait()
        return ""

    kept._store.write = write  # type: ignore[method-assign]
    kept.save(Snapshot(1, {"a": np.array(1)}, NO_BEST))
    assert begun.wait(60)
    for step in (2, 3):
        kept.save(Snapshot(step, {"a": np.array(1)}, NO_BEST))  # does not wait
    messages = [*told]
    for wait in (
        kept.wait,
        lambda: kept.save(Snapshot(4, {}, NO_BEST), is_best=True),
        lambda: kept.save(Snapshot(5, {}, NO_BEST)),
    ):
        try:
            wait()
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def test_a_disk_that_does_not_answer_is_not_waited_for_for_ever(isolated: Callable[..., Any]) -> None:
    note, *errors = isolated(write_for_ever, "/far/checkpoints")
    assert note == (
        "writing a checkpoint to /far/checkpoints has taken 0 s so far; training continues, but no newer one is "
        "written before it is done"
    )
    assert (
        errors
        == [
            "a checkpoint was not written within checkpoint.write_seconds=0.3: /far/checkpoints does not answer; "
            "earlier checkpoints are unchanged"
        ]
        * 2
    )  # `best` takes the place of the one that waits, and the next one would have to wait for it
