"""Looks up whether the runs and the models of finished stages still exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scaleflow.errors import RunMissing
from scaleflow.interfaces import Tracking
from scaleflow.pipeline.state import StageRecord
from scaleflow.tracking.store import MlflowTracker


class StoredRuns:
    """The store of a pipeline; it is connected when it is asked first.

    Args:
        tracking: the options of the store, with its address.
    """

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking
        self._tracker: Any = None

    def find_loss(self, record: StageRecord) -> str:
        """Says what of a finished stage is gone; empty if nothing is.

        Raises ConfigError if the store does not answer.
        """
        outputs = record.outputs
        if (file := outputs.get("file")) and not Path(file).exists():
            return f"{file} is gone"
        if self._tracking.name == "none":
            folder = outputs.get("folder")
            return f"{folder} is gone" if folder and not Path(folder).is_dir() else ""
        run_id = outputs.get("run_id")
        if run_id is None:
            return ""
        try:
            self._connect().adopt(run_id)
        except RunMissing:
            return f"its run {run_id} was deleted"
        return ""

    def _connect(self) -> MlflowTracker:
        if self._tracker is None:
            self._tracker = MlflowTracker(self._tracking)
            self._tracker.connect()
        tracker: MlflowTracker = self._tracker
        return tracker
