"""The fork server: imports TensorFlow once and forks workers, which then start in milliseconds.

`python -m scaleflow.launcher.processes.fork_server FD` runs it, with a listening Unix socket as standard input. It
ends when the launcher is gone, which holds the other end of the pipe FD. TensorFlow's runtime does not start before a
fork, so each worker sets up its own devices. Each worker has its own connection, with messages of one JSON object per
line:

    launcher -> server   {"module": ..., "environment": ..., "folder": ...} with three descriptors: the standard input,
                         output and error of the worker, which runs the `main` of the module
    server -> launcher   {"pid": ...}; later {"status": ...}, with the same meaning as `Popen.returncode`
    launcher -> server   {"signal": ...}, forwarded to the worker unless it has ended
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

#: Maximum bytes of a first message: an environment and a path.
MAX_MESSAGE_BYTES = 4 * 2**20

#: Seconds until a worker whose launcher is gone is killed. It ends by itself before that, unless TensorFlow hangs.
ORPHAN_SECONDS = 35.0


class ForkRequest:
    """A connection for one worker, before and after the fork."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid: int | None = None
        self._partial = b""
        self._descriptors: list[int] = []

    def receive(self) -> list[dict[str, Any]] | None:
        """Receives complete messages; returns None if the launcher is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.connection, MAX_MESSAGE_BYTES, 3)
        except ConnectionError:
            return None
        self._descriptors += descriptors
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def descriptors(self) -> list[int]:
        """Hands over the worker's standard input, output and error."""
        descriptors, self._descriptors = self._descriptors, []
        return descriptors

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        self.connection.close()
        for descriptor in self._descriptors:
            os.close(descriptor)


class ForkServer:
    """Forks a worker for each connection, reports how it ended, and forwards signals.

    `alive` is the descriptor of a pipe that becomes readable when the launcher is gone.
    """

    def __init__(self, listener: socket.socket, alive: int) -> None:
        self._listener = listener
        self._alive = alive
        self._workers: dict[int, ForkRequest] = {}
        self._orphans: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_writer = socket.socketpair()
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        for source in (self._listener, self._wakeup, self._alive):
            self._selector.register(source, selectors.EVENT_READ)
        while True:
            self._end_orphans()
            for key, _ in self._selector.select(1.0 if self._orphans else None):
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._selector.register(connection, selectors.EVENT_READ, ForkRequest(connection))
                elif key.fileobj is self._wakeup:
                    self._reap()
                elif key.fileobj == self._alive:
                    return
                else:
                    self._handle_messages(key.data)

    def _end_orphans(self) -> None:
        """Kills workers whose launcher has been gone for `ORPHAN_SECONDS`."""
        for pid in [pid for pid, deadline in self._orphans.items() if time.monotonic() > deadline]:
            del self._orphans[pid]
            if pid in self._workers:
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass
        with contextlib.suppress(ChildProcessError):  # no worker is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # asking for each worker would be quadratic when all end
                pid, status = ended
                if request := self._workers.pop(pid, None):
                    request.pid = None
                    request.send(status=os.waitstatus_to_exitcode(status))

    def _handle_messages(self, request: ForkRequest) -> None:
        messages = request.receive()
        if messages is None:
            self._selector.unregister(request.connection)
            request.close()
            if request.pid is not None:
                self._orphans[request.pid] = time.monotonic() + ORPHAN_SECONDS
            return
        for message in messages:
            if "signal" in message:
                if request.pid is not None:  # not reaped yet, so the id still belongs to the worker
                    os.kill(request.pid, message["signal"])
            else:
                self._fork(request, message)

    def _fork(self, request: ForkRequest, message: dict[str, Any]) -> None:
        streams = request.descriptors()
        request.pid = os.fork()
        if request.pid == 0:
            self._close_server_descriptors()
            become_worker(streams, **message)
        for stream in streams:
            os.close(stream)
        self._workers[request.pid] = request
        request.send(pid=request.pid)

    def _close_server_descriptors(self) -> None:
        """In the child: closes the server's descriptors, so that none of them keeps a pipe of the launcher open."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, ForkRequest):
                key.data.close()
        self._selector.close()
        for sock in (self._listener, self._wakeup, self._wakeup_writer):
            sock.close()
        os.close(self._alive)


def become_worker(streams: Sequence[int], module: str, environment: dict[str, str], folder: str) -> NoReturn:
    """In the child: runs a worker as if it had been started by itself, but with TensorFlow already imported."""
    try:
        os.setpgid(0, 0)
        for target, source in enumerate(streams):
            os.dup2(source, target)
            os.close(source)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # a cached value; the new environment may say otherwise
        os.chdir(folder)
        sys.path[0] = folder
        importlib.import_module(module).main()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def import_tensorflow() -> None:
    from scaleflow.worker.keras_import import import_keras

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

    gc.freeze()  # memory that the collector does not touch stays shared between the workers


def main() -> None:
    """Runs the server. Standard input is the listener, the argument is `ForkServer`'s `alive`."""
    for number in (signal.SIGINT, signal.SIGTERM):  # cluster engines signal every process; the launcher decides
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import_tensorflow()
    ForkServer(listener, int(sys.argv[1])).run()
    os._exit(0)


if __name__ == "__main__":
    main()
