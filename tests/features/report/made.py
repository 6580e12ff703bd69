"""Reports that tests make of predictions without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from scaleflow.evaluation.analysis import METRICS, analyse_predictions, write_metrics
from scaleflow.evaluation.predictions import PREDICTIONS, Predictions, load_predictions, save_predictions
from scaleflow.features.report.feature import ReportOptions
from scaleflow.features.report.findings import Finding, KnownOfRun
from scaleflow.features.report.page import make_report
from scaleflow.interfaces import EvaluationOptions
from scaleflow.interfaces.estimate import Estimate
from scaleflow.interfaces.hooks import KeptPredictions
from scaleflow.runs import RunFolder

Array = np.ndarray[Any, Any]


class Reader:
    """An `ExampleReader` of columns that are in memory."""

    inputs: Mapping[str, Any] = {}

    def __init__(self, pictures: Array | None = None, **columns: Array) -> None:
        self._columns = columns
        self._pictures = pictures

    def read_examples(self, examples: Array) -> tuple[Any, Any]:
        return {}, {}

    def preprocess(self, inputs: Any) -> Any:
        return inputs

    def add_columns(self, read: Callable[[Array], Mapping[str, Any]]) -> Reader:
        return self

    def read_columns(self, examples: Array) -> Mapping[str, Array]:
        return {name: values[examples] for name, values in self._columns.items()}

    def read_pictures(self, examples: Array) -> Array | None:
        return None if self._pictures is None else self._pictures[examples]


@dataclass(frozen=True)
class MadeReport:
    """A report, and its figures."""

    folder: Path
    estimates: Mapping[str, Estimate]
    findings: Sequence[Finding]
    files: Sequence[Path]

    @property
    def page(self) -> str:
        return (self.folder / "report.html").read_text()


def make_plan(evaluation: EvaluationOptions, options: ReportOptions) -> Any:
    """What a report asks of a plan."""
    return SimpleNamespace(evaluation=evaluation, of=lambda section: options)


def keep(
    folder: Path,
    predictions: Predictions,
    reader: Any = None,
    metrics: Any = None,
    options: ReportOptions | None = None,
    emit: Callable[[Any], object] = print,
    **evaluation: Any,
) -> KeptPredictions:
    """Predictions that were written into the folder of a run and read again, as features see them."""
    target = RunFolder(folder).evaluation
    target.mkdir(exist_ok=True)
    save_predictions(target / PREDICTIONS, predictions)
    kept = load_predictions(target / PREDICTIONS)
    chosen = EvaluationOptions(**evaluation)
    analysis = analyse_predictions(kept, chosen, metrics or {})
    (target / METRICS).write_text(write_metrics(kept, analysis))
    return KeptPredictions(
        plan=make_plan(chosen, options or ReportOptions()),
        folder=folder,
        title="a run",
        predictions=kept,
        analyse=lambda: analysis,
        reader=reader or Reader(),
        emit=emit,
    )


def report_in(
    folder: Path,
    predictions: Predictions,
    reader: Reader | None = None,
    known: KnownOfRun | None = None,
    metrics: Any = None,
    worst: int = 24,
    **evaluation: Any,
) -> MadeReport:
    """Makes the report of predictions in the folder of a run."""
    kept = keep(folder, predictions, reader, metrics, ReportOptions(worst=worst), **evaluation)
    report = make_report(kept, known or KnownOfRun())
    return MadeReport(RunFolder(folder).evaluation, kept.analyse().estimates, report.findings, report.files)
