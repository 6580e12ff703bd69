"""What hooks of features see of the model, and what their errors do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError, ExportError
from scaleflow.interfaces.hooks import TrainedRun, WorkerHook
from scaleflow.worker.hooks import call_after_build, call_after_export


class Seeing(WorkerHook):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def after_build(self, run: TrainedRun, export: Callable[[Path], object]) -> None:
        export(run.folder)

    def after_export(self, run: TrainedRun, step: int) -> None:
        self.seen.append((run.folder, step))


class Failing(WorkerHook):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def after_build(self, run: TrainedRun, export: Callable[[Path], object]) -> None:
        raise self.error

    def after_export(self, run: TrainedRun, step: int) -> None:
        raise self.error


def make_run(folder: Path, emit: Callable[[Any], None]) -> TrainedRun:
    nothing: Any = None
    return TrainedRun(
        plan=nothing,
        folder=folder,
        log=folder / "log",
        is_chief=True,
        is_resumed=False,
        is_job=False,
        splits=nothing,
        objective=nothing,
        emit=emit,
        should_stop=bool,
    )


def test_an_error_of_a_hook_is_a_note_and_the_other_hooks_see_the_model(isolated: Any, tmp_path: Path) -> None:
    notes, exported, seeing = isolated(call_both, tmp_path)
    assert exported == [tmp_path]
    assert seeing == [(tmp_path, 7)]
    assert len(notes) == 2
    for note in notes:
        assert note.text.startswith("the feature odd: missing, and the rest goes on (ValueError: odd model")


def call_both(folder: Path) -> tuple[list[Any], list[Path], list[Any]]:
    """In a child, as errors are compared with those of TensorFlow."""
    notes: list[Any] = []
    exported: list[Path] = []
    seeing = Seeing()
    hooks = {"odd": Failing(ValueError("odd model")), "seeing": seeing}
    run = make_run(folder, notes.append)
    call_after_build(hooks, run, exported.append)
    call_after_export(hooks, run, 7)
    return notes, exported, seeing.seen


@pytest.mark.parametrize("error", [ConfigError("export.formats: odd"), ExportError("the SavedModel differs")])
def test_a_hook_can_refuse_the_run_when_the_model_is_built(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        call_after_build({"strict": Failing(error)}, make_run(tmp_path, print), print)
