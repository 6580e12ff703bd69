"""When the report of a test is made, and what other features add to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.features.report import sections
from scaleflow.features.report.feature import ReportOptions
from scaleflow.features.report.hook import ReportHook
from scaleflow.features.report.launcher_hook import ReportFollower
from scaleflow.interfaces import EvaluationOptions
from scaleflow.interfaces.events import ArtifactWritten, Note, PhaseBegan
from scaleflow.interfaces.features import Feature
from scaleflow.interfaces.hooks import EvaluatedSplit, FollowedRun, KeptPredictions, ReportSection
from tests.evaluation.made import CLASSES, draw_predictions
from tests.features.report.made import keep, make_plan


def count_rows(kept: KeptPredictions) -> Sequence[ReportSection]:
    accuracy = kept.analyse().estimates["accuracy"]
    rows = [{"rows": len(kept.predictions.table), "accuracy": accuracy}]
    return [ReportSection("Rows", rows=rows), ReportSection("Words", html="<p>own words</p>"), ReportSection("Empty")]


def fail(kept: KeptPredictions) -> Sequence[ReportSection]:
    raise ValueError("odd predictions")


def add_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    features = {
        "broken": Feature(name="broken", report=f"{__name__}:fail"),
        "counting": Feature(name="counting", report=f"{__name__}:count_rows"),
        "plain": Feature(name="plain"),
        "unused": Feature(name="unused", report="no.such.module:sections", is_used=lambda plan: False),
    }
    monkeypatch.setattr(sections, "list_features", lambda: features)


def test_features_add_sections_and_an_error_in_one_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_sections(monkeypatch)
    events: list[Any] = []
    hook = ReportHook()
    hook.after_test(keep(tmp_path, draw_predictions(CLASSES, 100), emit=events.append))
    hook.finish_test()
    page = (tmp_path / "evaluation" / "report.html").read_text()
    assert "<h2>Rows</h2>" in page
    assert '<td class="number">100</td>' in page
    assert "<section><h2>Words</h2><p>own words</p></section>" in page
    assert "Empty" not in page
    (note,) = [each.text for each in events if isinstance(each, Note)]
    assert note.startswith(
        "the sections of the feature broken in the report: missing, and the rest goes on (ValueError: "
    )
    written = {Path(each.path).name for each in events if isinstance(each, ArtifactWritten)}
    assert {"report.html", "findings.json", "slices.csv", "mistakes.csv"} <= written
    assert isinstance(events[0], PhaseBegan)


def test_the_report_of_folds_has_the_sections_of_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_sections(monkeypatch)
    notes: list[str] = []
    plan = make_plan(EvaluationOptions(), ReportOptions())
    follower = ReportFollower(FollowedRun(plan, tmp_path, False, lambda: "name", notes.append))
    assert follower.describe_end() == []
    files = follower.after_folds(keep(tmp_path, draw_predictions(CLASSES, 100)))
    assert tmp_path / "evaluation" / "report.html" in files
    assert "own words" in (tmp_path / "evaluation" / "report.html").read_text()
    assert len(notes) == 1
    labels = [label for label, _ in follower.describe_end()]
    assert (labels[0], labels[-1]) == ("findings", "report")


def test_columns_of_slices_are_opened_before_the_test(tmp_path: Path) -> None:
    def open_columns(names: Sequence[str], key: str) -> Any:
        if names != ["town"]:
            raise ConfigError(f"{key}={names[0]}: there is no such column")
        return lambda places: {"town": np.where(places % 2, "ulm", "bonn")}

    def see(names: list[str] | None) -> ReportHook:
        plan = make_plan(EvaluationOptions(), ReportOptions(slices=names))
        rows: Any = SimpleNamespace(open_columns=open_columns)
        hook = ReportHook()
        hook.before_test(EvaluatedSplit(plan=plan, name="test", rows=rows))
        return hook

    see(None)
    see(["town"])
    with pytest.raises(ConfigError, match=r"evaluation\.slices=twon: there is no such column"):
        see(["twon"])


def test_without_figures_there_is_no_report(tmp_path: Path) -> None:
    def fail_to_analyse() -> Any:
        raise ValueError("no figures")

    events: list[Any] = []
    kept = keep(tmp_path, draw_predictions(CLASSES, 100), emit=events.append)
    kept = replace(kept, analyse=fail_to_analyse)
    hook = ReportHook()
    hook.after_test(kept)
    hook.finish_test()
    (note,) = [each.text for each in events if isinstance(each, Note)]
    assert note.startswith("evaluation: there is no report (ValueError: no figures")
