"""The processes of a case: commands, and the server that forks their workers, with TensorFlow imported beforehand."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from scaleflow.launcher.processes.handover import SERVER_ENV
from tests.conftest import clean_environment
from tests.event_log import events_in
from tests.processes import CommandProcess, call

#: A command that has not ended by then hangs; on a machine with much else to do one takes long to begin.
SECONDS_TO_END = 300.0

#: How long processes may be left after a launcher was killed: they have 30 s to save, and are ended 5 s later.
SECONDS_TO_VANISH = 120.0

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


def start(folder: Path, log: Path, words: Sequence[str], environment: Mapping[str, str]) -> CommandProcess:
    """`python -m WORDS...`, with its output in a log."""
    with log.open("ab") as output:
        return CommandProcess(words, folder, environment, (output.fileno(), output.fileno()))


class Command:
    """A command that runs.

    Attributes:
        name: of its log.
    """

    def __init__(self, bench: Bench, name: str, words: Sequence[str], module: str) -> None:
        self.name = name
        self.log = bench.folder / f"{name}.log"
        self._process = start(bench.folder, self.log, [*module.split(), *words], bench.environment)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self, seconds: float = SECONDS_TO_END) -> int:
        """Its exit code, as `subprocess.Popen` has it."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Hang(f"the command {self.name} did not end within {seconds:g} s") from None

    def kill(self) -> None:
        self._process.close()

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
        self._servers: list[CommandProcess] = []
        self.serve()

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def serve(self) -> None:
        """Makes a server from which the next commands' workers are forked."""
        address = f"{self._temporary}/{len(self._servers)}"
        self.environment[SERVER_ENV] = address
        words = ["tests.campaign.forker", address]
        server = start(self.folder, self.folder / "forker.log", words, self.environment)
        self._servers.append(server)
        until(lambda: Path(address).exists() or server.poll() is not None, 60, "the server did not listen")

    @property
    def forker(self) -> psutil.Process | None:
        """The server of now, if it lives."""
        return psutil.Process(self._servers[-1].pid) if self._servers[-1].poll() is None else None

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
                if server.poll() is None:
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
        for server in self._servers:
            server.close()
            if server.poll() is None:
                wrong.append("the server that forks workers did not end")
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


def make_store(folder: str) -> None:
    """In a child: an empty store, so that no command has to make one."""
    from mlflow import MlflowClient

    MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()


def empty_store(folder: Path) -> Path:
    """Makes one; gives its file."""
    call(make_store, str(folder))
    return folder / "mlflow.db"


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
