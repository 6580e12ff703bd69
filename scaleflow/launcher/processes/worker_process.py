"""Starts, watches and ends worker processes, which a fork server forks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import selectors
import signal
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaleflow.errors import WorkerDied
from scaleflow.interfaces.events import FaultReported, RunRefused
from scaleflow.launcher.processes.server_start import KILL_SECONDS, SERVER_LOG, make_process_environment
from scaleflow.runs import EventReader, RunSpec

#: Variables with the sizes of TensorFlow's thread pools. The config's sizes take precedence.
THREADS_ENV = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

#: Seconds during which `MessageWatch` does not look again, so that one system call serves a loop over all processes.
LOOK_SECONDS = 0.01

#: Seconds to wait for the end of a process that was killed before the server, which still imports, has forked it.
FORK_SECONDS = 1.0


class MessageWatch:
    """Receives the fork server's messages to all processes of a run with one system call, instead of one per process.

    Only one thread may use it.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._looked_at = -math.inf

    def add(self, connection: socket.socket, process: ForkedProcess) -> None:
        self._selector.register(connection, selectors.EVENT_READ, process)

    def remove(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # already removed at the end of the process, or closed
            self._selector.unregister(connection)

    def look(self) -> None:
        """Receives waiting messages, unless it did so within the last `LOOK_SECONDS`."""
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self.wait(0.0)

    def wait(self, seconds: float) -> None:
        """Waits for messages to any of the processes, and receives them."""
        for key, _ in self._selector.select(seconds):
            key.data.receive()
            if key.data.returncode is not None:  # a connection that the server closed stays readable
                self._selector.unregister(key.fileobj)
        self._looked_at = time.monotonic()

    def close(self) -> None:
        self._selector.close()


class ForkedProcess:
    """A process forked by the fork server. It reads its task from standard input, and ends when standard input is
    closed.

    Args:
        module: the module whose `main` the process runs.
        streams: descriptors that receive standard output and error instead of the log. Further ones are passed on;
            their numbers are the module's words.
        watch: receives the messages to this process and to others in one thread; None: each call of this object
            receives its own.

    Attributes:
        pid: the process id; 0 until the server reports it.
        returncode: the exit status, as in `subprocess.Popen`; None while the process runs.
        has_server: whether the server answered at the last contact.
    """

    def __init__(
        self,
        address: str,
        log: Path,
        environment: Mapping[str, str],
        module: str = "scaleflow.worker.main",
        streams: Sequence[int] | None = None,
        watch: MessageWatch | None = None,
    ) -> None:
        self.returncode: int | None = None
        self.has_server = True
        self.pid = 0
        self._killed: float | None = None
        self._partial = b""
        self._log = log
        self._log_of_server = Path(address).with_name(SERVER_LOG)
        task, self._input = os.pipe()
        os.set_inheritable(self._input, False)
        self._server = socket.socket(socket.AF_UNIX)
        self._watch = watch
        try:
            with log.open("ab") as output:
                self._server.connect(address)
                request = {"module": module, "environment": dict(environment), "folder": str(Path.cwd())}
                line = json.dumps(request).encode() + b"\n"
                sent = socket.send_fds(self._server, [line], [task, *(streams or [output.fileno()] * 2)])
                self._server.sendall(line[sent:])
            if watch is not None:
                watch.add(self._server, self)
        except OSError as error:
            self.returncode = 1
            self.has_server = False
            self._log_lost_server(f": {error}")
        finally:
            os.close(task)

    def send(self, line: bytes) -> None:
        data = memoryview(line)
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._input, data) :]

    def poll(self) -> int | None:
        if self._watch is not None and self.returncode is None:
            self._watch.look()
        while self._watch is None and self.returncode is None and self._has_message(0.0):
            self.receive()
        if self.returncode is None and self._killed is not None:
            patience = KILL_SECONDS if self.pid else FORK_SECONDS
            # The server is suspended or a disk hangs: no report will come.
            if time.monotonic() - self._killed > patience:
                self._kill_without_server()
                self.returncode = -signal.SIGKILL
                self.has_server = False
        return self.returncode

    def _has_message(self, seconds: float) -> bool:
        """Waits for a message of the server. It uses `poll`, since `select` fails for descriptors from 1024 on."""
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        return bool(poll.poll(math.ceil(seconds * 1000)))

    def _kill_without_server(self) -> None:
        """Kills the process by its id. The id is still valid, because the server has not reported the end."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while self.poll() is None:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if remaining == 0.0:
                return
            wait = self._has_message if self._watch is None else self._watch.wait
            wait(1.0 if remaining is None else min(remaining, 1.0))

    def receive(self) -> None:
        """Reads the server's messages. If the server is gone, the process counts as ended."""
        try:
            data = self._server.recv(4096)
        except ConnectionError:
            data = b""
        if not data:
            self.returncode = 1
            self.has_server = False
            self._log_lost_server()
            self._kill_without_server()  # nobody would report its end
        *lines, self._partial = (self._partial + data).split(b"\n")
        for message in map(json.loads, lines):
            self.pid = message.get("pid", self.pid)
            self.returncode = message.get("status", self.returncode)
            if "refused" in message:
                self.returncode = 1
                with self._log.open("ab") as log:
                    log.write(f"the fork server: {message['refused']}\n".encode())

    def _log_lost_server(self, why: str = "") -> None:
        """Writes to the log that the server is gone. If it forked no process, its own log explains why."""
        server_log = self._log_of_server.read_bytes() if self.pid == 0 and self._log_of_server.exists() else b""
        with self._log.open("ab") as log:
            log.write(server_log or f"the fork server has ended{why}\n".encode())

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._server.sendall(json.dumps({"signal": int(number)}).encode() + b"\n")

    def kill(self) -> None:
        """Kills the process. It counts as dead after `KILL_SECONDS`, even if the server does not report its end.

        If the server has not forked it yet, the server kills it right after the fork.
        """
        self._killed = self._killed or time.monotonic()
        self.signal(signal.SIGKILL)

    def close_input(self) -> None:
        """Closes standard input once: a second call must not close a reused descriptor number."""
        descriptor = self._input
        self._input = -1
        if descriptor >= 0:
            os.close(descriptor)

    def close(self) -> None:
        """Closes standard input and the connection."""
        self.close_input()
        if self._watch is not None:
            self._watch.remove(self._server)
        self._server.close()


