"""An extra that only informs ends no run: it fails, a note names what is missing, and the run is FINISHED."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces.extras import guard_extra
from scaleflow.runs import RunFolder

#: What a note names, by the function of the worker that makes the extra.
EXTRAS = {
    "report_metadata": "the description of the data and of the model",
    "write_data_files": "the list of the data's files",
    "start_analysis": "the kept predictions and the figures of the test",
    "report_confusion": "the confusion matrix",
}

WORDS = ("dataset=digits", "training.max_steps=2", "training.epochs=1", "tracking=none", "debug=inline")


def break_extras(folder: Path) -> tuple[str, list[str]]:
    """Trains while every extra of the worker fails; returns the status and the notes."""
    import os

    import scaleflow
    from scaleflow import training
    from scaleflow.interfaces.events import Note
    from scaleflow.runs import EventReader
    from scaleflow.worker import ready, train

    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("broken")

    for name in EXTRAS:
        module = ready if hasattr(ready, name) else train
        setattr(module, name, fail)
    training.baselines = fail
    os.chdir(folder)
    result = scaleflow.run(*WORDS)
    events = EventReader(RunFolder(Path(result.folder)).events).read()
    return result.status, [each.text for each in events if isinstance(each, Note)]


def test_no_extra_of_the_worker_ends_a_run(isolated: Callable[..., Any], tmp_path: Path) -> None:
    status, notes = isolated(break_extras, tmp_path)
    assert status == "FINISHED"
    missing = " ".join(note for note in notes if "missing, and the rest goes on (RuntimeError: broken" in note)
    assert [name for name in EXTRAS.values() if name not in missing] == []


def test_a_guard_tells_what_is_missing_and_passes_what_is_not_its_own() -> None:
    told: list[str] = []
    with guard_extra("the picture", told.append):
        raise KeyError("x")
    assert told[0].startswith("the picture: missing, and the rest goes on (KeyError: 'x'")
    with pytest.raises(OSError, match="lost"), guard_extra("it", told.append, lambda e: isinstance(e, OSError)):
        raise OSError("lost")

    def cannot(text: str) -> None:
        raise OSError("full")

    with guard_extra("it", cannot):
        raise ValueError("y")
    with pytest.raises(KeyboardInterrupt), guard_extra("it", told.append):
        raise KeyboardInterrupt
