"""The figures of kept predictions are computed in a thread, and reported with their intervals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaleflow.interfaces import EvaluationOptions
from scaleflow.interfaces.events import ArtifactWritten, MetricsLogged, Note, PhaseBegan
from scaleflow.runs import RunFolder
from scaleflow.runs.state import BASELINE
from scaleflow.worker.analysis_thread import AnalysisThread, select_baseline
from tests.evaluation.made import CLASSES, draw_predictions


def make_thread(folder: Path) -> AnalysisThread:
    kept: Any = SimpleNamespace(options=EvaluationOptions(), metrics={"always": lambda targets, answers: 1.0})
    (folder / "evaluation").mkdir()
    return AnalysisThread(draw_predictions(CLASSES, 300), kept, RunFolder(folder))


def test_who_waits_for_figures_starts_their_computation(tmp_path: Path) -> None:
    thread = make_thread(tmp_path)
    analysis = thread.wait()
    thread.start()
    assert thread.wait() is analysis
    accuracy = analysis.estimates["accuracy"]
    events: list[Any] = []
    thread.finish(7, {"test/accuracy": accuracy.value, "test/loss": 1.5}, "test/", emit=events.append)
    written, logged = events
    assert written == ArtifactWritten(str(tmp_path / "evaluation" / "metrics.json"), "evaluation")
    recorded = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert recorded["outputs"][""]["metrics"]["accuracy"]["value"] == accuracy.value
    assert isinstance(logged, MetricsLogged)
    assert logged.step == 7
    assert logged.values == {
        "test/accuracy_low": accuracy.low,
        "test/accuracy_high": accuracy.high,
        "test/always": 1.0,
    }


def test_a_metric_that_differs_from_the_figure_of_its_name_has_no_interval(tmp_path: Path) -> None:
    thread = make_thread(tmp_path)
    events: list[Any] = []
    other = thread.wait().estimates["accuracy"].value * 1.1
    thread.finish(7, {"test/accuracy": other}, "test/", emit=events.append)
    assert list(events[-1].values) == ["test/always"]


def test_figures_that_cannot_be_computed_are_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scaleflow.evaluation import analysis

    def fail(*arguments: Any) -> Any:
        raise ValueError("no room")

    monkeypatch.setattr(analysis, "analyse_predictions", fail)
    thread = make_thread(tmp_path)
    events: list[Any] = []
    thread.finish(7, {}, "test/", emit=events.append)
    phase, note = events
    assert isinstance(phase, PhaseBegan)
    assert isinstance(note, Note)
    assert note.text.startswith("evaluation: there are no figures (ValueError: no room")
    with pytest.raises(ValueError, match="no room"):
        thread.wait()


def test_the_baseline_of_the_test_comes_before_that_of_the_validation() -> None:
    metrics = {f"{BASELINE}loss": 2.0, f"{BASELINE}test/loss": 3.0, "other": 1.0}
    assert select_baseline(metrics) == {"loss": 3.0}
    assert select_baseline({f"{BASELINE}loss": 2.0, "other": 1.0}) == {"loss": 2.0}
