"""Starts the processes of a run on this machine. The fork server, which has imported TensorFlow, forks them.

With `debug.inline` the worker runs in this process, so that pdb works and output appears in the terminal.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from scaleflow.cluster.gpus import gpu_environments, visible_gpus
from scaleflow.cluster.tasks import count_processes, make_tf_config_environments
from scaleflow.cluster.tf_config import TF_CONFIG
from scaleflow.interfaces.events import Event, RunEnded, RunReady
from scaleflow.launcher.display import IMPORTING
from scaleflow.launcher.processes.server_start import start_fork_server
from scaleflow.launcher.processes.supervisor import choose_reason
from scaleflow.launcher.processes.worker_process import EndReason, RunProcess, start_workers
from scaleflow.launcher.recording.monitor import POLL_SECONDS, RunMonitor
from scaleflow.launcher.recording.system_metrics import make_machine_metrics, record_system_metrics
from scaleflow.runs import EventWriter, RunSpec
from scaleflow.worker.process import run_worker


class LocalHost:
    """Starts the processes of a run on this machine. Without the address of a fork `server`, it starts its own."""

    first_phase = IMPORTING
    builds_meanwhile = True

    def __init__(self, server: str | None) -> None:
        self._requested_server = server
        self._servers = contextlib.ExitStack()
        self._server = ""
        self._lost_server: str | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        with self._servers:
            self._start_server()
            yield

    def _start_server(self) -> None:
        """Starts the fork server, which imports TensorFlow while the launcher opens the store."""
        self._servers.close()
        self._server = self._servers.enter_context(start_fork_server(self._requested_server, self._lost_server))

    @contextlib.contextmanager
    def start(self, spec: RunSpec) -> Iterator[tuple[RunSpec, Sequence[RunProcess]]]:
        if self._lost_server == self._server:
            self._start_server()
        with (
            start_workers(*make_worker_specs(spec), self._server) as processes,
            record_system_metrics(spec, make_machine_metrics(spec, processes)),
        ):
            yield spec, processes
            if not all(process.has_server for process in processes):
                self._lost_server = self._server

    def find_reason(self, processes: Sequence[RunProcess]) -> EndReason:
        return choose_reason(processes)

    def explain_loss(self) -> str | None:
        return None


def make_worker_specs(spec: RunSpec) -> tuple[list[RunSpec], list[Mapping[str, str]]]:
    """Makes the specs of the processes on this machine, the chief first, and their environment variables.

    Raises ConfigError if the machine has too few GPUs for them.
    """
    plan = spec.plan
    if plan.tf_config is not None:  # each process of the run has its own launcher
        return [spec], [{**spec.environment, TF_CONFIG: plan.tf_config}]
    roles = count_processes(plan)
    options = plan.hardware
    count = sum(roles.values())
    gpus = visible_gpus(spec.environment) if count > 1 and options.name not in ("cpu", "tpu") else []
    variables = zip(make_tf_config_environments(roles), gpu_environments(roles, options, gpus), strict=True)
    specs = [replace(spec, worker=number) for number in range(count)]
    return specs, [{**spec.environment, **peers, **devices} for peers, devices in variables]


#: Seconds to wait for the store before training.
STORE_SECONDS = 10.0


class InlineRun:
    """Runs the worker in this process."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor
        self.spec: RunSpec = monitor.spec
        self.pid = os.getpid()

    def run(self) -> int:
        """Runs the worker. Returns the exit code of the command."""
        monitor = self._monitor
        monitor.begin_start("importing TensorFlow")
        if not monitor.open_store():
            return monitor.finish(EndReason(monitor.recorder.reason, is_reported=True))
        with record_system_metrics(self.spec, make_machine_metrics(self.spec, [self])):
            self._train()
        return monitor.finish(EndReason(monitor.state.attempt.fault) if monitor.state.attempt.fault else None)

    def _train(self) -> None:
        write = EventWriter(self.spec.files.events)
        monitor = self._monitor
        lock = threading.RLock()  # threads that write or upload checkpoints also emit

        def emit(event: Event) -> None:
            write(event)
            with lock:
                monitor.follow()
            if isinstance(event, RunReady):
                self._wait_for_store()

        is_done = run_worker(self.spec, emit, self._must_stop)
        if not is_done and monitor.state.has_begun and monitor.state.last is None:
            write(RunEnded("FAILED", monitor.state.attempt.fault))

    def _must_stop(self) -> bool:
        return self._monitor.stop.is_set() or self._monitor.recorder.refusal is not None

    def _wait_for_store(self) -> None:
        """Waits until the store has the run: if the store refuses it later, training cannot be ended from outside.

        Raises ConfigError if the store refuses the run. The worker reports it.
        """
        deadline = time.monotonic() + STORE_SECONDS
        recorder = self._monitor.recorder
        while not self._must_stop() and not self._monitor.has_stored():
            if recorder.reason or time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)
        if recorder.refusal is not None:
            raise recorder.refusal
