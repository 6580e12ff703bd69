"""An extra that only informs ends no run: it fails, a note names what is missing, and the run is FINISHED."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scaleflow.features.baselines.fit import fit_and_write
from scaleflow.interfaces import FAILED_FIT, Inputs, Outputs
from scaleflow.interfaces.extras import guard_extra
from scaleflow.runs import RunFolder

#: What a note names, by the function of the worker that makes the extra.
EXTRAS = {
    "write_baseline_data": "boosting and the linear model",
    "report_metadata": "the description of the data and of the model",
    "write_data_files": "the list of the data's files",
    "write_sheet": "the sheet of augmented examples",
    "begin_report": "the kept predictions and the report of the test",
    "report_confusion": "the confusion matrix",
    "report_baselines": "boosting and the linear model",
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


def count_baselines(names: list[str]) -> list[str]:
    """The options of `evaluation`, of some, with which a run writes the rows for baselines."""
    from scaleflow.worker import train

    written: list[str] = []
    for name in names:
        plan = SimpleNamespace(
            evaluation=SimpleNamespace(name=name, baselines=100),
            objective=SimpleNamespace(metrics=None, levels=None),
            debug=SimpleNamespace(fast=False),
        )
        spec: Any = SimpleNamespace(plan=plan, records=True, is_resumed=False, parent=None, files=None)
        facts, source = SimpleNamespace(metadata=1), SimpleNamespace(outputs=None)
        setup: Any = SimpleNamespace(facts=facts, splits=None, source=source)
        train.write_baseline_data = lambda *a, of=name, **b: written.append(of)  # type: ignore[assignment,misc]
        trainer: Any = SimpleNamespace(spec=spec, setup=setup, plan=plan, emit=print)
        train.write_baselines(trainer)
    return written


def test_without_an_evaluation_no_baselines_are_fitted(isolated: Callable[..., Any]) -> None:
    assert isolated(count_baselines, ["default", "none", "full"]) == ["default", "full"]


def write_texts(folder: Path) -> str:
    from scaleflow.features.baselines.data import write_baseline_data

    inputs = {"town": Inputs((), "string"), "size": Inputs((), "float32")}
    splits: Any = SimpleNamespace(test=object(), folds=0, inputs=inputs)
    try:
        write_baseline_data(splits, Outputs("binary", (1,)), 100, RunFolder(folder))
    except ValueError as error:
        return str(error)
    return ""


def test_a_text_has_no_baseline_that_learns(tmp_path: Path) -> None:
    assert write_texts(tmp_path) == "the input town is text, and they take numbers"


def test_baselines_that_cannot_be_fitted_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scaleflow.features.baselines import models as baseline_models

    def fail(*arguments: Any) -> Any:
        raise MemoryError("no memory")

    files = RunFolder(tmp_path)
    data = baseline_models.BaselineData(*(np.zeros((4, 2)), np.zeros(4)) * 2, classes=0)
    data.save(files.baseline_data)
    monkeypatch.setattr(baseline_models, "fit_baselines", fail)
    fit_and_write(files.baseline_data, files.baselines, files.baseline_outputs)
    assert not files.baseline_data.exists()
    assert json.loads(files.baselines.read_text())[FAILED_FIT].startswith("MemoryError: no memory")
