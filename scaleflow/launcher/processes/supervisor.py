"""Supervises the processes of a run: watches them, restarts them, and decides why the run ended.

A `ProcessHost` starts them. The cluster engine names it (`cluster/engines.py`).
"""

import contextlib
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from scaleflow.cluster.engines import find_engine
from scaleflow.config.plan import check_rules, set_values
from scaleflow.errors import ConfigError
from scaleflow.interfaces.events import Note, Restarted
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.processes.stop import GRACE_SECONDS
from scaleflow.launcher.processes.worker_process import EndReason, RunProcess
from scaleflow.launcher.recording.monitor import POLL_SECONDS, RunMonitor
from scaleflow.runs import EventWriter, RunSpec

#: The maximum number of restarts if `cluster.max_restarts` is null, for runs that are restarted by default.
DEFAULT_MAX_RESTARTS = 10

#: After this many deaths at one step, another death there ends the run: it would never get further.
MAX_DEATHS_AT_STEP = 2


class ProcessHost(Protocol):
    """Starts the processes of a run."""

    first_phase: str  # the text of the first phase, such as `importing TensorFlow`
    builds_meanwhile: bool  # whether the processes build everything while the store is opened

    def open(self) -> AbstractContextManager[None]:
        """Prepares the host for the whole run, and releases it after the block.

        Raises ConfigError if the host cannot be used.
        """

    def start(self, spec: RunSpec) -> AbstractContextManager[tuple[RunSpec, Sequence[RunProcess]]]:
        """Starts all processes of an attempt. None of them outlives the block.

        Yields the spec, whose plan may have fewer workers after a loss, and the processes, the chief first. Raises
        ConfigError if the machines have too few resources.
        """

    def find_reason(self, processes: Sequence[RunProcess]) -> EndReason:
        """Returns why the processes of an attempt ended."""

    def explain_loss(self) -> str | None:
        """Returns why no restart is possible; None if a restart may be tried."""


