"""Fits the baselines of a table during training, and reports their metrics at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.features.baselines.data import write_baseline_data
from scaleflow.features.baselines.feature import BaselineOptions
from scaleflow.features.baselines.files import BaselineFiles
from scaleflow.features.baselines.fit import FAILED_FIT
from scaleflow.features.baselines.models import BOOSTING, LINEAR
from scaleflow.features.baselines.process import BaselineProcess, start_process
from scaleflow.interfaces import Objective, Plan
from scaleflow.interfaces.events import Emit, MetricsLogged, Note, PhaseBegan
from scaleflow.interfaces.extras import guard_extra
from scaleflow.interfaces.hooks import TrainedRun, WorkerHook
from scaleflow.worker.failures import guard

#: How notes name the baselines.
BASELINES = "boosting and the linear model, to compare with"


class BaselinesHook(WorkerHook):
    """Writes the rows for the baselines, and starts and awaits the process that fits them."""

    def __init__(self) -> None:
        self._process = BaselineProcess()

    def after_build(self, run: TrainedRun, export: Callable[[Path], object]) -> None:
        """Writes the rows of a new run. Does nothing for jobs of a sweep, which share their data.

        Raises ConfigError if it reads a row that cannot be used, because training would read it as well.
        """
        if not run.is_chief or run.is_resumed or run.is_job or not wants_baselines(run.plan):
            return
        max_rows = run.plan.of(BaselineOptions).baselines
        keeps_outputs = bool(run.plan.objective.metrics) and run.plan.objective.levels is None
        with guard_extra(BASELINES, lambda text: run.emit(Note(text)), lambda error: isinstance(error, ConfigError)):
            write_baseline_data(run.splits, max_rows, BaselineFiles(run.folder).rows, keeps_outputs)

    def at_ready(self, run: TrainedRun) -> None:
        """Starts fitting the baselines if their rows exist, even if an earlier, stopped command wrote them."""
        if not run.is_chief or not BaselineFiles(run.folder).rows.exists():
            return
        with guard_extra(BASELINES, lambda text: run.emit(Note(text))):
            self._process = start_process(run.folder)

    def at_end(self, run: TrainedRun) -> None:
        """Waits for the baselines and reports their metrics."""
        with guard(BASELINES, run.emit):
            if self._process.is_alive:
                run.emit(PhaseBegan("fitting boosting and a linear model, to compare with"))
            if self._process.wait(run.should_stop):
                report_baselines(BaselineFiles(run.folder), self._process.failure, run.objective, run.emit)
            else:
                run.emit(Note(f"{BASELINES}, were not fitted, because the run was stopped"))

    def close(self) -> None:
        """Ends the process. If the run was stopped, a resumed run will fit the baselines."""
        self._process.end()


def wants_baselines(plan: Plan) -> bool:
    return plan.of(BaselineOptions).baselines > 0 and plan.evaluation.name != "none" and not plan.debug.fast


def report_baselines(files: BaselineFiles, failure: str | None, objective: Objective, emit: Emit) -> None:
    """Reports the metrics of the baselines, or why they are missing. Reports nothing if the run has no baselines.

    Args:
        failure: how the fitting process died; None: it did not.
    """
    if failure is not None:
        files.rows.unlink(missing_ok=True)
        emit(Note(f"{BASELINES}: missing, and the rest goes on ({failure})"))
        return
    values = read_metrics(files)
    if values is None:
        return
    if FAILED_FIT in values:
        emit(Note(f"{BASELINES}: missing, and the rest goes on ({values[FAILED_FIT]})"))
        return
    if files.outputs.exists():
        values = {**measure_kept_outputs(files, objective), **values}
        files.outputs.unlink(missing_ok=True)
    emit(MetricsLogged(0, {f"baseline/{name}": value for name, value in values.items()}))


def read_metrics(files: BaselineFiles) -> dict[str, Any] | None:
    """Returns the content of the file of metrics, or None without a readable file."""
    try:
        values: dict[str, Any] = json.loads(files.metrics.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values


def measure_kept_outputs(files: BaselineFiles, objective: Objective) -> dict[str, float]:
    """Returns metrics of the baselines' outputs, such as `boosting/auc`, without the loss."""
    from scaleflow import training

    with np.load(files.outputs) as file:
        arrays = dict(file)
    targets = arrays["targets"]
    if arrays[BOOSTING].shape[1] == 1:
        targets = targets.astype(np.float32)[:, None]
    values: dict[str, float] = {}
    for model in (BOOSTING, LINEAR):
        measured = training.measure_outputs(objective, targets, arrays[model], weights=arrays.get("weights"))
        for name, value in measured.items():
            if name != "loss" and np.isfinite(value):
                values[f"{model}/{name}"] = value
    return values
