"""Commands in a warm server end as they would cold, whatever becomes of the server."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from scaleflow.launcher.processes.handover import SERVER_ENV, WARM_ENV, ServerFiles, identify_interpreter
from scaleflow.launcher.processes.worker_process import ForkedProcess
from tests.conftest import Command, clean_environment
from tests.launcher.test_supervisor import wait_for
from tests.processes import ROOT, server

RUN = ("training.epochs=1", "model.units=[8]")

#: A run that lasts until it is stopped.
LONG = ("training.epochs=100000", "model.units=[8]", "checkpoint=none")


class Warm:
    """A warm server in a folder of its own, and commands for it.

    Args:
        folder: of the commands.
        runtime: the folder in which the folder of sockets is.
    """

    def __init__(self, folder: Path, runtime: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in clean_environment().items() if name != SERVER_ENV},
            "XDG_RUNTIME_DIR": str(runtime),
            "PYTHONPATH": str(ROOT),
        }
        self.environment.pop(WARM_ENV, None)
        self.sockets = runtime / f"scaleflow-{os.geteuid()}"
        self.sockets.mkdir(mode=0o700)
        self.files = ServerFiles(self.sockets, self.digest())
        self._process: ForkedProcess | None = None

    def digest(self) -> str:
        code = "from scaleflow.launcher.processes.handover import identify_interpreter; print(identify_interpreter())"
        done = subprocess.run(
            [sys.executable, "-c", code], env=self.environment, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    def serve(self, has_thread: bool = False, **constants: float) -> None:
        """Starts the server. The constants are those of its module."""
        log = self.sockets / "test.log"
        self._process = ForkedProcess(server(), log, self.environment, module="tests.warm.server_process")
        options = {"socket": str(self.files.socket), "constants": constants, "has_thread": has_thread}
        self._process.send(json.dumps(options).encode() + b"\n")
        wait_for(self.files.socket.exists)

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.poll() is None
        return self._process.pid

    def has_ended(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process.close()

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "scaleflow", *words],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, **environment)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def served(self) -> int:
        (found,) = json.loads(self("warm", "status", "--json").stdout.splitlines()[-1])["servers"]
        return int(found["commands"])

    def read_events(self) -> list[dict[str, Any]]:
        """The events of the one run so far."""
        lines = [path.read_text().splitlines() for path in self.folder.glob("outputs/*/*/events.jsonl")]
        return [json.loads(line) for line in lines[0]] if lines else []

    def has_event(self, name: str) -> bool:
        with contextlib.suppress(json.JSONDecodeError):  # its last line is being written
            return name in [event["event"] for event in self.read_events()]
        return False


@pytest.fixture
def make_warm(tmp_path: Path) -> Iterator[Callable[[], Warm]]:
    with contextlib.ExitStack() as resources:

        def make() -> Warm:
            runtime = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="warm-", dir="/tmp")))
            warm = Warm(tmp_path, runtime)
            resources.callback(warm.close)
            return warm

        yield make


@pytest.fixture
def warm(make_warm: Callable[[], Warm]) -> Warm:
    return make_warm()


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def exact(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(("perf/", "system/"))}


def test_warm_commands_give_what_cold_ones_give(warm: Warm, command: Command, empty_store: Path) -> None:
    """In turn, with other words and another environment."""
    warm.serve()
    store = warm.folder / "store.db"
    shutil.copy(empty_store, store)
    for seed in (1, 2):
        words = (*RUN, f"seed={seed}", "--json")
        found = answer(warm(*words, MLFLOW_TRACKING_URI=f"sqlite:///{store}"))
        cold = answer(command(*words, "tracking=none"))
        assert exact(found["metrics"]) == exact(cold["metrics"])
        assert Path(found["folder"]).is_relative_to(warm.folder)
    evaluated = answer(warm("evaluate", found["run_id"], "--json", MLFLOW_TRACKING_URI=f"sqlite:///{store}"))
    assert evaluated["metrics"]["evaluate/digits/loss"] == pytest.approx(found["metrics"]["test/loss"], rel=1e-5)
    refused = warm("modle=cnn")
    assert refused.returncode == 2
    assert "did you mean model?" in refused.stderr
    assert warm("--help").stdout.startswith("scaleflow trains a TensorFlow model")
    assert warm.served() == 5


def test_a_command_gets_its_own_umask_streams_and_signals(warm: Warm) -> None:
    warm.serve()
    python = f"{sys.executable} -m scaleflow"
    line = f"umask 077; {python} {RUN[0]} tracking=none checkpoint=none >log; {python} --cfg job | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=warm.folder,
        env=warm.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "resume: null\n")
    (events,) = warm.folder.glob("outputs/*/*/events.jsonl")
    assert events.stat().st_mode & 0o777 == 0o600
    assert "FINISHED" in (warm.folder / "log").read_text()
    assert warm.served() == 2


def test_a_terminal_gets_a_bar(warm: Warm, empty_store: Path) -> None:
    warm.serve()
    shutil.copy(empty_store, warm.folder / "mlflow.db")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "scaleflow", *RUN],
        cwd=warm.folder,
        env={**warm.environment, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while part := os.read(ours, 65536):
                text += part
    os.close(ours)
    assert process.returncode == 0
    assert b"\x1b[?25l" in text  # the cursor is hidden below a bar
    assert b"FINISHED" in text


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=["SIGINT", "SIGTERM", "SIGKILL"],
)
def test_signals_reach_the_command(warm: Warm, number: int, code: int) -> None:
    warm.serve()
    with warm.start(*LONG, "tracking=none") as process:
        wait_for(lambda: warm.has_event("epoch"))
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == code
    wait_for(lambda: not psutil.Process(warm.pid).children())  # no orphan
    wait_for(lambda: not find_processes_of(warm.folder))
    ends = [event["status"] for event in warm.read_events() if event["event"] == "end"]
    assert ends == ["KILLED"]


def find_processes_of(folder: Path) -> list[psutil.Process]:
    """The processes whose current folder is this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder):
                found.append(process)
    return found


