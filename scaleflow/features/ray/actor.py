"""The Ray actor that runs one process of a run on a machine of a Ray cluster."""

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from scaleflow.launcher.processes.server_start import start_fork_server
from scaleflow.launcher.processes.worker_process import LocalWorker
from scaleflow.launcher.recording.system_metrics import MachineMetrics, Values, name_by_host
from scaleflow.runs import RunSpec

#: Maximum seconds that one call of `WorkerActor.wait` blocks. Each call costs the launcher more than a millisecond.
WAIT_SECONDS = 60.0


class ActorLocation(NamedTuple):
    """The location of an actor: HOST:PORT where its process listens for the others, and the machine's name."""

    address: str
    host: str


class WorkerActor:
    """Starts, watches and ends one process of a run on the machine of this actor.

    The constructor starts the fork server, which imports TensorFlow while Ray still starts the other actors. If this
    machine has the launcher's working directory `folder`, it becomes the working directory here. Then relative paths
    mean the same.
    """

    def __init__(self, folder: str) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)
        self._resources = contextlib.ExitStack()
        self._temporary = tempfile.TemporaryDirectory(prefix="scaleflow-", ignore_cleanup_errors=True)
        self._resources.enter_context(self._temporary)
        self._server = self._resources.enter_context(start_fork_server())
        self._port = socket.socket()
        self._port.bind(("", 0))
        self._started: LocalWorker | None = None
        self._measure: Callable[[], Values] | None = None

    @property
    def _process(self) -> LocalWorker:
        assert self._started is not None
        return self._started

    def locate(self, address: str | None) -> ActorLocation:
        """Returns where this actor runs.

        `address` is the host's address; None: the one that Ray uses for the machine.
        """
        import ray as engine

        host = address or engine.util.get_node_ip_address()
        return ActorLocation(f"{host}:{self._port.getsockname()[1]}", socket.gethostname())

    def sees(self, path: str) -> bool:
        return Path(path).exists()

    def start(self, spec: RunSpec, environment: Mapping[str, str]) -> int:
        """Starts the process and returns its id. `environment` adds variables to the machine's."""
        self._port.close()  # as late as possible, so that no other process takes the port
        self._started = LocalWorker(spec, {"TMPDIR": self._temporary.name, **environment}, self._server)
        self._started.release()  # the launcher already opened the store
        return self._wait_for_pid()

    def start_again(self) -> int:
        """Restarts the process after its death, and returns the new id."""
        self._process.start_again()
        return self._wait_for_pid()

    def _wait_for_pid(self) -> int:
        """Returns the process id, which the fork server reports shortly after the start."""
        while not self._process.pid and self._process.is_alive:
            self._process.wait(0.05)
        return self._process.pid

    def wait(self) -> int | None:
        """Waits up to `WAIT_SECONDS` for the end. Returns the exit status, or None while the process runs."""
        self._process.wait(WAIT_SECONDS)
        return self._process.returncode

    def measure(self) -> Values:
        if self._measure is None:
            self._measure = MachineMetrics(self._process.spec.folder, [self._process]).measure
        return name_by_host(self._measure(), self._process.spec, socket.gethostname())

    def stop(self) -> None:
        self._process.stop()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Ends the process and the fork server, and deletes their temporary files."""
        if self._started is not None:
            self._started.close()
        self._resources.close()
