"""Makes the report of kept predictions in a thread, while the model is exported."""

from __future__ import annotations

import threading
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scaleflow.errors import read_reason
from scaleflow.interfaces.events import ArtifactWritten, Note, PhaseBegan
from scaleflow.interfaces.hooks import KeptPredictions
from scaleflow.runs import RunFolder

if TYPE_CHECKING:
    from scaleflow.features.report.findings import KnownOfRun
    from scaleflow.features.report.page import ModelReport


class ReportThread(threading.Thread):
    """Makes the report in the background.

    Args:
        kept: the predictions.
        known: further facts about the run.
        events: the run's file of events, with the learning curves; None: no curves.
    """

    def __init__(self, kept: KeptPredictions, known: KnownOfRun, events: Path | None) -> None:
        super().__init__(name="report", daemon=True)
        self._kept = kept
        self._known = known
        self._events = events
        self._report: ModelReport | None = None
        self._error: Exception | None = None
        self._notes: list[str] = []

    def run(self) -> None:
        try:
            from scaleflow.features.report import page
            from scaleflow.features.report.curves import read_curves
            from scaleflow.features.report.sections import make_added_sections

            known = self._known
            if self._events is not None:
                curves, unit = read_curves(self._events)
                known = replace(known, curves=curves, curve_unit=unit)
            self._kept.analyse()  # added sections may use its results
            added = make_added_sections(self._kept, self._notes.append)
            self._report = page.make_report(self._kept, known, added)
        except Exception as error:  # a failed report must not end the run
            traceback.print_exc()
            self._error = error

    def finish(self) -> None:
        """Waits for the report, then announces its files, or what is missing."""
        emit = self._kept.emit
        emit(PhaseBegan("making the report"))
        self.join()
        for text in self._notes:
            emit(Note(text))
        if self._report is None:
            error = self._error or RuntimeError("it was not made")
            emit(Note(f"evaluation: there is no report ({type(error).__name__}: {read_reason(error)})"))
            return
        folder = RunFolder(self._kept.folder).evaluation
        for path in self._report.files:
            emit(ArtifactWritten(str(folder / path), str(Path(folder.name) / path.parent)))
