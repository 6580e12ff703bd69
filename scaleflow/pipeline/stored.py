"""Looks up whether the runs and the models of finished stages still exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError, RunMissing
from scaleflow.interfaces import Tracking
from scaleflow.pipeline.state import StageRecord
from scaleflow.tracking.model_uris import resolve_reference
from scaleflow.tracking.store import MlflowTracker

#: A registered model by an alias, which may move.
ALIAS = re.compile(r"models:/[^/@\s'\"]+@[\w-]+")


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
        for file in filter(None, (outputs.get("file"), *record.files)):
            if not Path(file).exists():
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

    def fix_aliases(self, text: str) -> str:
        """Replaces `models:/NAME@ALIAS` in a text by the model that it names now; an alias that names none stays."""
        return ALIAS.sub(lambda found: self._find_model(found[0]), text) if self._tracking.name != "none" else text

    def _find_model(self, uri: str) -> str:
        try:
            return f"models:/{resolve_reference(uri, str(self._connect().uri)).model_id}"
        except ConfigError:  # the command of the stage says why
            return uri

    def _connect(self) -> MlflowTracker:
        if self._tracker is None:
            self._tracker = MlflowTracker(self._tracking)
            self._tracker.connect()
        tracker: MlflowTracker = self._tracker
        return tracker
