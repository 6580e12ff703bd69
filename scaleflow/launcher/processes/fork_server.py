"""The fork server: imports TensorFlow once and forks processes, which then start in milliseconds.

`python -m scaleflow.launcher.processes.fork_server FD` runs it, with a listening Unix socket as standard input. The
launcher holds the other end of the pipe FD; the server ends when the launcher is gone. TensorFlow's runtime does not
start before a fork, so each worker sets up its own devices. The warm server is also a fork server: it forks commands,
and the fork servers of their runs.

Each process has its own connection, with messages of one JSON object per line:

    client -> server   the fields of `become_process`, with the descriptors of the process: its standard input, output
                       and error, and others, whose numbers it gets as words
    server -> client   {"pid": ...}; later {"status": ...}, with the same meaning as `Popen.returncode`;
                       {"refused": ...} if the server may not fork
    client -> server   {"signal": ...}, forwarded to the process unless it has ended
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from scaleflow.interfaces.collector import pause_collector

#: Maximum bytes of a first message: an environment and a path.
MAX_MESSAGE_BYTES = 4 * 2**20

#: Maximum number of descriptors passed to a process.
MAX_DESCRIPTORS = 4

#: Seconds until a worker without a launcher is killed. It ends earlier by itself, unless TensorFlow hangs.
ORPHAN_SECONDS = 35.0


class ForkRequest:
    """A connection for one process, before and after the fork."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid: int | None = None
        self._partial = b""
        self._descriptors: list[int] = []

    def receive(self) -> list[dict[str, Any]] | None:
        """Receives complete messages; returns None if the launcher is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.connection, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        except ConnectionError:
            return None
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._descriptors += descriptors
        *lines, self._partial = (self._partial + data).split(b"\n")
        try:
            return [json.loads(line) for line in lines] if data else None
        except ValueError:  # not one of our clients
            return None

    def descriptors(self) -> list[int]:
        """Returns the descriptors of the process, and leaves closing them to the caller."""
        descriptors = self._descriptors
        self._descriptors = []
        return descriptors

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        self.connection.close()
        for descriptor in self._descriptors:
            os.close(descriptor)


class ForkServer:
    """Forks a process for each connection, reports how it ended, and forwards signals.

    Args:
        alive: the descriptor of a pipe that becomes readable when the launcher is gone; None for a server without a
            launcher.
    """

    def __init__(self, listener: socket.socket, alive: int | None) -> None:
        self._listener = listener
        self._alive = alive
        self._forked: dict[int, ForkRequest] = {}
        self._orphans: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_writer = socket.socketpair()
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        for source in (self._listener, self._wakeup):
            self._selector.register(source, selectors.EVENT_READ)
        if self._alive is not None:
            self._selector.register(self._alive, selectors.EVENT_READ)
        while not self._is_over():
            self._end_orphans()
            for key, _ in self._selector.select(1.0 if self._orphans else self.check_seconds):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wakeup:
                    self._reap()
                elif key.fileobj == self._alive:
                    return
                else:
                    self._handle_messages(key.data)

    #: Seconds between two checks whether the server should end; None: check only after a message or the end of a
    #: process.
    check_seconds: ClassVar[float | None] = None

    def _is_over(self) -> bool:
        """Whether the server ends by itself."""
        return False

    def _find_obstacle(self) -> str | None:
        """Returns why the server may not fork a process; None if it may."""
        return None

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._watch(connection)

    def _watch(self, connection: socket.socket) -> None:
        self._selector.register(connection, selectors.EVENT_READ, ForkRequest(connection))

    def _end_orphans(self) -> None:
        """Kills processes whose launcher has been gone for `ORPHAN_SECONDS`."""
        for pid in [pid for pid, deadline in self._orphans.items() if time.monotonic() > deadline]:
            del self._orphans[pid]
            if pid in self._forked:
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass
        with contextlib.suppress(ChildProcessError):  # no process is left
            # Waiting for each process would take quadratic time if all end.
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:  # none of the others has ended
                    break
                request = self._forked.pop(pid, None)
                if request:
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
                if request.pid is not None:  # not reaped yet, so the id still belongs to the process
                    os.kill(request.pid, message["signal"])
            elif "module" in message:
                self._fork(request, message)
            else:
                self._answer(request, message)

    def _answer(self, request: ForkRequest, message: dict[str, Any]) -> None:
        """Answers a message that does not request a process."""

    def _fork(self, request: ForkRequest, message: dict[str, Any]) -> None:
        descriptors = request.descriptors()
        obstacle = self._find_obstacle()
        try:
            pid = -1 if obstacle else os.fork()
        except OSError as error:  # too many processes, or too little memory
            pid = -1
            obstacle = f"it cannot fork: {error.strerror}"
        if pid == 0:
            try:
                self._close_server_descriptors()
                become_process(descriptors, **message)
            finally:
                os._exit(1)  # the child must never continue as a server
        for descriptor in descriptors:
            os.close(descriptor)
        if obstacle:
            request.send(refused=obstacle)
        else:
            request.pid = pid
            self._forked[pid] = request
            request.send(pid=pid)

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
        if self._alive is not None:
            os.close(self._alive)


def become_process(
    descriptors: Sequence[int],
    module: str,
    environment: dict[str, str],
    folder: str,
    words: Sequence[str] = (),
    path: Sequence[str] | None = None,
    umask: int | None = None,
    limits: Mapping[str, int] | None = None,
    ignored: Sequence[int] = (signal.SIGINT,),
) -> NoReturn:
    """In the child: runs a module's `main` as in a new process, but with TensorFlow already imported.

    Args:
        descriptors: standard input, output and error, and others, which keep their numbers.
        words: the words of the command. The numbers of the other descriptors are appended.
        path: `sys.path`; None: the server's, with `folder` as its first entry.
        umask: None: the server's.
        limits: the soft limits, by the names in `resource`; limits that are left out stay the server's.
    """
    code = 1
    try:
        os.setpgid(0, 0)
        for target, source in enumerate(descriptors[:3]):
            os.dup2(source, target)
            os.close(source)
        take_environment(environment)
        os.chdir(folder)
        before = list(sys.path)
        sys.path[:] = [folder, *sys.path[1:]] if path is None else path
        forget_hidden_modules([entry for entry in sys.path if entry not in before])
        sys.argv = [module, *words, *map(str, descriptors[3:])]
        if signal.SIGINT not in ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        take_limits(umask, limits or {})
        importlib.import_module(module).main()
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)  # as an interpreter does
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def take_environment(environment: Mapping[str, str]) -> None:
    """Replaces the environment, and values that were computed from the old one."""
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    open_streams(is_unbuffered=bool(environment.get("PYTHONUNBUFFERED")))
    tempfile.tempdir = None
    if "matplotlib" in sys.modules and "MPLBACKEND" in environment:
        sys.modules["matplotlib"].rcParams["backend"] = environment["MPLBACKEND"]


def take_limits(umask: int | None, limits: Mapping[str, int]) -> None:
    """Sets the umask and the soft limits."""
    if umask is not None:
        os.umask(umask)
    for name, soft in limits.items():
        number = getattr(resource, name)
        resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))


def forget_hidden_modules(folders: Sequence[str]) -> None:
    """Removes imported packages that modules in these folders would hide: Python searches these folders first."""
    importlib.invalidate_caches()
    hidden: set[str] = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in os.listdir(folder):  # noqa: PTH208
                name = entry.removesuffix(".py")
                file = getattr(sys.modules.get(name), "__file__", None) or folder
                is_module = name != entry or Path(folder, name, "__init__.py").exists()
                if is_module and not Path(file).is_relative_to(folder):
                    hidden.add(name)
    hidden -= {"scaleflow", "__main__", *sys.stdlib_module_names}
    for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
        del sys.modules[name]


def open_streams(is_unbuffered: bool) -> None:
    """Reopens Python's standard streams, since their descriptors may now be a terminal, a file or a pipe."""
    sys.stdin = sys.__stdin__ = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        is_by_line = is_unbuffered or name == "stderr" or os.isatty(number)
        stream = open(  # noqa: SIM115
            number,
            "w",
            buffering=1 if is_by_line else -1,
            encoding=before.encoding,
            errors=before.errors,
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


@pause_collector()
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

    gc.freeze()  # the collector no longer touches this memory, so the workers share it


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
