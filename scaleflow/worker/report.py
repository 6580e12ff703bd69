"""Makes the report of kept predictions in a thread, while the model is exported."""

from __future__ import annotations

import contextlib
import importlib
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.errors import first_line
from scaleflow.interfaces import EvaluationOptions
from scaleflow.interfaces.events import ArtifactWritten, Emit, MetricsLogged, Note, StageBegan
from scaleflow.runs import RunSpec
from scaleflow.runs.run_name import make_run_name
from scaleflow.runs.state import BASELINE
from scaleflow.worker.importance import explain_mistakes, list_permuted, measure_columns
from scaleflow.worker.kept_predictions import KeptSplit, keep_predictions

if TYPE_CHECKING:
    from scaleflow.evaluation.findings import KnownOfRun
    from scaleflow.evaluation.predictions import Predictions
    from scaleflow.evaluation.report import ModelReport
    from scaleflow.training import SessionResult, WorkerSync
    from scaleflow.worker.build import TrainingSetup


class ReportThread:
    """Makes the report of predictions in the background.

    Args:
        predictions: of the split.
        kept: the split.
        options: the config group `evaluation`.
        context: what is known of the run besides; None: nothing.
        folder: for the files; it exists.
        title: names the run.
    """

    def __init__(
        self,
        predictions: Predictions,
        kept: KeptSplit,
        options: EvaluationOptions,
        context: KnownOfRun | None,
        folder: Path,
        title: str,
    ) -> None:
        self._arguments = predictions, options, context, kept.reader, folder, title
        self._folder = folder
        self._report: ModelReport | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._make, name="report", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        from scaleflow.evaluation.report import make_report

        try:
            self._report = make_report(*self._arguments)
        except Exception as error:  # a report that cannot be made ends no run
            traceback.print_exc()
            self._error = error

    def finish(self, step: int, metrics: Mapping[str, float], prefix: str, emit: Emit) -> None:
        """Waits for the report, and reports its files, and the intervals of metrics.

        Args:
            step: at which the metrics were measured.
            metrics: of the split.
            prefix: of their names, such as `test/`.
            emit: receives the events.
        """
        self._thread.join()
        if self._report is None:
            error = self._error or RuntimeError("it was not made")
            emit(Note(f"evaluation: there is no report ({type(error).__name__}: {first_line(error)})"))
            return
        for path in self._report.files:
            emit(ArtifactWritten(str(self._folder / path), str(Path(self._folder.name) / path.parent)))
        emit_intervals(self._report, step, metrics, prefix, emit)


def begin_report(
    spec: RunSpec, setup: TrainingSetup, result: SessionResult, worker_sync: WorkerSync, emit: Emit
) -> ReportThread | None:
    """Keeps the predictions of the test, and begins their report, on the chief. All workers must call it."""
    if setup.kept is None:
        return None
    facts = setup.facts
    predictions = keep_predictions(
        setup.kept, spec.files.evaluation, worker_sync, spec.worker, facts.learned.splits, emit
    )
    if predictions is None:
        return None
    from scaleflow.evaluation.findings import KnownOfRun

    baseline = {} if facts.metadata is None else facts.metadata.baseline
    prefix = f"{BASELINE}test/" if any(name.startswith(f"{BASELINE}test/") for name in baseline) else BASELINE
    options = spec.plan.evaluation
    columns, mattered = ask_model(setup, predictions, options, emit)
    context = KnownOfRun(
        train={name.removeprefix("train/"): value for name, value in result.train.items()},
        baseline={k.removeprefix(prefix): v for k, v in baseline.items() if k.startswith(prefix)},
        doubts=facts.doubts,
        columns=columns,
        mattered=mattered,
    )
    title = make_run_name(spec.plan, facts.resolved, spec.label)
    return ReportThread(predictions, setup.kept, options, context, spec.files.evaluation, title)


def ask_model(
    setup: TrainingSetup, predictions: Predictions, options: EvaluationOptions, emit: Emit
) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """Returns the importance of columns, and with `evaluation=full` what mattered in the worst mistakes."""
    assert setup.kept is not None
    columns: list[dict[str, Any]] = []
    mattered: dict[int, Any] = {}
    try:
        if list_permuted(setup.kept.reader.inputs) and options.importance:
            emit(StageBegan("measuring the importance of the columns"))
            columns = measure_columns(setup.engine, setup.kept, predictions, options.importance, options.seconds)
        if options.name == "full":
            emit(StageBegan("looking for what mattered in the worst mistakes"))
            mattered = explain_mistakes(setup.engine, setup.kept, predictions, options.worst, options.seconds)
    except Exception as error:  # a model that cannot be asked again ends no run
        traceback.print_exc()
        emit(Note(f"evaluation: what the model uses cannot be measured ({first_line(error)})"))
    return columns, mattered


def import_ahead(setup: TrainingSetup) -> None:
    """Imports the modules of a report in the background while the run trains, so that its end need not wait."""

    def load() -> None:
        with contextlib.suppress(Exception):
            importlib.import_module("scaleflow.evaluation.report")
            importlib.import_module("scaleflow.evaluation.tables")
            importlib.import_module("PIL.PngImagePlugin")

    if setup.kept is not None and setup.facts.metadata is not None:  # on the chief
        threading.Thread(target=load, name="import", daemon=True).start()


def emit_intervals(report: ModelReport, step: int, metrics: Mapping[str, float], prefix: str, emit: Emit) -> None:
    """Reports the ends of the intervals of metrics, such as `test/accuracy`, that are figures of the report, too."""
    values: dict[str, float] = {}
    for name, value in metrics.items():
        figure = report.figures.get(name.removeprefix(prefix))
        if figure is not None and figure.low == figure.low and abs(figure.value - value) <= 0.02 * abs(value) + 1e-6:
            values |= {f"{name}_low": figure.low, f"{name}_high": figure.high}
    if values:
        emit(MetricsLogged(step, values))
