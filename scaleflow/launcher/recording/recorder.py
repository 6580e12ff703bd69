"""Records a run during training: a thread sends its events to the tracking store.

After the start, neither training nor the terminal waits for it. More threads make reports (`reports.py`). Commands that
do not train also have recorded runs: the parent of a sweep's jobs, a pipeline, or one of its stages.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from scaleflow.errors import ConfigError, StoreUnreachable
from scaleflow.interfaces import Status, Tracking, name_command
from scaleflow.interfaces.clock import CLOCK
from scaleflow.interfaces.events import (
    ArtifactWritten,
    DescriptionSet,
    Event,
    MetricsLogged,
    RunEnded,
    RunReady,
    TagsSet,
)
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.display import Display
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.launcher.recording.reports import append_report
from scaleflow.launcher.recording.store_transfer import EventTransfer
from scaleflow.runs import RunFolder, RunState
from scaleflow.runs.event_log import append_event
from scaleflow.tracking import make_tracker
from scaleflow.tracking.active_run import find_active_run
from scaleflow.tracking.connection import format_store_error, is_unreachable

PASS_SECONDS = 1.0
MAX_PAUSE_SECONDS = 10.0

#: After this many seconds without an open store, a run that needs the store is refused.
CONNECT_SECONDS = 10.0

#: Seconds to wait for a request in progress when nothing more will be sent.
STOP_SECONDS = 1.0

#: Seconds without success after which a note reports that the store does not answer, and the text of that note.
OUTAGE_SECONDS = 2.0
NO_ANSWER = "does not answer"


class Recorder(threading.Thread):
    """Records one run during training.

    Args:
        transfer: sends the run's events.
        before: the size of the events before this command, in bytes.
        is_resumed: whether those bytes belong to this run. Then missing ones are sent first.
        offline: whether the store may stay unreachable for any time.

    Attributes:
        refusal: why the store cannot be used; None while it may work.
        is_settled: set when it is known whether the store can be used, or that it may be unreachable.
        done: set when the thread sends nothing more.
        outage: the problem of a store that has accepted nothing for some seconds; empty if it accepts everything.
    """

    def __init__(
        self, transfer: EventTransfer, before: int = 0, *, is_resumed: bool = False, offline: bool = False
    ) -> None:
        super().__init__(name="recorder", daemon=True)
        self.transfer = transfer
        self._before = before
        self._offline = offline
        if not is_resumed:
            transfer.record.begin_after(before)
        self._hurries = False
        self._woken = threading.Event()
        self._stop_requested = threading.Event()
        self.is_settled = threading.Event()
        self.done = threading.Event()
        self._failing_since: float | None = None
        self._reason = ""
        self.outage = ""
        self.refusal: ConfigError | None = None

    def wake(self) -> None:
        """Sends waiting events now, without waiting for the end of the pause."""
        self._woken.set()

    @property
    def recorded(self) -> int:
        """The number of bytes of `events.jsonl` that the store has accepted."""
        return self.transfer.record.offset if self.transfer.record.run_id is not None else 0

    @property
    def reason(self) -> str:
        """The last error of the store; empty without an error."""
        return str(self.refusal or next(iter(self.transfer.record.missing_files.values()), self._reason))

    def finish(self, patience: float, should_stop: Callable[[], bool] = bool) -> bool:
        """Waits until everything is recorded, or gives up. Returns whether everything is recorded. Sends nothing after
        that.

        It waits `patience` seconds for a store that is unreachable or slow, and gives up when `should_stop` returns
        True.
        """
        deadline = time.monotonic() + patience
        self._hurries = True
        self.wake()
        while not self.done.wait(0.02):
            if should_stop():
                self._reason = self._reason or "interrupted"
                break
            if time.monotonic() > deadline:
                break
        self._end_thread()
        return self._is_through and not self.transfer.record.missing_files

    def stop(self) -> None:
        """Stops sending events, and writing to the run's folder."""
        self.transfer.record.is_kept = False
        self._end_thread()

    def _end_thread(self) -> None:
        """Ends the thread. If the store does not answer a request, the thread lives longer than this call."""
        self._stop_requested.set()
        self.wake()
        if self.is_alive():
            self.join(STOP_SECONDS)
            if self.is_alive():
                self.transfer.record.is_kept = False

    def run(self) -> None:
        try:
            self._wait_for_earlier()
            self.transfer.record.save()
            while not self._stop_requested.is_set():
                self._try_pass()
                if self.transfer.is_open or self._offline:
                    self.is_settled.set()
                if self._is_through and not self.transfer.files.missing_reports:
                    break
                self._pause()
        except ConfigError as refusal:
            self.refusal = refusal
        finally:
            self.is_settled.set()
            self.done.set()

    def _begin_reports(self) -> None:
        """Starts a thread for each missing report. The thread appends an event, which is then sent."""
        for event_offset in self.transfer.files.claim_reports():
            threading.Thread(target=self._report, args=(event_offset,), name="report", daemon=True).start()

    def _report(self, event_offset: int) -> None:
        with contextlib.suppress(OSError):  # if the disk is full, `scaleflow sync` makes the report later
            append_report(
                self.transfer.events, event_offset, self.transfer.record.locate, is_late=self._stop_requested.is_set
            )
        self.wake()

    def _wait_for_earlier(self) -> None:
        """Waits for the recorder of an earlier command in this process: its last request may still end the run."""
        events = self.transfer.events
        for thread in {*threading.enumerate()} - {self}:
            if isinstance(thread, Recorder) and thread.transfer.events == events and thread._stop_requested.is_set():
                thread.join()

    @property
    def _is_through(self) -> bool:
        return self.transfer.record.ended > self._before

    def _pause(self) -> None:
        """Waits for more events. While the store fails, the pause grows, unless somebody waits."""
        seconds = PASS_SECONDS
        if self._failing_since is not None and not self._hurries:
            seconds = min(MAX_PAUSE_SECONDS, PASS_SECONDS + (time.monotonic() - self._failing_since) / 2)
        self._woken.wait(seconds)
        self._woken.clear()

    def _try_pass(self) -> None:
        """Sends waiting events. A failure does not affect events that the store has accepted.

        Raises ConfigError if the store cannot be used. After the store has the run, errors are only noted and the
        events are sent again.
        """
        began = time.monotonic()
        try:
            if not self.transfer.is_open:
                self.transfer.open()
            self.transfer.send(self._stop_requested.is_set)
            self._begin_reports()
            self._failing_since = None
            self._reason = ""
            if self.outage == NO_ANSWER or not self.transfer.record.missing_files:
                self.outage = ""
        except Exception as error:  # a store may raise anything
            reason = format_store_error(error, self.transfer.tracker.uri)
            if self._is_fatal(error, began):
                raise (error if isinstance(error, ConfigError) else ConfigError(f"tracking: {reason}")) from error
            self._failing_since = self._failing_since or began
            self._reason = reason
            is_of_store = not isinstance(error, LookupError)  # for instance a parent that is not recorded yet
            if is_of_store and not self.outage and time.monotonic() - self._failing_since > OUTAGE_SECONDS:
                self.outage = NO_ANSWER if is_unreachable(error) else f"does not take the run ({reason})"

    def _is_fatal(self, error: Exception, began: float) -> bool:
        """Returns whether an error means that the store cannot be used, so that the run must be refused."""
        if isinstance(error, ConfigError) and not isinstance(error, StoreUnreachable):
            is_known_to_work = self.is_settled.is_set() and (self._offline or self.transfer.record.run_id is not None)
            return self._failing_since is None and not is_known_to_work
        failing = time.monotonic() - (self._failing_since or began)
        return not (self.transfer.is_open or self._offline) and failing > CONNECT_SECONDS


