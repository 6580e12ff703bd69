"""When hooks of features are called in a run that trains, and what their errors do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from scaleflow.interfaces.events import Note
from scaleflow.interfaces.features import Feature
from scaleflow.interfaces.hooks import TrainedRun, WorkerHook
from scaleflow.runs import EventReader, RunFolder
from scaleflow.worker import hooks as worker_hooks

WORDS = ("dataset=digits", "training.max_steps=2", "evaluation=none", "tracking=none", "debug=inline")


class Telling(WorkerHook):
    """Tells each call by a note."""

    emit: Callable[[Any], None]

    def at_ready(self, run: TrainedRun) -> None:
        self.emit = run.emit
        run.emit(Note(f"at_ready with {len(run.splits.train)} rows"))

    def at_end(self, run: TrainedRun) -> None:
        run.emit(Note(f"at_end with {run.objective.modes['loss']}"))

    def close(self) -> None:
        self.emit(Note("close"))


class Failing(WorkerHook):
    def at_ready(self, run: TrainedRun) -> None:
        raise ValueError("too early")

    def at_end(self, run: TrainedRun) -> None:
        raise ValueError("too late")

    def close(self) -> None:
        raise ValueError("not open")


def train(folder: Path, *words: str) -> tuple[str, list[str]]:
    """In a child: trains with hooks; returns the status, and the notes of hooks among the names of other events."""
    import os

    import scaleflow

    features = {
        "failing": Feature(name="failing", worker=f"{__name__}:Failing"),
        "telling": Feature(name="telling", worker=f"{__name__}:Telling"),
    }
    worker_hooks.list_features = lambda: features
    os.chdir(folder)
    result = scaleflow.run(*WORDS, *words, folder="run")
    told = []
    for event in EventReader(RunFolder(folder / "run").events).read():
        told.append(event.text if isinstance(event, Note) else type(event).__name__)
    return result.status, told


FAILURE = "the feature failing: missing, and the rest goes on (ValueError: {}"


def test_hooks_are_called_at_the_start_and_at_the_end_of_a_run(isolated: Callable[..., Any], tmp_path: Path) -> None:
    status, told = isolated(train, tmp_path)
    assert status == "FINISHED"
    calls = [each.partition(" (/")[0] for each in told]  # without the line of this file
    called = [each for each in calls if each.startswith(("at_", "close", "the feature"))]
    assert called == [
        FAILURE.format("too early"),
        "at_ready with 1294 rows",
        FAILURE.format("too late"),
        "at_end with min",
        FAILURE.format("not open"),
        "close",
    ]
    assert told.index("RunReady") < told.index("at_ready with 1294 rows")
    assert told.index("ModelExported") < told.index("at_end with min") < told.index("RunEnded") < told.index("close")


def test_hooks_are_closed_after_a_run_that_is_stopped(isolated: Callable[..., Any], tmp_path: Path) -> None:
    status, told = isolated(train, tmp_path, "checkpoint.max_seconds=0.001", "training.max_steps=null")
    assert status == "KILLED"
    assert not [each for each in told if each.startswith("at_end")]
    assert told[-1] == "close"
