"""Worker processes: forked from a server that has imported TensorFlow, told what to do, watched, and ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from scaleflow.cluster import TF_CONFIG
from scaleflow.errors import WorkerDied
from scaleflow.events import EventReader
from scaleflow.worker.main import RunSpec

#: The address of a server that forks workers, for commands that are not to start one of their own.
SERVER = "SCALEFLOW_SERVER"

#: What TensorFlow's runtime takes for its thread pools where the config leaves them open.
THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

#: Where a server's own output goes, beside its socket.
LOG = "log"

#: How long a process that was killed, or the server that would tell of it, may take to be gone.
SECONDS_TO_DIE = 10.0

#: A Unix socket's path has 104 bytes or more; a name of ours within its folder takes 30.
LONGEST_ADDRESS = 70


class ForkedProcess:
    """A process that a server forks; it reads what it has to do from its standard input, and ends when that does.

    Args:
        address: the server's.
        log: takes its output.
        environment: all of its environment.
        module: whose `main` it runs.
        streams: descriptors that take its output and its errors instead of the log.

    Attributes:
        pid: its number; 0 until the server has told it.
        returncode: how it ended, as `subprocess.Popen` has it; None as long as it lives.
        has_server: whether the server was there when it was last heard.
    """

    def __init__(
        self,
        address: str,
        log: Path,
        environment: Mapping[str, str],
        module: str = "scaleflow.worker.main",
        streams: tuple[int, int] | None = None,
    ) -> None:
        self.returncode: int | None = None
        self.has_server = True
        self.pid = 0
        self._killed: float | None = None
        self._rest = b""
        self._log = log
        self._log_of_server = Path(address).with_name(LOG)
        given, self._input = os.pipe()
        os.set_inheritable(self._input, False)
        self._server = socket.socket(socket.AF_UNIX)
        try:
            with log.open("ab") as output:
                self._server.connect(address)
                asked = {"module": module, "environment": dict(environment), "folder": str(Path.cwd())}
                line = json.dumps(asked).encode() + b"\n"
                sent = socket.send_fds(self._server, [line], [given, *(streams or [output.fileno()] * 2)])
                self._server.sendall(line[sent:])
        except OSError as error:
            self.returncode, self.has_server = 1, False
            with log.open("a") as output:
                output.write(f"the server that forks workers is gone: {error}\n")
        finally:
            os.close(given)

    def send(self, line: bytes) -> None:
        data = memoryview(line)
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._input, data) :]

    def poll(self) -> int | None:
        while self.returncode is None and self._has_message(0.0):
            self._receive()
        if self.returncode is None and self._killed is not None and time.monotonic() - self._killed > SECONDS_TO_DIE:
            self._give_up()
        return self.returncode

    def _has_message(self, seconds: float) -> bool:
        """Whether the server says something within this time; `select` would fail from descriptor 1024 on."""
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        return bool(poll.poll(math.ceil(seconds * 1000)))

    def _give_up(self) -> None:
        """The server does not tell of the end: it is stopped, or the process waits in the kernel for a disk."""
        self._kill_without_server()
        self.returncode, self.has_server = -signal.SIGKILL, False

    def _kill_without_server(self) -> None:
        """The number is still the process's own, since the server has not said that it took its end."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while self.poll() is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if left == 0.0:
                return
            self._has_message(1.0 if left is None else min(left, 1.0))

    def _receive(self) -> None:
        """Takes what the server says; that it is gone is an end, too."""
        try:
            data = self._server.recv(4096)
        except ConnectionError:
            data = b""
        if not data:
            self.returncode, self.has_server = 1, False
            self._handle_lost_server()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for message in map(json.loads, lines):
            self.pid = message.get("pid", self.pid)
            self.returncode = message.get("status", self.returncode)

    def _handle_lost_server(self) -> None:
        """Nobody would tell how the worker ends: it is ended. Where there was none yet, the server's log says why."""
        why = self._log_of_server.read_bytes() if self.pid == 0 and self._log_of_server.exists() else b""
        with self._log.open("ab") as log:
            log.write(why or b"the server that forks workers is gone\n")
        self._kill_without_server()

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._server.sendall(json.dumps({"signal": int(number)}).encode() + b"\n")

    def kill(self) -> None:
        """Ends it; what is not gone within `SECONDS_TO_DIE` counts as gone."""
        self._killed = self._killed or time.monotonic()
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """May be called more than once: the descriptor's number may be another file's by then."""
        given, self._input = self._input, -1
        if given >= 0:
            os.close(given)
        self._server.close()


class EndReason(NamedTuple):
    """Why a process ended.

    Attributes:
        why: in a line.
        is_reported: whether it said so itself: a refusal, or a fault that it reported.
        follows: whether what it reported is that another process is gone, or does not answer.
    """

    why: str
    is_reported: bool
    follows: bool = False