class CommandRun:
    """A run whose events this process writes. A thread sends them to the store.

    No other command can record it until it is finished or closed.

    Args:
        folder: the run's folder; an earlier command may have created it.
        what: the run in messages, such as `the sweep's own run`.

    Attributes:
        recorder: the thread that sends the events; None until this command has opened the run.
        began: when the first command opened the run, in milliseconds since the epoch.
    """

    def __init__(self, folder: Path, what: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.files = RunFolder(folder)
        self._what = what
        self.recorder: Recorder | None = None
        self._flush_seconds = 0.0
        with contextlib.ExitStack() as locks:
            locks.enter_context(self.files.lock_recording())
            locks.enter_context(self.files.track_files())
            self._before = RunState.read(folder)
            self._locks = locks.pop_all()
        self.began = self._before.ready.began if self._before.ready else 0
        self._added = (self._before.step, self._before.metrics)  # the values recorded last

    def open(
        self,
        name: str,
        tracking: Tracking,
        *,
        tags: Mapping[str, str],
        params: Mapping[str, str],
        config: Mapping[str, Any] | None = None,
        began: float | None = None,
        parent: Path | None = None,
        earlier: Path | None = None,
    ) -> None:
        """Opens the run, possibly again, and starts to record it in the store of `tracking`.

        Args:
            config: the content of its config.yaml, including secrets; None: only the store.
            began: when the command began, in seconds since the epoch; None: now.
            parent: the folder of the parent run. Without one, a new run is a child of the run that is active in this
                thread, or else continues the run that MLFLOW_RUN_ID names.
            earlier: the folder of an earlier run. A new run uses its experiment, in case the experiment was renamed.
        """
        store = {key: getattr(tracking, key) for key in ("name", "uri", "experiment")}
        content = mask_secrets({"tracking": store} if config is None else config)
        self.files.config.write_text(OmegaConf.to_yaml(OmegaConf.create(content)))
        size_before = self.files.events.stat().st_size if self.files.events.exists() else 0
        is_resumed = self._before.has_begun
        offline = tracking.offline
        is_new = parent is None and not is_resumed
        active = find_active_run(tracking) if is_new else None
        if active is not None:
            tags = {**tags, **active.tags}
            for note in active.notes:
                Display(sys.stdout).print_line(note)
        tracker = make_tracker(tracking, adopts=is_new and active is None)
        transfer = EventTransfer(tracker, self.files.events)
        transfer.requests.earlier = earlier
        self.recorder = Recorder(transfer, size_before, is_resumed=is_resumed, offline=offline)
        self._flush_seconds = tracking.flush_seconds
        milliseconds = int((CLOCK.read() if began is None else began) * 1000)
        self.began = self.began or milliseconds
        folder = None if parent is None else str(parent)
        resumed = 0 if is_resumed else None
        self.emit(RunReady(name, tags, params, began=milliseconds, parent=folder, resumed=resumed))
        self.recorder.start()

    def emit(self, event: Event) -> None:
        """Appends an event to the run. Raises OSError if it cannot be written."""
        append_event(self.files.events, event)

    @property
    def refusal(self) -> Exception | None:
        """Why the store cannot be used; None if it can. Waits until it is known."""
        assert self.recorder is not None
        self.recorder.is_settled.wait()
        return self.recorder.refusal

    def add(
        self,
        metrics: Mapping[str, Any],
        files: Iterable[Path] = (),
        tags: Mapping[str, str] | None = None,
        text: str = "",
        step: int = 0,
    ) -> None:
        """Records values, existing files, tags and the description. The same values are not recorded twice in a row."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        added = (max(step, self._added[0]), numbers)
        if numbers and added != self._added:
            self._added = added
            self.emit(MetricsLogged(*added))
        self.add_files(files)
        if tags:
            self.emit(TagsSet(dict(tags)))
        if text:
            self.emit(DescriptionSet(text))

    def add_files(self, files: Iterable[Path], folder: str | None = None) -> None:
        """Records existing files in a folder of the artifacts; None: at the top."""
        for path in files:
            if path.is_file():
                self.emit(ArtifactWritten(str(path), folder))

    def end(self, status: Status, error: str = "") -> None:
        self.emit(RunEnded(status, error))

    def finish(self, stop: StopRequest) -> bool:
        """Waits at most `tracking.flush_seconds`, or until another signal. Returns whether everything is recorded."""
        assert self.recorder is not None
        before = stop.times
        with self._locks:
            is_recorded = self.recorder.finish(self._flush_seconds, lambda: stop.times > before)
        if not is_recorded:
            Display(sys.stdout).print_error(
                f"{self._what} is not fully recorded: {mask_secrets(self.recorder.reason)}; nothing is lost; "
                f"to send the rest, run {name_command('sync')} {shlex.quote(os.path.relpath(self.files.path))}"
            )
        return is_recorded

    def close(self) -> None:
        """Allows other commands to record the run."""
        self._locks.close()

    def describe_links(self) -> Sequence[tuple[str, str]]:
        """Returns rows of (label, value) with links to the recorded run."""
        return self.recorder.transfer.tracker.describe_links() if self.recorder else ()
