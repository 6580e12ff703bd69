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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from scaleflow.launcher.processes.handover import STOP_CHECK_SECONDS, WARM_ENV
from tests.conftest import Command
from tests.features.warm.warm_server import LONG, RUN, Warm, find_processes_of
from tests.launcher.test_supervisor import wait_for


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
    words = found["run_id"], "--json"
    evaluated = answer(warm(*words, module="scaleflow evaluate", MLFLOW_TRACKING_URI=f"sqlite:///{store}"))
    assert evaluated["metrics"]["evaluate/digits/loss"] == pytest.approx(found["metrics"]["test/loss"], rel=1e-5)
    refused = warm("modle=cnn")
    assert refused.returncode == 2
    assert "did you mean model=cnn?" in refused.stderr
    assert warm("--help").stdout.startswith("scaleflow trains a TensorFlow model")
    assert warm.served() == 5


def test_a_command_gets_its_own_umask_streams_and_signals(warm: Warm) -> None:
    warm.serve()
    python = f"{sys.executable} -m scaleflow"
    line = f"umask 077; {python} {RUN[0]} tracking=none checkpoint=none >log; {python} --cfg job | head -1; "
    line += f"ulimit -S -f 1; {python} --cfg job >big"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=warm.folder,
        env=warm.environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "resume: null\n")
    (events,) = warm.folder.glob("outputs/*/*/events.jsonl")
    assert events.stat().st_mode & 0o777 == 0o600
    assert "FINISHED" in (warm.folder / "log").read_text()
    assert (warm.folder / "big").stat().st_size == 1024  # its own soft limit
    assert warm.served() == 3


@pytest.mark.slow  # launcher/test_display.py has a bar without the server
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
    with warm.start(*LONG) as process:
        wait_for(lambda: warm.has_event("epoch"))
        (command,) = warm.commands()
        both = (command, psutil.Process(process.pid))
        process.send_signal(signal.SIGTSTP)  # Ctrl-Z
        wait_for(lambda: [one.status() for one in both] == [psutil.STATUS_STOPPED] * 2)
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: psutil.STATUS_STOPPED not in [one.status() for one in both])
        process.send_signal(number)
        process.communicate(timeout=240)
    assert process.returncode == code
    wait_for(lambda: not psutil.Process(warm.pid).children())  # no orphan
    wait_for(lambda: not find_processes_of(warm.folder))
    ends = [event["status"] for event in warm.read_events() if event["event"] == "end"]
    assert ends == ["KILLED"]


@pytest.mark.slow
def test_a_command_that_is_stopped_and_continued_at_once_goes_on(warm: Warm) -> None:
    warm.serve()
    with warm.start(*LONG) as process:
        wait_for(lambda: warm.has_event("epoch"))
        for number in range(50):
            process.send_signal(signal.SIGTSTP)
            time.sleep(STOP_CHECK_SECONDS * number / 40)
            process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=240)
    assert process.returncode == 143


@pytest.mark.slow  # the test below loses the server and the command
def test_commands_outlive_the_server(warm: Warm) -> None:
    warm.serve()
    with warm.start(*LONG, "training.epochs=300") as process, warm.start("--info", "searchpath"):
        wait_for(lambda: warm.has_event("ready"))
        os.kill(warm.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "FINISHED" in out
    wait_for(lambda: not find_processes_of(warm.folder))


def test_a_command_that_is_killed_after_the_server_ends_its_client(warm: Warm) -> None:
    warm.serve()
    with warm.start(*LONG) as process:
        wait_for(lambda: warm.has_event("ready"))
        (command,) = warm.commands()
        os.kill(warm.pid, signal.SIGKILL)
        wait_for(warm.has_ended)
        command.kill()
        _, err = process.communicate(timeout=240)
    assert process.returncode == -signal.SIGKILL, err
    assert "Traceback" not in err
    wait_for(lambda: not find_processes_of(warm.folder))


@pytest.mark.slow
def test_runs_from_python_are_forked_too(warm: Warm) -> None:
    warm.serve()
    words = (*RUN, "tracking=none", "checkpoint=none")
    code = f"import json, scaleflow; print(json.dumps(dict(scaleflow.run(*{words!r}).metrics)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=warm.folder,
        env=warm.environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert answer(done)["perf/seconds_to_first_step_import"] < 2


def test_hydra_plugins_beside_the_command_are_found(warm: Warm) -> None:
    warm.serve()
    plugin = warm.folder / "hydra_plugins" / "mine" / "launch.py"
    plugin.parent.mkdir(parents=True)
    (plugin.parent / "__init__.py").touch()
    plugin.write_text(PLUGIN)
    done = warm("-m", "hydra/launcher=mine", "seed=1,2", "tracking=none")
    assert "mine runs 2 jobs" in done.stdout
    assert warm.served() == 1


#: A launcher of Hydra that runs nothing.
PLUGIN = """
from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher

class Mine(Launcher):
    def setup(self, **_):
        pass

    def launch(self, job_overrides, initial_job_idx):
        print("mine runs", len(job_overrides), "jobs")
        return []

node = {"_target_": "hydra_plugins.mine.launch.Mine"}
ConfigStore.instance().store(group="hydra/launcher", name="mine", node=node, provider="mine")
"""


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
    [
        ({}, True, "threads run in the server: ['MainThread', 'one more']"),
        ({"MIN_FREE_MEMORY": 1.0, "MIN_FREE_BYTES": 1e15}, False, ""),
    ],
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


def test_a_folder_of_sockets_that_others_can_open_is_not_used(warm: Warm) -> None:
    warm.serve()
    warm.sockets.chmod(0o755)
    done = warm("--version")
    assert done.returncode == 0
    assert "must be a folder of this user with mode 0700" in done.stderr
    done = warm("warm", "start", XDG_RUNTIME_DIR=str(warm.sockets / "absent"))
    assert done.returncode == 1
    assert "cannot be made: No such file or directory" in done.stderr
    done = warm("--version", **{WARM_ENV: "yes"})
    assert "SCALEFLOW_WARM=yes: expected 0 or 1" in done.stderr


def test_several_commands_at_once(warm: Warm) -> None:
    warm.serve()
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda seed: warm("--cfg", "job", f"seed={seed}"), range(8))]
    for seed, done in enumerate(found):
        assert done.returncode == 0
        assert f"\nseed: {seed}\n" in done.stdout
    assert warm.served() == 8


@pytest.mark.slow
def test_a_server_of_its_own_is_started_and_kept(warm: Warm) -> None:
    """The whole way, with the imports: two commands at once start one server."""
    assert warm("--version", **{WARM_ENV: "1"}).stdout == "scaleflow 0.1.0\n"  # it waits for no server, and starts none
    assert not warm.files.socket.exists()
    with warm.start("modle=cnn", **{WARM_ENV: "1"}) as one, warm.start("modle=cnn", **{WARM_ENV: "1"}) as other:
        for process in (one, other):
            _, err = process.communicate(timeout=240)
            assert process.returncode == 2
            assert err == "scaleflow: modle: there is no such key; did you mean model=cnn?\n"
    assert warm.served() == 2
    assert warm("--version", **{WARM_ENV: "0"}).stdout == "scaleflow 0.1.0\n"
    assert warm.served() == 2
    assert warm("warm", "start").stdout.startswith("runs already: ")
    assert warm("warm", "stop").stdout.startswith("stopped: ")
    assert not warm.files.socket.exists()
