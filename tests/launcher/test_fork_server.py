from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.launcher.processes.server_start import is_server_reachable, start_fork_server
from scaleflow.launcher.processes.worker_process import ForkedProcess
from tests.conftest import Command
from tests.launcher.test_supervisor import LongRun, wait_for
from tests.processes import server


def test_a_worker_that_can_not_read_its_job_ends_with_its_reason_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    process = ForkedProcess(server(), log, {**os.environ, "ONLY": "here"})
    process.send(b"no job\n")
    process.wait(240)
    process.close()
    assert process.returncode == 1
    assert process.pid > 0
    assert "binascii.Error" in log.read_text()


def test_a_signal_reaches_the_worker_and_its_end_is_told(tmp_path: Path) -> None:
    process = ForkedProcess(server(), tmp_path / "worker.log", os.environ)
    process.wait(0.5)
    assert process.poll() is None  # it waits for its job
    process.signal(signal.SIGKILL)
    process.wait()
    process.close()
    assert process.returncode == -signal.SIGKILL


def test_workers_that_end_together_are_all_told(tmp_path: Path) -> None:
    processes = [ForkedProcess(server(), tmp_path / f"{number}.log", os.environ) for number in range(4)]
    for process in processes[1:]:
        process.kill()
    processes[0].send(b"no job\n")
    for process in processes:
        process.wait(240)
        process.close()
    assert [process.returncode for process in processes] == [1, *[-signal.SIGKILL] * 3]


def test_a_server_that_is_gone_is_said_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    process = ForkedProcess(str(tmp_path / "nobody"), log, os.environ)
    assert process.poll() == 1
    process.close()
    assert "the fork server has ended" in log.read_text()


def test_a_second_close_leaves_the_files_alone_that_were_opened_in_between(tmp_path: Path) -> None:
    process = ForkedProcess(str(tmp_path / "nobody"), tmp_path / "worker.log", os.environ)
    process.close()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((tmp_path / str(number)).open("w")) for number in range(8)]
        process.close()
        for file in files:
            os.fstat(file.fileno())


def test_log_stays_where_the_server_is_gone(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text("of an earlier attempt\n")
    ForkedProcess(str(tmp_path / "nobody"), log, os.environ).close()
    assert log.read_text().startswith("of an earlier attempt\nthe fork server has ended")


def test_the_log_of_a_server_that_is_gone_already_says_why(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("ImportError: no TensorFlow for this processor\n")
    log = tmp_path / "worker-0.log"
    ForkedProcess(str(tmp_path / "nobody"), log, os.environ).close()
    assert log.read_text() == "ImportError: no TensorFlow for this processor\n"


def test_a_server_known_to_be_gone_is_not_asked_though_it_answers_still() -> None:
    with start_fork_server(server()) as address:
        assert address == server()
    with start_fork_server(server(), lost=server()) as another:
        assert another != server()


def test_where_no_server_answers_one_is_started(tmp_path: Path) -> None:
    with start_fork_server(str(tmp_path / "nobody")) as address:
        assert is_server_reachable(address)


def test_an_environment_without_tensorflow_is_said_with_its_reason(command: Command) -> None:
    (command.folder / "tensorflow.py").write_text("raise ImportError('no TensorFlow for this processor')\n")
    ended = command("tracking=none", **{SERVER_ENV: "", "PYTHONPATH": str(command.folder)})
    assert ended.returncode == 1
    assert "no TensorFlow for this processor" in ended.stderr


@pytest.mark.slow
def test_a_run_leaves_nothing_where_temporary_files_are(command: Command) -> None:
    folder = command.folder / "temporary"
    folder.mkdir()
    ended = command("tracking=none", "training.epochs=1", **{SERVER_ENV: "", "TMPDIR": str(folder)})
    assert ended.returncode == 0, ended.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_server_that_is_killed_is_followed_by_another_as_often_as_restarts_are_allowed(command: Command) -> None:
    """SIGTERM does not end a fork server, since cluster engines send it to every process: the launcher decides."""
    long = LongRun(command, "tracking=none", "cluster.max_restarts=1", **{SERVER_ENV: ""}).until("checkpoint")
    first = long.worker()
    forker = first.parent()
    assert forker is not None
    forker.terminate()
    time.sleep(0.5)
    assert forker.status() != psutil.STATUS_ZOMBIE
    assert first.is_running()
    assert not long.has_event("restart")
    forker.kill()
    wait_for(lambda: any(event.get("resumed", 0) > 0 for event in command.events()))
    (restart,) = [event for event in command.events() if event["event"] == "restart"]
    assert "the fork server has ended" in restart["reason"]
    wait_for(lambda: not first.is_running())
    begun = len(command.events())
    wait_for(lambda: any(event["event"] == "epoch" for event in command.events()[begun:]))
    second = long.worker()
    os.kill(second.ppid(), signal.SIGKILL)
    assert long.end() == 1
    wait_for(lambda: not second.is_running())
    assert command.events()[-1]["status"] == "FAILED"
    assert "the fork server has ended" in command.events()[-1]["error"]


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_no_server(command: Command) -> None:
    long = LongRun(command, "tracking=none", **{SERVER_ENV: ""}).until("epoch")
    forker = long.worker().parent()
    assert forker is not None
    long.launcher.kill()
    long.launcher.wait()
    wait_for(lambda: not forker.is_running())


@pytest.mark.slow
def test_the_server_starts_nothing_of_tensorflow_before_it_forks() -> None:
    asked = "import json, threading, scaleflow.launcher.processes.fork_server as s; s.import_tensorflow()\n"
    asked += "from tensorflow.python.eager import context\n"
    asked += "print(json.dumps([threading.active_count(), context.context()._initialized]))"
    ended = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=240, check=True)
    assert json.loads(ended.stdout.splitlines()[-1]) == [1, False]