class Supervisor:
    """Runs the processes of one run to their end. The host starts them, and the monitor follows the run."""

    def __init__(self, monitor: RunMonitor, host: ProcessHost) -> None:
        self._monitor = monitor
        self._host = host
        self._spec = monitor.spec
        self._stop = monitor.stop
        self._reason: EndReason | None = None
        self._restarts = 0
        self._began = 0.0
        self._died_at: list[int] = []
        self._opened = time.time()

    def run(self) -> int:
        """Starts, watches and restarts the processes. Returns the exit code of the command."""
        try:
            self._opened = time.time()
            with self._host.open():
                while self._run_attempt():
                    self._spec = replace(self._spec, attempt=self._spec.attempt + 1)
                    self._opened = time.time()
        except ConfigError as refusal:
            self._reason = EndReason(str(refusal), is_reported=True, has_log=False)
        except Exception as error:  # a bug in the launcher: the run still needs a recorded end
            with contextlib.suppress(OSError):
                print(mask_secrets(traceback.format_exc()), end="", file=sys.stderr)
            self._reason = EndReason(f"the launcher failed: {type(error).__name__}: {error}")
        self._monitor.start_recorder()  # unless it is already running
        return self._monitor.finish(self._reason)

    def _run_attempt(self) -> bool:
        """Runs all processes once. Returns whether they must be restarted."""
        self._reason = None
        self._monitor.begin_start(self._host.first_phase, self._opened)
        if not self._host.builds_meanwhile and not self._can_record():
            return False
        self._began = time.monotonic()
        try:
            with self._host.start(self._spec) as (self._spec, processes):
                if not self._can_record():
                    return False
                self._began = time.monotonic()
                for process in processes:
                    process.release()
                self._watch(processes)
                self._reason = self._reason or self._host.find_reason(processes)
        except ConfigError as refusal:
            self._reason = EndReason(str(refusal), is_reported=True, has_log=False)
        self._monitor.follow()
        return self._should_restart(self._reason)

    def _can_record(self) -> bool:
        """Waits until the store is open. Returns False if it cannot be used, or if the user requested the end."""
        if self._monitor.open_store():
            return True
        self._reason = EndReason(self._monitor.recorder.reason, is_reported=True)
        return False

    def _should_restart(self, reason: EndReason) -> bool:
        """Returns whether all processes are restarted from the last checkpoint.

        An error that a worker reports would occur again, unless it is the loss of another process.
        """
        state = self._monitor.state
        if (
            self._stop.is_set()
            or state.last is not None
            or not state.has_begun
            or self._monitor.recorder.refusal is not None
            or reason.would_come_again
        ):
            return False
        if self._restarts >= self._allowed_restarts:
            self._monitor.restart_advice = self._advise_restarts()
            return False
        loss = self._host.explain_loss()
        if loss:
            self._reason = EndReason(f"{loss}: {reason.why}")
            return False
        if self._died_at[-MAX_DEATHS_AT_STEP:] == [state.step] * MAX_DEATHS_AT_STEP:
            why = f"{reason.why}; it died at step {state.step} each of the last {MAX_DEATHS_AT_STEP + 1} times"
            self._reason = replace(reason, why=why)
            return False
        self._died_at.append(state.step)
        self._report_restart(f"{reason.why}; all processes restart from the last checkpoint")
        self._monitor.follow()
        return True

    def _advise_restarts(self) -> str:
        """Returns how a later run would survive the loss of a process; empty if such a run cannot be restarted."""
        plan = self._spec.plan
        if not self._spec.task.trains:
            return ""
        try:
            check_rules(set_values(plan, {"cluster.max_restarts": 3}))
        except ConfigError:  # the launcher cannot restart such a run
            return ""
        if self._restarts:
            return f"{self._restarts}, which is the limit; a larger cluster.max_restarts allows more"
        start = "the last checkpoint" if plan.checkpoint.name != "none" else "the beginning"
        return f"none; with cluster.max_restarts=3 a run restarts lost processes from {start}"

    def _report_restart(self, why: str, worker: str | None = None) -> None:
        self._restarts += 1
        write = EventWriter(self._spec.events)
        write(Restarted(self._restarts, why, worker))
        write(Note(f"{why} ({self._restarts} of at most {self._allowed_restarts})"))
        write.close()

    @property
    def _allowed_restarts(self) -> int:
        plan = self._spec.plan
        if not self._spec.task.trains:
            return 0  # there are no checkpoints
        if plan.cluster.max_restarts is not None:
            return plan.cluster.max_restarts
        engine = find_engine(plan.cluster)
        is_asynchronous_here = plan.strategy.has_coordinator and engine.is_local
        return DEFAULT_MAX_RESTARTS if is_asynchronous_here or engine.is_remote else 0

    def _watch(self, processes: Sequence[RunProcess]) -> None:
        """Follows the run until the chief has ended, and kills processes that must not continue."""
        deadline: float | None = None
        chief = processes[0]
        state = self._monitor.state
        while chief.is_alive:
            self._monitor.follow()
            if self._monitor.recorder.refusal is not None:
                chief.kill()
            if self._stop.is_set() and deadline is None:
                self._ask_to_stop(processes)
                deadline = time.monotonic() + GRACE_SECONDS
            if state.last is not None and deadline is None:  # the chief may be waiting for a process that is gone
                deadline = time.monotonic() + GRACE_SECONDS
            is_late = deadline is not None and time.monotonic() > deadline + state.attempt.upload_seconds
            if deadline is not None and (self._stop.times > 1 or is_late or not state.has_begun):
                chief.kill()
            reason = self._monitor.find_futile_wait()
            if reason:
                self._reason = reason
                chief.kill()
            reason = self._monitor.find_stall(self._began)
            if reason:
                self._reason = reason
                for process in processes:
                    process.kill()
            lost = find_lost(processes)
            if lost and state.last is None and not all(self._start_again(process) for process in lost):
                time.sleep(POLL_SECONDS)  # the others may still report the loss
                return
            chief.wait(self._monitor.choose_pause(len(processes)))

    def _ask_to_stop(self, processes: Sequence[RunProcess]) -> None:
        for process in processes:
            if not process.spec.serves:  # the others end with the coordinator
                if self._stop.signal == signal.SIGINT:
                    process.announce_interrupt()
                process.stop()
        again = "" if self._stop.limit else "; send it again to stop at once"
        self._monitor.display.print_line(f"stopping ({self._stop.signal_name}){again}")

    def _start_again(self, process: RunProcess) -> bool:
        """Restarts a lost worker if the coordinator continues without it. Returns False if it cannot be restarted."""
        if (
            not (process.spec.is_replaceable and process.has_server and self._monitor.state.has_begun)
            or self._stop.is_set()
            or self._restarts >= self._allowed_restarts
        ):
            return False
        name = process.spec.name
        how = process.start_again()
        self._report_restart(f"{name} {how}; it is restarted", name)
        return True


def find_lost(processes: Sequence[RunProcess]) -> list[RunProcess]:
    """Returns the processes that ended with an error and were not killed by this launcher."""
    return [process for process in processes if process.is_lost and not process.was_ended]


def choose_reason(processes: Sequence[RunProcess]) -> EndReason:
    """Returns why an attempt ended.

    A refusal of the run counts first, then a death without a report, then a process's own error, then a lost peer.
    Processes that lost a peer may report that, or be killed by TensorFlow, before the peer itself reports its error.
    """
    reasons = [process.find_reason() for process in find_lost(processes) or processes[:1]]
    return min(reasons, key=lambda reason: (reason.has_log, reason.is_reported, reason.is_lost_peer))
