"""Makes the report of a test: queries the model during the test, and makes the page during the export."""

from __future__ import annotations

import contextlib
import importlib
import threading
from dataclasses import replace
from typing import Any

from scaleflow.features.report.feature import ReportOptions
from scaleflow.features.report.thread import ReportThread
from scaleflow.interfaces.events import PhaseBegan
from scaleflow.interfaces.hooks import EvaluatedSplit, KeptPredictions, TrainedRun, WorkerHook
from scaleflow.runs import RunFolder
from scaleflow.worker.failures import guard

#: Modules that the report needs at the end of a run.
NEEDED_MODULES = ("scaleflow.features.report.page", "PIL.PngImagePlugin")


class ReportHook(WorkerHook):
    """Makes the report of the kept predictions."""

    def __init__(self) -> None:
        self._has_test = False
        self._read_slices: Any = None
        self._thread: ReportThread | None = None

    def before_test(self, split: EvaluatedSplit) -> None:
        """Opens the columns `evaluation.slices`. Raises ConfigError if the data lacks one."""
        self._has_test = True
        columns = split.plan.of(ReportOptions).slices
        if columns:
            self._read_slices = split.rows.open_columns(columns, "evaluation.slices")

    def at_ready(self, run: TrainedRun) -> None:
        """Imports the report's modules in the background during training, so that the end of the run need not wait."""
        if self._has_test and run.is_chief:
            threading.Thread(target=import_needed, name="import", daemon=True).start()

    def after_test(self, kept: KeptPredictions) -> None:
        """Measures what the model uses, and starts the report."""
        from scaleflow.features.report.findings import KnownOfRun

        if self._read_slices is not None:
            kept = replace(kept, reader=kept.reader.add_columns(self._read_slices))
        columns, mattered = ask_model(kept)
        known = KnownOfRun(
            train=kept.train,
            baseline=kept.baseline,
            together=kept.schema.get("together", ()),
            doubts=kept.doubts,
            columns=columns,
            mattered=mattered,
        )
        events = None if kept.predict is None else RunFolder(kept.folder).events
        self._thread = ReportThread(kept, known, events)
        self._thread.start()

    def finish_test(self) -> None:
        """Waits for the report and announces its files."""
        if self._thread is not None:
            self._thread.finish()


def import_needed() -> None:
    with contextlib.suppress(Exception):
        for name in NEEDED_MODULES:
            importlib.import_module(name)


def ask_model(kept: KeptPredictions) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """Returns the importance of columns and, with `evaluation=full`, what mattered in the worst mistakes.

    Both are empty for a model that this run did not train.
    """
    from scaleflow.features.report.importance import list_columns, measure_columns
    from scaleflow.features.report.occlusion import explain_mistakes

    columns: list[dict[str, Any]] = []
    mattered: dict[int, Any] = {}
    if kept.predict is None:
        return columns, mattered
    with guard("what the model uses, in the report", kept.emit):
        if kept.plan.of(ReportOptions).importance and list_columns(kept.reader.inputs):
            kept.emit(PhaseBegan("measuring the importance of the columns"))
            columns = measure_columns(kept)
        if kept.plan.evaluation.name == "full":
            kept.emit(PhaseBegan("looking for what mattered in the worst mistakes"))
            mattered = explain_mistakes(kept)
    return columns, mattered
