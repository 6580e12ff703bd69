"""The recorded run of a command that trains nothing itself: the parent of the jobs of a sweep, or a pipeline."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence

from scaleflow.interfaces import Tracking, name_command
from scaleflow.interfaces.events import DescriptionSet, Event, RunReady
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.display import Display
from scaleflow.launcher.recording.recorder import Recorder
from scaleflow.runs import RunFolder
from scaleflow.runs.event_log import append_event
from scaleflow.tracking import make_tracker


class CommandRun:
    """A run whose events this process writes. A thread sends them to the store.

    Args:
        files: the folder of the run, which exists. The caller holds its lock of recording.
        is_resumed: whether an earlier command began the run.
        what: the run in messages, such as `the sweep's own run`.
    """

    def __init__(self, files: RunFolder, is_resumed: bool, what: str) -> None:
        self._files, self._is_resumed, self._what = files, is_resumed, what
        self._recorder: Recorder | None = None
        self._flush_seconds = 0.0

    @property
    def recorder(self) -> Recorder | None:
        """The thread that sends the events; None until this command has opened the run."""
        return self._recorder

    def emit(self, event: Event) -> None:
        """Appends an event to the run. Raises OSError if it cannot be written."""
        append_event(self._files.events, event)

    def open(self, ready: RunReady, tracking: Tracking, description: str = "", adopts: bool = True) -> None:
        """Opens the run and starts to record it in the store of `tracking`. The folder has its config.yaml.

        If it `adopts`, a new run continues the one that MLFLOW_RUN_ID names.
        """
        size_before = self._files.events.stat().st_size if self._files.events.exists() else 0
        tracker = make_tracker(tracking, adopts=adopts and not self._is_resumed)
        self._recorder = Recorder(
            tracker, self._files.events, size_before, is_resumed=self._is_resumed, offline=tracking.offline
        )
        self._flush_seconds = tracking.flush_seconds
        self.emit(ready)
        if description:
            self.emit(DescriptionSet(description))
        self._recorder.start()

    def finish(self, should_stop: Callable[[], bool]) -> bool:
        """Waits at most `tracking.flush_seconds`, or until `should_stop`; returns whether everything is recorded."""
        assert self._recorder is not None
        is_recorded = self._recorder.finish(self._flush_seconds, should_stop)
        if not is_recorded:
            Display(sys.stdout).print_error(
                f"{self._what} is not fully recorded: {mask_secrets(self._recorder.reason)}; nothing is lost; "
                f"to send the rest, run {name_command('sync')} {shlex.quote(os.path.relpath(self._files.path))}"
            )
        return is_recorded

    def describe_links(self) -> Sequence[tuple[str, str]]:
        """Returns rows of (label, value) that say where the recorded run can be seen."""
        return self._recorder.describe_links() if self._recorder else ()
