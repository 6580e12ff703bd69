"""`debug.inline=true`: runs the worker in this process, so that pdb works and output appears in the terminal."""

from __future__ import annotations

import os
import threading
import time

from scaleflow.errors import ConfigError
from scaleflow.interfaces.events import Event, RunEnded, RunReady, RunRefused
from scaleflow.launcher.processes.worker_process import EndReason
from scaleflow.launcher.recording.monitor import POLL_SECONDS, RunMonitor
from scaleflow.launcher.recording.system_metrics import make_machine_metrics, record_system_metrics
from scaleflow.runs import EventWriter, RunSpec
from scaleflow.worker.train import run_worker

#: Seconds to wait for the store before training.
STORE_SECONDS = 10.0


class InlineRun:
    """Runs the worker in this process."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor
        self.spec: RunSpec = monitor.spec
        self.pid = os.getpid()

    def run(self) -> int:
        """Trains; returns the exit code of the command."""
        monitor = self._monitor
        monitor.begin_start("importing TensorFlow")
        if not monitor.open_store():
            return monitor.finish(EndReason(monitor.recorder.reason, is_reported=True))
        with record_system_metrics(self.spec, make_machine_metrics(self.spec, [self])):
            self._train()
        return monitor.finish(EndReason(monitor.state.fault) if monitor.state.fault else None)

    def _train(self) -> None:
        write, monitor = EventWriter(self.spec.files.events), self._monitor
        lock = threading.RLock()  # threads that write or upload checkpoints emit, too

        def emit(event: Event) -> None:
            write(event)
            with lock:
                monitor.follow()
            if isinstance(event, RunReady):
                self._wait_for_store()

        try:
            if not run_worker(self.spec, emit, self._must_stop) and monitor.state.is_ready:
                write(RunEnded("FAILED", monitor.state.fault))
        except ConfigError as refusal:  # the store refused the run
            write(RunRefused(str(refusal)))

    def _must_stop(self) -> bool:
        return self._monitor.stop.is_set() or self._monitor.recorder.refusal is not None

    def _wait_for_store(self) -> None:
        """Waits until the store has the run: training cannot be ended from outside if the store refuses the run.

        Raises ConfigError if it refuses it.
        """
        deadline, recorder = time.monotonic() + STORE_SECONDS, self._monitor.recorder
        while not self._must_stop() and not self._monitor.has_stored():
            if recorder.reason or time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)
        if recorder.refusal is not None:
            raise recorder.refusal
