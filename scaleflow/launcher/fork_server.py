"""A process that imports TensorFlow once and forks workers from then on: the second starts in milliseconds.

Run as a module of its own, `python -m scaleflow.launcher.fork_server`, with a listening Unix socket for standard input;
it
ends when whoever holds the other end of the pipe that its argument names is gone. Nothing of TensorFlow's runtime is
started before a fork, so each worker sets up devices of its own. A connection is made for each worker:

    launcher -> server   {"module": ..., "environment": ..., "folder": ...}, and three descriptors: the worker's
                         input, output and errors; the module's `main` is what it does
    server -> launcher   {"pid": ...}; later {"status": ...}, as `Popen.returncode` has it
    launcher -> server   {"signal": ...}, sent on to a worker that has not ended
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

#: Longest first message: an environment and a path.
LONGEST = 4 * 2**20

#: A worker whose launcher is gone saves and ends by itself; one that hangs in a call of TensorFlow's is ended.
SECONDS_TO_END = 35.0


class ForkRequest:
    """A connection: one worker that was, or will be, forked."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid: int | None = None
        self._rest = b""
        self._descriptors: list[int] = []

    def receive(self) -> list[dict[str, Any]] | None:
        """Whole messages; None where the launcher is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.connection, LONGEST, 3)
        except ConnectionError:
            return None
        self._descriptors += descriptors
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def descriptors(self) -> list[int]:
        """The worker's input, output and errors."""
        given, self._descriptors = self._descriptors, []
        return given

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # nobody asks any more
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        self.connection.close()
        for descriptor in self._descriptors:
            os.close(descriptor)


class ForkServer:
    """Forks a worker for each connection, tells of its end, and hands on signals."""

    def __init__(self, listener: socket.socket, alive: int) -> None:
        self._listener = listener
        self._alive = alive
        self._workers: dict[int, ForkRequest] = {}
        self._left: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, waker = socket.socketpair()
        for end in (self._woken, waker):
            end.setblocking(False)
        self._waker = waker

    def run(self) -> None:
        """Until the launcher is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(self._alive, selectors.EVENT_READ)
        while True:
            self._end_orphans()
            for key, _ in self._selector.select(1.0 if self._left else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._reap()
                elif key.fileobj == self._alive:
                    return
                else:
                    self._handle_messages(key.data)

    def _end_orphans(self) -> None:
        """Ends workers whose launcher has been gone for long."""
        for pid in [pid for pid, deadline in self._left.items() if time.monotonic() > deadline]:
            del self._left[pid]
            if pid in self._workers:
                os.kill(pid, signal.SIGKILL)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._selector.register(connection, selectors.EVENT_READ, ForkRequest(connection))

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        for pid, asked in list(self._workers.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._workers[pid]
                asked.pid = None
                asked.send(status=os.waitstatus_to_exitcode(status))

    def _handle_messages(self, asked: ForkRequest) -> None:
        messages = asked.receive()
        if messages is None:
            self._selector.unregister(asked.connection)
            asked.close()
            if asked.pid is not None:
                self._left[asked.pid] = time.monotonic() + SECONDS_TO_END
            return
        for message in messages:
            if "signal" in message:
                if asked.pid is not None:  # not reaped yet, so the number is still its own
                    os.kill(asked.pid, message["signal"])
            else:
                self._fork(asked, message)

    def _fork(self, asked: ForkRequest, message: dict[str, Any]) -> None:
        streams = asked.descriptors()
        pid = os.fork()
        if pid == 0:
            self._leave_to_the_worker()
            become_worker(streams, **message)
        for stream in streams:
            os.close(stream)
        asked.pid = pid
        self._workers[pid] = asked
        asked.send(pid=pid)

    def _leave_to_the_worker(self) -> None:
        """In the child: what is the server's is closed, so that the launcher's pipes end when they should."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, ForkRequest):
                key.data.close()
        self._selector.close()
        for sock in (self._listener, self._woken, self._waker):
            sock.close()
        os.close(self._alive)


def become_worker(streams: Sequence[int], module: str, environment: dict[str, str], folder: str) -> NoReturn:
    """In the child: a worker as if it had been started by itself, with TensorFlow imported already."""
    try:
        os.setpgid(0, 0)
        for target, source in enumerate(streams):
            os.dup2(source, target)
            os.close(source)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # it may be known from before, and is the environment's to say
        os.chdir(folder)
        sys.path[0] = folder
        importlib.import_module(module).main()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def import_tensorflow() -> None:
    """Imports what every worker would import."""
    from scaleflow.worker.main import import_keras

    import_keras()
    import scaleflow.checkpoint
    import scaleflow.dataset
    import scaleflow.hardware
    import scaleflow.model
    import scaleflow.optimizer
    import scaleflow.precision
    import scaleflow.strategy
    import scaleflow.training
    import scaleflow.worker.build  # noqa: F401

    gc.freeze()  # what is never collected stays shared between the workers


def main() -> None:
    """The process: standard input is the listener, the argument the descriptor of a pipe that the launcher holds."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the launcher decides; an engine sends it to every process
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import_tensorflow()
    ForkServer(listener, int(sys.argv[1])).run()
    os._exit(0)


if __name__ == "__main__":
    main()
