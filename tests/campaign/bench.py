"""The processes of a case: commands, and the server that forks their workers, with TensorFlow imported beforehand."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from scaleflow.launcher.process import SERVER
from tests.campaign.judge import events_in
from tests.conftest import FORKSERVER, clean_environment

#: A command that has not ended by then hangs; on a machine with much else to do one takes long to begin.
SECONDS_TO_END = 180.0

#: How long processes may be left behind a launcher that was killed: they have 30 s to save, and are ended 5 s later.
SECONDS_TO_VANISH = 60.0

LOOK = 0.004


class Hang(Exception):
    """Something that was waited for did not come."""


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise Hang(f"{what} within {seconds:g} s")
        time.sleep(LOOK)
    return found


def begun(folder: str, name: str, environment: Mapping[str, str]) -> None:
    """In a child: a process as if it had been started by itself."""
    os.setpgid(0, 0)
    out = os.open(Path(folder, f"{name}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has another one read something else
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    tempfile.tempdir = None


def be_command(folder: str, name: str, words: Sequence[str], environment: Mapping[str, str], module: str) -> None:
    """In a child: `python -m scaleflow ...`, or another module of ours."""
    begun(folder, name, environment)
    sys.argv = [module, *words]
    import runpy

    runpy.run_module(module, run_name="__main__", alter_sys=True)


def be_server(folder: str, address: str, alive: Connection, environment: Mapping[str, str]) -> None:
    """In a child: `python -m scaleflow.launcher.server`, until the other end of `alive` is closed."""
    begun(folder, "forker", environment)
    from scaleflow.launcher.server import Server, preload

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    preload()
    Server(listener, alive.fileno()).run()
    os._exit(0)


class Command:
    """A command that runs.

    Attributes:
        name: of its log.
    """

    def __init__(self, bench: Bench, name: str, words: Sequence[str], module: str) -> None:
        self.name = name
        self.log = bench.folder / f"{name}.log"
        arguments = (str(bench.folder), name, list(words), bench.environment, module)
        self._process = FORKSERVER.Process(target=be_command, args=arguments)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def end(self, seconds: float = SECONDS_TO_END) -> int:
        """Its exit code, as `subprocess.Popen` has it."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise Hang(f"the command {self.name} did not end within {seconds:g} s")
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


class Bench:
    """A folder with one run in it.

    Args:
        folder: empty, or with a store in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[Command] = []
        self._temporary = tempfile.mkdtemp(prefix="bench-")
        self.environment = {**clean_environment(), "TMPDIR": self._temporary}
        self._servers: list[Any] = []
        self._alive: list[Connection] = []
        self.serve()

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def serve(self) -> None:
        """Makes a server from which the next commands' workers are forked."""
        address = f"{self._temporary}/{len(self._servers)}"
        theirs, ours = FORKSERVER.Pipe(duplex=False)
        self.environment[SERVER] = address
        server = FORKSERVER.Process(target=be_server, args=(str(self.folder), address, theirs, self.environment))
        server.start()
        theirs.close()
        until(lambda: Path(address).exists() or not server.is_alive(), 60, "the server did not listen")
        self._servers.append(server)
        self._alive.append(ours)

    @property
    def forker(self) -> psutil.Process | None:
        """The server of now, if it lives."""
        return psutil.Process(self._servers[-1].pid) if self._servers[-1].is_alive() else None

    def command(self, *words: str, module: str = "scaleflow") -> Command:
        if self.forker is None:
            self.serve()
        made = Command(self, f"command-{len(self.commands)}", words, module)
        self.commands.append(made)
        return made

    def workers(self) -> list[psutil.Process]:
        """All processes of the run but its launcher, as far as they live."""
        found = {pid for path in self.run.glob("events*.jsonl") for pid in pids_in(path)}
        for server in self._servers:
            with contextlib.suppress(psutil.NoSuchProcess):
                if server.is_alive():
                    found |= {child.pid for child in psutil.Process(server.pid).children(recursive=True)}
        return [process for process in map(living, found) if process is not None]

    def left(self) -> list[psutil.Process]:
        """What is still there of a run whose command is over, when it had the time to end."""
        with contextlib.suppress(Hang):
            until(lambda: not self.workers(), SECONDS_TO_VANISH, "")
        return self.workers()

    def close(self) -> list[str]:
        """Ends what is there; gives what did not end by itself when it should have."""
        wrong = []
        for process in [*self.workers()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for command in self.commands:
            if command.is_alive:
                command.kill()
        for alive in self._alive:
            alive.close()
        for server in self._servers:
            server.join(10)
            if server.is_alive():
                wrong.append("the server that forks workers did not end")
                server.kill()
        shutil.rmtree(self._temporary, ignore_errors=True)
        return wrong


@contextlib.contextmanager
def bench(folder: Path) -> Iterator[Bench]:
    made = Bench(folder)
    try:
        yield made
    finally:
        made.close()


def pids_in(path: Path) -> list[int]:
    return [event["pid"] for event in events_in(path) if event["event"] == "started"]


def living(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def make_store(folder: str, environment: Mapping[str, str]) -> None:
    """In a child: an empty store, so that no command has to make one."""
    begun(folder, "store", environment)
    from mlflow import MlflowClient

    MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()


def empty_store(folder: Path) -> Path:
    """Makes one; gives its file."""
    process = FORKSERVER.Process(target=make_store, args=(str(folder), clean_environment()))
    process.start()
    process.join(120)
    assert process.exitcode == 0, (folder / "store.log").read_text()
    return folder / "mlflow.db"


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def last_json(text: str) -> Any:
    return json.loads(text.splitlines()[-1])
