from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scaleflow.launcher.processes import server_start, worker_process
from scaleflow.launcher.processes.server_start import raise_file_limit
from scaleflow.launcher.processes.worker_process import ForkedProcess, MessageWatch, describe_exit, last_lines


def test_the_last_lines_of_a_log_are_the_programs_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "first\n\nsecond\nWARNING: All log messages before absl::InitializeLog()\n"
        "I0000 00:00:1 cudart_stub.cc:31] no cuda\nE0000 00:00:1 cuInit\nI quit\n"
    )
    assert last_lines(log, 2) == "second | I quit"
    assert last_lines(log, offset=log.read_text().index("E0000")) == "I quit"  # what an earlier process said


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "ended with exit status 3"), (-9, "was killed by SIGKILL"), (-99, "was killed by signal 99")],
)
def test_an_end_is_told_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_a_process_is_ended_also_where_the_server_that_forked_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server tells of the process's beginning, and then nothing more."""
    monkeypatch.setattr(worker_process, "KILL_SECONDS", 1000.0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "server"))
        listener.listen()
        forked = ForkedProcess(str(tmp_path / "server"), tmp_path / "log", {})
        server, _ = listener.accept()
        with server, subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as worker:
            server.sendall(json.dumps({"pid": worker.pid}).encode() + b"\n")
            assert forked.poll() is None
            forked.kill()
            assert forked.poll() is None  # it may still be told
            monkeypatch.setattr(worker_process, "KILL_SECONDS", 0.0)
            forked.wait()
            assert worker.wait(60) == forked.returncode == -signal.SIGKILL
        forked.close()


def test_a_process_is_ended_also_while_the_server_imports_tensorflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has not forked it, and answers nothing for seconds."""
    monkeypatch.setattr(worker_process, "FORK_SECONDS", 1000.0)
    monkeypatch.setattr(worker_process, "KILL_SECONDS", 1000.0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "server"))
        listener.listen()
        forked = ForkedProcess(str(tmp_path / "server"), tmp_path / "log", {})
        forked.kill()
        assert forked.poll() is None  # it may still be told
        monkeypatch.setattr(worker_process, "FORK_SECONDS", 0.0)
        forked.wait()
        assert forked.returncode == -signal.SIGKILL
        forked.close()


def test_a_process_is_watched_also_where_many_files_are_open(tmp_path: Path) -> None:
    """`select` takes no descriptor above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    try:
        with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as opened:
            listener.bind(str(tmp_path / "server"))
            listener.listen()
            while opened.enter_context(Path(os.devnull).open()).fileno() < 1024:
                pass
            forked = ForkedProcess(str(tmp_path / "server"), tmp_path / "log", {})
            opened.callback(forked.close)
            server, _ = listener.accept()
            with server:
                forked.wait(0.01)
                assert forked.returncode is None
                server.sendall(json.dumps({"pid": 7, "status": 3}).encode() + b"\n")
                forked.wait(60)
            assert forked.returncode == 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_one_call_receives_the_messages_to_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "LOOK_SECONDS", 1000.0)  # so that `poll` alone looks only once
    watch, log = MessageWatch(), tmp_path / "log"
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as opened:
        listener.bind(str(tmp_path / "server"))
        listener.listen()
        forked, servers = [], []
        for _ in range(3):
            process = ForkedProcess(str(tmp_path / "server"), log, {}, watch=watch)
            opened.callback(process.close)
            forked.append(process)
            servers.append(opened.enter_context(listener.accept()[0]))
        assert [process.poll() for process in forked] == [None] * 3
        servers[2].sendall(json.dumps({"pid": 7, "status": 3}).encode() + b"\n")
        watch.wait(60)
        assert [process.poll() for process in forked] == [None, None, 3]
        servers[1].close()
        watch.wait(60)
        assert [process.poll() for process in forked] == [None, 1, 3]
        assert not forked[1].has_server
        watch.wait(0.01)  # the closed connection stays readable, and is looked at no more
        assert log.read_text().count("the fork server has ended") == 1
        servers[0].sendall(json.dumps({"pid": 8, "status": 0}).encode() + b"\n")
        forked[0].wait(60)
        assert forked[0].returncode == 0


def test_the_limit_of_open_files_is_raised_as_far_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(server_start, "MAX_OPEN_FILES", 300)
    try:
        for before, after in ((256, 300), (400, 400)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
            raise_file_limit()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (after, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
