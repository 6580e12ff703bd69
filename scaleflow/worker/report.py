"""Makes the report of kept predictions in a thread, while the model is exported."""

from __future__ import annotations

import contextlib
import importlib
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.errors import read_reason
from scaleflow.interfaces import EvaluationOptions
from scaleflow.interfaces.events import ArtifactWritten, Emit, EpochEnded, MetricsLogged, Note, StageBegan
from scaleflow.runs import EventReader, RunSpec
from scaleflow.runs.run_name import make_run_name
from scaleflow.runs.state import BASELINE
from scaleflow.worker.importance import explain_mistakes, list_permuted, measure_columns
from scaleflow.worker.kept_predictions import KeptSplit, keep_predictions

if TYPE_CHECKING:
    import numpy as np

    from scaleflow.evaluation.findings import KnownOfRun
    from scaleflow.evaluation.predictions import Predictions
    from scaleflow.evaluation.report import ModelReport
    from scaleflow.training import Engine, SessionResult, WorkerSync
    from scaleflow.worker.build import TrainingSetup

    Array = np.ndarray[Any, Any]
    Curves = Mapping[str, Sequence[tuple[float, float]]]

#: The metric of callbacks that change the learning rate, and the most points of the curve of a schedule.
LEARNING_RATE, MOST_POINTS = "learning_rate", 200

#: Seconds that the end of a run waits for the user's code that makes the layers of a model again.
LOAD_SECONDS = 30.0


class ReportThread:
    """Makes the report of predictions in the background.

    Args:
        predictions: of the split.
        kept: the split.
        options: the config group `evaluation`.
        context: what is known of the run besides; None: nothing.
        folder: for the files; it exists.
        title: names the run.
        read_curves: returns points of metrics, and what their first numbers count.
    """

    def __init__(
        self,
        predictions: Predictions,
        kept: KeptSplit,
        options: EvaluationOptions,
        context: KnownOfRun | None,
        folder: Path,
        title: str,
        read_curves: Callable[[], tuple[Curves, str]] | None = None,
    ) -> None:
        self._predictions, self._options, self._context = predictions, options, context
        self._rest = kept.reader, folder, title
        self._folder, self._read_curves = folder, read_curves
        self._report: ModelReport | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._make, name="report", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        from scaleflow.evaluation.report import make_report

        context = self._context
        try:
            if context is not None and self._read_curves is not None:
                curves, unit = self._read_curves()
                context = replace(context, curves=curves, curve_unit=unit)
            self._report = make_report(self._predictions, self._options, context, *self._rest)
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
            emit(Note(f"evaluation: there is no report ({type(error).__name__}: {read_reason(error)})"))
            return
        for path in self._report.files:
            emit(ArtifactWritten(str(self._folder / path), str(Path(self._folder.name) / path.parent)))
        emit_intervals(self._report, step, metrics, prefix, emit)


class LoadCheck(threading.Thread):
    """Loads the exported Keras file in the background, as `evaluate` will.

    Args:
        folder: of the exported model.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(name="load", daemon=True)
        self._folder = folder
        self._fault: str | None = None
        self.start()

    def run(self) -> None:
        from scaleflow.model import find_load_fault

        self._fault = find_load_fault(self._folder)

    def finish(self, emit: Emit) -> None:
        """Waits for it, and reports what `evaluate` will say."""
        self.join(LOAD_SECONDS)
        if self._fault:
            emit(Note(f"model: scaleflow.evaluate and model.init_from cannot load its .keras file: {self._fault}"))


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
    rate = find_rate(setup.engine)
    return ReportThread(
        predictions,
        setup.kept,
        options,
        context,
        spec.files.evaluation,
        title,
        lambda: read_curves(spec.files.events, rate, result.steps),
    )


def find_rate(engine: Engine) -> Callable[[Array], Array] | None:
    """Returns the learning rate as a function of steps [n]; None if the user's training step has its own optimizers."""
    import numpy as np

    inner = getattr(engine.optimizer, "inner_optimizer", engine.optimizer)
    if inner is None:
        return None
    rate = inner._learning_rate
    if callable(rate):
        return lambda steps: np.asarray(rate(steps))
    value = float(np.asarray(inner.learning_rate))
    return lambda steps: np.full(len(steps), value)


def read_curves(events: Path, rate: Callable[[Array], Array] | None, steps: int) -> tuple[Curves, str]:
    """Returns points (epoch, value) of the metrics of training and validation, and of the learning rate, and "epoch".

    A run of one epoch has those of its calls, by step.
    """
    import numpy as np

    calls: dict[str, list[tuple[float, float]]] = {}
    epochs: dict[str, list[tuple[float, float]]] = {}
    ends: list[int] = []
    for event in EventReader(events).read():
        if isinstance(event, MetricsLogged):
            for name, value in event.values.items():
                calls.setdefault(name, []).append((event.step, value))
        elif isinstance(event, EpochEnded):
            ends.append(event.step)
            for name, value in event.values.items():
                epochs.setdefault(name, []).append((event.step, value))
    is_by_epoch = len(ends) > 1
    curves = {name: points for name, points in calls.items() if name.startswith("val/") or name == LEARNING_RATE}
    curves |= {n: points for n, points in (epochs if is_by_epoch else calls).items() if n.startswith("train/")}
    if LEARNING_RATE not in curves and rate is not None:
        places = np.unique(np.linspace(0, max(0, steps - 1), MOST_POINTS).astype(int))
        curves[LEARNING_RATE] = list(zip(places.tolist(), rate(places).tolist(), strict=True))
    unit = ends[0] if is_by_epoch else 1
    scaled = {name: [(step / unit, value) for step, value in points] for name, points in curves.items()}
    return scaled, "epoch" if is_by_epoch else "step"


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
        emit(Note(f"evaluation: what the model uses cannot be measured ({read_reason(error)})"))
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