@dataclass(frozen=True)
class EndReason:
    """Why the processes of a run ended."""

    why: str  # one line
    is_reported: bool = False  # whether a worker itself reported the reason, as a refusal or an error
    is_lost_peer: bool = False  # whether it reported that another process is gone or does not answer
    has_log: bool = True  # whether a log has more details

    @property
    def would_come_again(self) -> bool:
        """Whether a restart would end in the same way."""
        return self.is_reported and not self.is_lost_peer


class RunProcess(ABC):
    """A process of the run, on this or another machine. `was_ended` is whether this command killed it."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.was_ended = False
        if not spec.is_resumed:
            spec.log.unlink(missing_ok=True)
        self._begin()

    def _begin(self) -> None:
        """Remembers where the new process's events and log begin."""
        self._events_begin = file_size(self.spec.events)
        self._log_begin = file_size(self.spec.log)

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """The exit status, as in `subprocess.Popen`; None while the process runs."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process id on its machine; 0 if unknown."""

    @property
    @abstractmethod
    def has_server(self) -> bool:
        """Whether the fork server or the actor that started the process answered at the last contact."""

    @abstractmethod
    def wait(self, seconds: float) -> None: ...

    def release(self) -> None:  # noqa: B027  # other hosts start their processes after the store is open
        """Allows the process to report `ready` and train, because the store can be used."""

    def announce_interrupt(self) -> None:  # noqa: B027  # it matters to scripts, which run on this machine
        """Tells the process that Ctrl-C is the reason of the `stop` that follows."""

    @abstractmethod
    def stop(self) -> None:
        """Requests the process to save and end after the current call of the training loop."""

    @abstractmethod
    def kill(self) -> None:
        """Kills the process."""

    @abstractmethod
    def start_again(self) -> str:
        """Restarts a lost process with the same address and log. Returns how it was lost."""

    @property
    def is_alive(self) -> bool:
        return self.returncode is None

    @property
    def is_lost(self) -> bool:
        """Whether the process has ended with an error."""
        return self.returncode not in (None, 0)

    def describe_exit(self) -> str:
        return describe_exit(self.returncode or 0)

    def find_reason(self) -> EndReason:
        """Returns why the process ended, from its own report or from the end of its log."""
        for event in reversed(list(EventReader(self.spec.events, self._events_begin).read())):
            if isinstance(event, RunRefused):
                return EndReason(event.message, is_reported=True, has_log=event.keep)
            if isinstance(event, FaultReported):
                return EndReason(event.error, is_reported=True, is_lost_peer=event.lost_peer)
        lines = last_lines(self.spec.log, offset=self._log_begin)
        return EndReason(str(WorkerDied(self.describe_exit(), lines, self.spec.name)))


class LocalWorker(RunProcess):
    """A process on this machine, with its own log. It ends when the launcher ends.

    `environment` has variables to add to the launcher's environment, whose TF_CONFIG is ignored. `server` is the
    address of the fork server. `watch` receives the server's messages to all processes of the run.
    """

    def __init__(
        self, spec: RunSpec, environment: Mapping[str, str], server: str, watch: MessageWatch | None = None
    ) -> None:
        super().__init__(spec)
        self._environment = environment
        self._server = server
        self._watch = watch
        self._process = self._start()

    def _start(self) -> ForkedProcess:
        environment = {**make_process_environment(), **self._environment}
        process = ForkedProcess(self._server, self.spec.log, environment, watch=self._watch)
        process.send(self.spec.to_line(environment))
        return process

    def start_again(self) -> str:
        exit_description = self.describe_exit()
        self._process.close()
        self._begin()
        self._process = self._start()
        self.release()
        return exit_description

    def release(self) -> None:
        self._process.send(b"\n")

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

    def announce_interrupt(self) -> None:
        self._process.signal(signal.SIGINT)  # workers ignore it, except for those that run a script

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
) -> Iterator[list[LocalWorker]]:
    """Starts the processes of a run on this machine, each with its own variables. Yields them, the chief first.

    After the block, the processes are dead and their temporary files are deleted.
    """
    workers: list[LocalWorker] = []
    watch = MessageWatch()
    temporary = tempfile.TemporaryDirectory(prefix="scaleflow-", ignore_cleanup_errors=True)
    try:
        for spec, environment in zip(jobs, environments, strict=True):
            workers.append(LocalWorker(spec, {"TMPDIR": temporary.name, **environment}, server, watch=watch))
        yield workers
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.close()
        watch.close()
        temporary.cleanup()


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
    """Returns the last lines of a log after an offset, without messages of TensorFlow's runtime."""
    with log.open(errors="replace") as lines:
        lines.seek(offset)
        last: deque[str] = deque(maxlen=count)
        for line in lines:
            is_of_runtime = re.match(r"[IWE]\d{4} |WARNING: All log|To enable the following", line)
            if line.strip() and not is_of_runtime:
                last.append(line.strip())
        return " | ".join(last)
