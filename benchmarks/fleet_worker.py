"""The processes of `benchmarks.fleet`: a fork server without TensorFlow, and fake workers that it forks.

`python -m benchmarks.fleet_worker FD` takes the place of `scaleflow.launcher.processes.fork_server`. The server is
scaleflow's own. A worker reads its `RunSpec` and its TF_CONFIG as a real one does, and writes the events of one. It
trains nothing.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
from types import FrameType, ModuleType
from typing import NoReturn

from scaleflow.cluster.tf_config import TF_CONFIG, parse_tf_config
from scaleflow.interfaces.events import MetricsLogged, PeersMet, ProcessStarted, RunEnded, RunReady, Waiting
from scaleflow.launcher.processes.fork_server import ForkServer
from scaleflow.runs import EventWriter, RunSpec
from scaleflow.runs.event_log import read_last_event

#: The variable that says what a worker writes: a JSON list of the number of events and of the seconds between two.
WORK = "SCALEFLOW_FLEET_WORK"

#: The module whose `main` the launcher asks the fork server for.
WORKER_MODULE = "scaleflow.worker.main"

#: Seconds between two looks of the chief at the other workers.
SECONDS_BETWEEN_LOOKS = 0.1


def main() -> None:
    """Runs the server. Standard input is the listener, the argument is `ForkServer`'s `alive`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    fake = ModuleType(WORKER_MODULE)
    fake.main = work  # type: ignore[attr-defined]
    sys.modules[WORKER_MODULE] = fake
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    gc.freeze()
    ForkServer(listener, int(sys.argv[1])).run()
    os._exit(0)


def work() -> NoReturn:
    """Runs a fake worker."""
    spec = RunSpec.from_line(sys.stdin.buffer.readline())
    if not sys.stdin.buffer.readline():  # the launcher's word that the store can be used
        os._exit(1)
    events, pause = json.loads(os.environ[WORK])
    emit = EventWriter(spec.events)

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        emit(RunEnded("KILLED", "stopped"))
        os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)
    emit(ProcessStarted(spec.name, os.getpid()))
    task = parse_tf_config(os.environ.get(TF_CONFIG))
    assert task.worker == spec.worker
    if spec.records:
        emit(Waiting(spec.plan.cluster.start_seconds, task.peers))
        wait_for_others(spec, len(task.peers), ProcessStarted)
        emit(PeersMet())
    emit(make_ready(spec, len(task.peers), events))
    for step in range(1, events + 1):
        pass_time(pause)
        emit(MetricsLogged(step, {"train/loss": 1 / step, "train/accuracy": 1 - 1 / step}, rate=1000.0))
    if spec.records:
        wait_for_others(spec, len(task.peers), RunEnded)  # the launcher ends those that outlive the chief
    emit(RunEnded("FINISHED"))
    os._exit(0)


def pass_time(seconds: float) -> None:
    """Waits, and ends this process if the launcher is gone, which holds the other end of standard input."""
    if select.select([0], [], [], seconds)[0]:
        os._exit(1)


def wait_for_others(spec: RunSpec, count: int, event: type[ProcessStarted] | type[RunEnded]) -> None:
    """Waits until the other processes, of `count` in all, have written their first or their last event."""
    while len(paths := spec.files.list_process_events()) < count - 1:
        pass_time(SECONDS_BETWEEN_LOOKS)
    while paths and event is RunEnded:
        paths = [path for path in paths if not isinstance(read_last_event(path), RunEnded)]
        pass_time(SECONDS_BETWEEN_LOOKS if paths else 0)


def make_ready(spec: RunSpec, workers: int, steps: int) -> RunReady:
    resolved = {"replicas": workers, "workers": workers, "hardware": "cpu", "global_batch_size": 32 * workers}
    resolved |= {"parameters": 1000, "trainable_parameters": 1000, "strategy": "multi_worker", "steps": steps}
    params = {f"resolved.{key}": str(value) for key, value in resolved.items()}
    return RunReady("fleet", params=params, began=int(spec.started * 1000), steps=steps, epochs=1)


if __name__ == "__main__":
    main()