def test_a_command_outlives_the_server(warm: Warm) -> None:
    warm.serve()
    with warm.start(*LONG, "tracking=none", "training.epochs=300") as process:
        wait_for(lambda: warm.has_event("ready"))
        os.kill(warm.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "FINISHED" in out
    wait_for(lambda: not find_processes_of(warm.folder))


def test_the_next_command_starts_cold_and_says_why(warm: Warm) -> None:
    warm.serve()
    os.kill(warm.pid, signal.SIGKILL)
    wait_for(warm.has_ended)
    done = warm("--version")
    assert (done.returncode, done.stdout) == (0, "scaleflow 0.1.0\n")
    assert "the warm server is not used: it does not answer: [Errno 111] Connection refused" in done.stderr
    assert "no warm server runs" in warm("warm", "status").stdout
    assert warm("--version").stderr == ""  # what it left is removed


@pytest.mark.parametrize(
    ("constants", "has_thread", "reason"),
    [({}, True, "threads run in the server: ['MainThread', 'one more']"), ({"MIN_FREE_MEMORY": 1.0}, False, "")],
    ids=["thread", "memory"],
)
def test_a_server_that_may_not_fork_is_not_used(
    warm: Warm, constants: dict[str, float], has_thread: bool, reason: str
) -> None:
    warm.serve(has_thread, **constants)
    if not reason:
        wait_for(warm.has_ended)
        assert not warm.files.socket.exists()
    done = warm("--version")
    assert (done.returncode, done.stdout) == (0, "scaleflow 0.1.0\n")
    assert done.stderr == (f"scaleflow: the warm server is not used: {reason}\n" if reason else "")


def test_a_server_ends_when_it_is_idle_or_its_socket_is_gone(make_warm: Callable[[], Warm]) -> None:
    idle, lost, stopped = make_warm(), make_warm(), make_warm()
    idle.serve(IDLE_SECONDS=0.1)
    lost.serve()
    lost.files.socket.unlink()
    stopped.serve()
    assert stopped("warm", "stop").stdout.startswith("stopped: process ")
    for each in (idle, lost, stopped):
        wait_for(each.has_ended)
        assert not each.files.socket.exists()


def test_other_people_cannot_lend_a_server(warm: Warm) -> None:
    warm.serve()
    warm.sockets.chmod(0o755)
    done = warm("--version")
    assert done.returncode == 0
    assert "must be a folder of this user with mode 0700" in done.stderr
    done = warm("warm", "start", XDG_RUNTIME_DIR=str(warm.sockets / "absent"))
    assert done.returncode == 1
    assert "cannot be made: No such file or directory" in done.stderr


def test_a_variable_that_counts_at_import_asks_for_another_server(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    first = identify_interpreter()
    monkeypatch.setenv("TF_CONFIG", "{}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///elsewhere.db")
    assert identify_interpreter() == first
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    assert identify_interpreter() != first


def test_several_commands_at_once(warm: Warm) -> None:
    warm.serve()
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda seed: warm("--cfg", "job", f"seed={seed}"), range(8))]
    for seed, done in enumerate(found):
        assert done.returncode == 0
        assert f"\nseed: {seed}\n" in done.stdout
    assert warm.served() == 8


def test_a_server_of_its_own_is_started_and_kept(warm: Warm) -> None:
    """The whole way, with the imports: two commands at once start one server."""
    with warm.start("--version", **{WARM_ENV: "1"}) as one, warm.start("--version", **{WARM_ENV: "1"}) as other:
        for process in (one, other):
            out, err = process.communicate(timeout=120)
            assert (process.returncode, out, err) == (0, "scaleflow 0.1.0\n", "")
    assert warm.served() == 2
    assert warm("--version", **{WARM_ENV: "0"}).stdout == "scaleflow 0.1.0\n"
    assert warm.served() == 2
    assert warm("warm", "start").stdout.startswith("runs already: ")
    assert warm("warm", "stop").stdout.startswith("stopped: ")
    assert not warm.files.socket.exists()