class RunProcess(ABC):
    """A process of the run, wherever it is.

    Args:
        spec: what it is told.

    Attributes:
        was_ended: whether this command ended it.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.job = spec
        self.was_ended = False
        if not spec.is_resumed:
            spec.log.unlink(missing_ok=True)
        self._begin()

    def _begin(self) -> None:
        """What it says from here on is its own word, and no earlier one's."""
        self._first_event = file_size(self.job.events)
        self._first_word = file_size(self.job.log)

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """How it ended, as `subprocess.Popen` has it; None as long as it lives."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Its number, where it is."""

    @property
    @abstractmethod
    def has_server(self) -> bool:
        """Whether what started it was there when it was last heard."""

    @abstractmethod
    def wait(self, seconds: float) -> None: ...

    @abstractmethod
    def stop(self) -> None:
        """Asks it to end after the call that it is in."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it at once."""

    @abstractmethod
    def start_again(self) -> str:
        """Starts one that is lost again, at the same address and with the same log; gives how it was lost."""

    @property
    def is_alive(self) -> bool:
        return self.returncode is None

    @property
    def is_lost(self) -> bool:
        """Whether it has ended otherwise than well."""
        return self.returncode not in (None, 0)

    def describe_exit(self) -> str:
        return describe_exit(self.returncode or 0)

    def reason(self) -> EndReason:
        for event in reversed(list(EventReader(self.job.events, self._first_event).read())):
            if event["event"] in ("refused", "fault"):
                return EndReason(event.get("message") or event["error"], True, event.get("lost_peer", False))
        words = last_lines(self.job.log, offset=self._first_word)
        died = WorkerDied(self.describe_exit(), words, self.job.name)
        return EndReason(str(died), False)


class WorkerProcess(RunProcess):
    """One on this machine, that ends when the launcher does, its output in a log of its own.

    Args:
        spec: what it is told.
        environment: added to the launcher's, in which TF_CONFIG does not count.
        server: the address of the server that forks it.
    """

    def __init__(self, spec: RunSpec, environment: Mapping[str, str], server: str) -> None:
        super().__init__(spec)
        self._environment = environment
        self._server = server
        self._process = self._start()

    def _start(self) -> ForkedProcess:
        environment = {**inherit_environment(), **self._environment}
        process = ForkedProcess(self._server, self.job.log, environment)
        process.send(self.job.to_json(environment).encode() + b"\n")
        return process

    def start_again(self) -> str:
        how = self.describe_exit()
        self._process.close()
        self._begin()
        self._process = self._start()
        return how

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_server(self) -> bool:
        return self._process.has_server

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def wait(self, seconds: float) -> None:
        self._process.wait(seconds)

    def stop(self) -> None:
        self._process.signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.is_alive:
            self.was_ended = True
            self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._process.close()


@contextlib.contextmanager
def start_workers(
    jobs: Sequence[RunSpec], environments: Sequence[Mapping[str, str]], server: str
) -> Iterator[list[WorkerProcess]]:
    """The workers of a run on this machine, the chief first; none outlives the block, nor do their temporary files.

    Args:
        jobs: what each is told.
        environments: what is added to each one's environment.
        server: the address of the server that forks them.
    """
    workers: list[WorkerProcess] = []
    temporary = tempfile.TemporaryDirectory(prefix="scaleflow-", ignore_cleanup_errors=True)
    try:
        for job, environment in zip(jobs, environments, strict=True):
            workers.append(WorkerProcess(job, {"TMPDIR": temporary.name, **environment}, server))
        yield workers
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.close()
        temporary.cleanup()


@contextlib.contextmanager
def start_fork_server(there: str | None = None, lost: str | None = None) -> Iterator[str]:
    """A server that forks workers, for as long as the block; gives its address.

    It imports TensorFlow in the meantime: whoever asks before waits.

    Args:
        there: the address of one that should run already; where none does, one is started.
        lost: the address of one that is known to be gone. A server that is killed may be seen to have left its
            workers a moment before its address is closed.
    """
    found = os.environ.get(SERVER) if not there else there if there != lost and is_server_reachable(there) else None
    if found:
        yield found
        return
    with (
        tempfile.TemporaryDirectory(prefix="scaleflow-", dir=find_socket_folder()) as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        address = str(Path(folder, "socket"))
        listener.bind(address)
        listener.listen(64)
        ours, theirs = os.pipe()
        os.set_inheritable(theirs, False)
        with Path(folder, LOG).open("wb") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", "scaleflow.launcher.fork_server", str(ours)],
                stdin=listener.fileno(),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherit_environment(),
                pass_fds=[ours],
                process_group=0,
            )
        os.close(ours)
        listener.close()  # whoever asks when it is gone is told so
        try:
            yield address
        finally:
            os.close(theirs)
            server.kill()  # it may still import; its workers have ended, or end by themselves
            server.wait()


def is_server_reachable(address: str) -> bool:
    """Whether a server answers there."""
    with socket.socket(socket.AF_UNIX) as asked:
        return asked.connect_ex(address) == 0


def find_socket_folder() -> str | None:
    """Where to put a socket, whose path must not be long; None for where temporary files are."""
    return None if len(tempfile.gettempdir()) < LONGEST_ADDRESS else "/tmp"


def inherit_environment() -> dict[str, str]:
    """The launcher's environment: Keras on TensorFlow whatever keras.json says, the log written as it comes.

    Without TF_CONFIG, which would make a strategy of one process wait for others.
    """
    kept = {key: value for key, value in os.environ.items() if key != TF_CONFIG}
    return {**kept, "KERAS_BACKEND": "tensorflow", "PYTHONUNBUFFERED": "1"}


def describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def last_lines(log: Path, count: int = 3, offset: int = 0) -> str:
    """The end of a log, without what TensorFlow's runtime says of itself, and nothing from before an offset."""
    with log.open(errors="replace") as lines:
        lines.seek(offset)
        own = (
            line.strip()
            for line in lines
            if line.strip() and not re.match(r"[IWE]\d{4} |WARNING: All log|To enable the following", line)
        )
        return " | ".join(deque(own, count))
