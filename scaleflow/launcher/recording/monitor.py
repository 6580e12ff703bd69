"""Follows a run for its launcher: displays its events, keeps its state, and writes its end if no worker did."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from scaleflow.cluster.tasks import find_unreachable
from scaleflow.errors import ConfigError
from scaleflow.interfaces.events import (
    ConfusionWritten,
    Event,
    MetricsLogged,
    ModelExported,
    PhaseBegan,
    RunEnded,
    RunReady,
    RunRefused,
    SystemMetrics,
)
from scaleflow.interfaces.hooks import FollowedRun
from scaleflow.launcher.command_exit import FAILED, FINISHED, REFUSED
from scaleflow.launcher.display import Display
from scaleflow.launcher.feature_hooks import FeatureHooks
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.launcher.processes.worker_process import EndReason
from scaleflow.launcher.recording.recorder import Recorder
from scaleflow.runs import EventReader, RunSpec, RunState
from scaleflow.runs.event_log import append_event
from scaleflow.tracking.uri import drop_credentials

#: Seconds between two checks of the processes. Each check takes processor time.
POLL_SECONDS = 0.1

#: The same for a single process in a short phase, such as the start or the export: the user waits for its end.
PHASE_POLL_SECONDS = 0.02

#: The run whose command reports that a store does not answer, by store address.
OUTAGE_REPORTERS: dict[str, "RunMonitor"] = {}


class RunMonitor:
    """The launcher's view of its run. `helpers` are threads that start together with the recorder.

    Attributes:
        spec: the spec of the chief, or of the process that this command runs.
        state: the state, computed from the events of this command.
        heard_at: when the last event of a worker arrived, in seconds of this process's monotonic clock. The clock of
            the worker's machine may be wrong.
        waiting_since: when the last event `waiting` or `met` arrived, by the same clock.
        restart_advice: how a later run would survive the loss of a process that ended this run; otherwise empty.
    """

    def __init__(
        self,
        spec: RunSpec,
        recorder: Recorder,
        display: Display,
        stop: StopRequest,
        on_event: Callable[[Event], None] | None = None,
        helpers: Sequence[threading.Thread] = (),
    ) -> None:
        self.spec = spec
        self.recorder = recorder
        self.display = display
        self.stop = stop
        self.state = RunState()
        self.heard_at = 0.0
        self.waiting_since = 0.0
        self.restart_advice = ""
        self._is_in_phase = True
        self._has_told = False
        self._on_event = on_event
        self._helpers = helpers
        self.hooks = self._make_hooks() if spec.records and spec.task.trains else None
        self._reader = EventReader(spec.events, spec.events.stat().st_size if spec.events.exists() else 0)

    def _make_hooks(self) -> FeatureHooks:
        return FeatureHooks(
            FollowedRun(
                plan=self.spec.plan,
                folder=self.spec.folder,
                is_job=self.spec.parent is not None,
                is_on_terminal=self.display.is_on_terminal,
                find_name=lambda: self.state.name,
                print_note=lambda text: self.display.print_line(f"note: {text}", "yellow"),
                print_line=self.display.print_line,
            )
        )

    def begin_start(self, phase: str, since: float | None = None) -> None:
        """Shows that the processes are starting, while the store is opened.

        Args:
            since: the start, in seconds since the epoch; None: now.
        """
        is_opening = self.spec.plan.tracking.name != "none" and not self.recorder.is_settled.is_set()
        self.display.begin_phase(f"{phase}, opening the MLflow store" if is_opening else phase, since)

    def choose_pause(self, processes: int) -> float:
        """Returns the seconds until the next check of `processes` processes."""
        return PHASE_POLL_SECONDS if processes == 1 and self._is_in_phase else POLL_SECONDS

    def start_recorder(self) -> None:
        """Starts the recorder, which opens the store, and the helper threads, unless they have already started."""
        if not self.recorder.is_alive() and not self.recorder.done.is_set():
            for thread in (*self._helpers, self.recorder):
                thread.start()

    def open_store(self) -> bool:
        """Starts the recorder, and waits until it knows whether the store can be used, so that no training is wasted.

        Returns False if the store refuses the run, or if the user requested the end.
        """
        self.start_recorder()
        while not self.recorder.is_settled.wait(POLL_SECONDS):
            if self.stop.is_set():
                return False
        return self.recorder.refusal is None

    def follow(self) -> None:
        """Reads, applies and displays the new events, and an outage of the store."""
        self._show_outage()
        for event in self._reader.read():
            self._apply(event)
            self.display.show_event(event)
            if self._on_event is not None:
                self._on_event(event)
            if self.hooks is not None:
                self.hooks.on_event(event)

    def read_reports(self) -> None:
        """Reads the reports that the launcher made after the run ended."""
        for event in self._reader.read():
            self.state.apply(event)

    def _show_outage(self) -> None:
        """Reports once that the store accepts nothing, and once that it works again, even for
        several jobs of a sweep.
        """
        outage = self.recorder.outage
        uri = self.spec.plan.tracking.uri or ""
        store = f"note: the tracking {'server' if uri.startswith('http') else 'store'} {drop_credentials(uri)}"
        if outage and OUTAGE_REPORTERS.setdefault(uri, self) is self and not self._has_told:
            self.display.print_line(f"{store} {outage}: recording locally; training goes on", "yellow")
        elif not outage and self._has_told:
            del OUTAGE_REPORTERS[uri]
            self.display.print_line(f"{store} answers again, and gets what was recorded locally", "yellow")
        self._has_told = OUTAGE_REPORTERS.get(uri) is self

    def _apply(self, event: Event) -> None:
        if not isinstance(event, SystemMetrics):  # the launcher itself writes these
            self.heard_at = time.monotonic()
        if isinstance(event, RunReady | ConfusionWritten | ModelExported | RunEnded):  # these take long to record
            self.recorder.wake()
        if isinstance(event, MetricsLogged | PhaseBegan):
            self._is_in_phase = isinstance(event, PhaseBegan)
        waiting = self.state.attempt.waiting
        self.state.apply(event)
        if self.state.attempt.waiting is not waiting:
            self.waiting_since = self.heard_at

    def has_stored(self) -> bool:
        """Returns whether the store has all events that were read."""
        return self.recorder.transfer.record.offset >= self._reader.offset

    def find_futile_wait(self) -> EndReason | None:
        """Returns why a worker that waits too long must be killed; None if there is no such worker.

        It cannot end itself, because no Python thread runs while TensorFlow waits.
        """
        waiting = self.state.attempt.waiting
        if waiting is None or time.monotonic() < self.waiting_since + waiting.seconds:
            return None
        if waiting.vain:
            return EndReason(waiting.vain, is_reported=True)
        absent = find_unreachable(self.spec.plan, waiting.peers)
        who = f"{absent} has not joined" if absent else "all processes answer, but one of them does not start training"
        return EndReason(f"cluster.start_seconds={waiting.seconds:g}: {who}", is_reported=True)

    def find_stall(self, began: float) -> EndReason | None:
        """Returns why processes without progress for `cluster.stall_seconds` must be killed; None if they may continue.

        Until the processes have built everything, the limit is longer by `cluster.start_seconds`. `began` is when they
        started, in seconds of the monotonic clock.
        """
        plan = self.spec.plan
        cluster = plan.cluster
        if cluster.stall_seconds is None or self.state.last is not None or self.stop.is_set():
            return None
        extra = 0.0 if self.state.attempt.is_under_way else cluster.start_seconds
        allowed = cluster.stall_seconds + extra + self.state.attempt.upload_seconds
        if time.monotonic() - max(self.heard_at, began) <= allowed:
            return None
        more = f" + cluster.start_seconds={extra:g}" if extra else ""
        why = f"no progress for cluster.stall_seconds={cluster.stall_seconds:g}{more}, at step {self.state.step}"
        absent = find_unreachable(plan, plan.task.peers) if plan.task else ""
        if absent:
            why += f"; no answer from {absent}"
        return EndReason(why)

    def finish(self, reason: EndReason | None) -> int:
        """Writes the end of the run, unless a worker has written it, and shows it. Returns the exit code of the
        command.

        `reason` is why the run ended, if no worker reported its end.
        """
        self.follow()
        if self.state.last is None:
            self._write_end(reason or EndReason("it ended without a report"))
            self.follow()
        if self._has_told:
            del OUTAGE_REPORTERS[self.spec.plan.tracking.uri or ""]
            self._has_told = False
        self.display.close()
        return self.exit_code

    def _write_end(self, reason: EndReason) -> None:
        end: RunEnded | RunRefused
        if not self.state.has_begun:
            why = f"stopped by {self.stop.signal_name}" if self.stop.is_set() else reason.why
            end = RunRefused(why, reason.has_log and not self.stop.is_set(), not reason.would_come_again)
        elif self.stop.is_set():
            end = RunEnded("KILLED", f"stopped by {self.stop.signal_name}")
        else:
            end = RunEnded("FAILED", reason.why)
        try:
            append_event(self.spec.events, end)
        except OSError as full:
            self._handle_unwritten_end(end, full)

    def _handle_unwritten_end(self, end: RunEnded | RunRefused, error: OSError) -> None:
        """Passes an end that cannot be written to the event file to the terminal and the store."""
        prefix = f"{os.path.relpath(self.spec.events)} can't be written: {error.strerror}; "
        if isinstance(end, RunEnded):
            end = replace(end, error=prefix + end.error)
        else:
            end = replace(end, message=prefix + end.message)
        self._apply(end)
        self.display.show_event(end)
        self.recorder.transfer.unwritten_end = end

    @property
    def exit_code(self) -> int:
        """The exit code of the command, after the run has ended."""
        last = self.state.last
        is_killed = isinstance(last, RunEnded) and last.status == "KILLED"
        if is_killed or (self.stop.is_set() and not self.state.has_begun):
            return self.stop.exit_code  # 143 without a signal: a worker received SIGTERM
        if self.recorder.refusal is not None:
            return REFUSED
        if isinstance(last, RunRefused):
            return FAILED if last.died else REFUSED
        return FINISHED if last is not None and last.status == "FINISHED" else FAILED

    @property
    def refusal(self) -> ConfigError | None:
        """Why the store or a worker refused the run; None if it was not refused."""
        return self.recorder.refusal or self.state.refusal
