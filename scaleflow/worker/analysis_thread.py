"""Computes the metrics of kept predictions in a thread while the model is exported, and reports them."""

from __future__ import annotations

import contextlib
import importlib
import threading
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

from scaleflow.errors import read_reason
from scaleflow.interfaces.events import ArtifactWritten, Emit, MetricsLogged, Note, PhaseBegan
from scaleflow.interfaces.hooks import KeptPredictions
from scaleflow.runs import RunFolder
from scaleflow.runs.run_name import make_run_name
from scaleflow.runs.state import BASELINE
from scaleflow.worker.hooks import call_after_test
from scaleflow.worker.kept_predictions import KeptSplit, keep_predictions

if TYPE_CHECKING:
    from scaleflow.evaluation.analysis import Analysis
    from scaleflow.evaluation.predictions import Predictions
    from scaleflow.training import SessionResult
    from scaleflow.worker.build import TrainingSetup
    from scaleflow.worker.trainer import Trainer

#: Maximum relative difference between a metric of training and the same metric of kept predictions.
SAME_SHARE = 0.02


class AnalysisThread:
    """Computes the metrics of kept predictions in the background.

    Attributes:
        prefix: the prefix of the split's metrics, `test/` or `val/`.
    """

    def __init__(self, predictions: Predictions, kept: KeptSplit, files: RunFolder) -> None:
        self.prefix = "test/" if predictions.split == "test" else "val/"
        self._predictions = predictions
        self._kept = kept
        self._files = files
        self._analysis: Analysis | None = None
        self._error: Exception | None = None
        self._is_started = False
        self._lock = threading.Lock()
        self._is_done = threading.Event()

    def start(self) -> None:
        """Starts the computation, unless it has already started."""
        with self._lock:
            if not self._is_started:
                self._is_started = True
                threading.Thread(target=self._compute, name="analysis", daemon=True).start()

    def _compute(self) -> None:
        try:
            from scaleflow.evaluation.analysis import analyse_predictions

            self._analysis = analyse_predictions(self._predictions, self._kept.options, self._kept.metrics)
        except Exception as error:  # a failure here does not end the run
            traceback.print_exc()
            self._error = error
        self._is_done.set()

    def wait(self) -> Analysis:
        """Waits for the metrics and returns them. Raises the error of their computation."""
        self.start()
        self._is_done.wait()
        if self._analysis is None:
            raise self._error or RuntimeError("they were not computed")
        return self._analysis

    def finish(self, step: int, metrics: Mapping[str, float], prefix: str, emit: Emit) -> None:
        """Waits for the metrics. Reports their file, and the intervals of `metrics`, whose names have a prefix."""
        from scaleflow.evaluation.analysis import METRICS, write_metrics

        if not self._is_done.is_set():
            emit(PhaseBegan("computing the figures of the test"))
        try:
            analysis = self.wait()
        except Exception as error:
            emit(Note(f"evaluation: there are no figures ({type(error).__name__}: {read_reason(error)})"))
            return
        path = self._files.evaluation / METRICS
        path.write_text(write_metrics(self._predictions, analysis), encoding="utf-8")
        emit(ArtifactWritten(str(path), self._files.evaluation.name))
        values = find_intervals(analysis, metrics, prefix)
        if values:
            emit(MetricsLogged(step, values))


def find_intervals(analysis: Analysis, metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Returns the interval bounds of metrics, such as `test/accuracy_low`, and the user's own metrics.

    Args:
        metrics: the run's metrics, by name with prefix.
    """
    values: dict[str, float] = {}
    for name in analysis.own:
        if f"{prefix}{name}" not in metrics:
            values[f"{prefix}{name}"] = analysis.estimates[name].value
    for name, value in {**metrics, **values}.items():
        estimate = analysis.estimates.get(name.removeprefix(prefix))
        if estimate is None or estimate.low != estimate.low:  # NaN: no interval
            continue
        if abs(estimate.value - value) <= SAME_SHARE * abs(value) + 1e-6:
            values[f"{name}_low"] = estimate.low
            values[f"{name}_high"] = estimate.high
    return values


def start_analysis(trainer: Trainer, result: SessionResult) -> AnalysisThread | None:
    """Keeps the test predictions, passes them to features, and starts the computation of their metrics on the chief.

    All workers must call it.
    """
    spec = trainer.spec
    setup = trainer.setup
    if setup.kept is None:
        return None
    facts = setup.facts
    predictions = keep_predictions(
        setup.kept,
        spec.files.evaluation,
        trainer.worker_sync,
        worker=spec.worker,
        described=facts.learned.splits,
        emit=trainer.emit,
    )
    if predictions is None:
        return None
    thread = AnalysisThread(predictions, setup.kept, spec.files)
    kept = KeptPredictions(
        plan=spec.plan,
        folder=spec.folder,
        title=make_run_name(spec.plan, facts.resolved, spec.label),
        predictions=predictions,
        analyse=thread.wait,
        reader=setup.kept.reader,
        emit=trainer.emit,
        predict=setup.engine.predict,
        train={name.removeprefix("train/"): value for name, value in result.train.items()},
        baseline={} if facts.metadata is None else select_baseline(facts.metadata.baseline),
        schema=facts.learned.schema,
        doubts=facts.doubts,
    )
    call_after_test(setup.hooks, kept)
    thread.start()
    return thread


def select_baseline(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of the best constant answer on the test split; without a test split, on validation."""
    prefix = f"{BASELINE}test/"
    if not any(name.startswith(prefix) for name in metrics):
        prefix = BASELINE
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def import_ahead(setup: TrainingSetup) -> None:
    """Imports the modules that compute metrics in the background during training, so that the end need not wait."""

    def load() -> None:
        with contextlib.suppress(Exception):
            importlib.import_module("scaleflow.evaluation.analysis")

    if setup.kept is not None and setup.facts.metadata is not None:  # on the chief
        threading.Thread(target=load, name="import", daemon=True).start()
