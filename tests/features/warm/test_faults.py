"""What becomes of commands while a warm server is killed, replaced, or cannot be started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaleflow.launcher.processes.handover import WARM_ENV
from tests.features.warm.warm_server import RUN, Warm, find_processes_of
from tests.launcher.test_supervisor import slow_down, wait_for

#: Another user.
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to become another user or to mount a disk")


def test_an_upgraded_package_ends_the_server(warm: Warm) -> None:
    packages = warm.folder / "site-packages"
    packages.mkdir()
    warm.serve(packages=packages)
    (packages / "keras-99.dist-info").mkdir()
    wait_for(warm.has_ended)


@pytest.mark.slow  # the test above has no command
def test_an_upgraded_package_ends_the_server_after_its_commands(warm: Warm) -> None:
    packages, pace = warm.folder / "site-packages", warm.folder / "slow"
    packages.mkdir()
    warm.serve(packages=packages)
    with warm.start(*RUN, "training.epochs=20", "tracking=none", slow_down(pace, 1.0)) as process:
        wait_for(lambda: warm.has_event("ready"))
        (packages / "keras-99.dist-info").mkdir()
        wait_for(lambda: not warm.files.socket.exists())
        assert not warm.has_ended()
        assert warm.digest() != warm.files.socket.stem
        pace.unlink()
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "FINISHED" in out
    wait_for(warm.has_ended)


@needs_root
def test_another_user_gets_no_process(warm: Warm) -> None:
    """Even if the folder of sockets and the socket are open to all."""
    warm.serve()
    assert receive_status(warm.files.socket).startswith(b'{"pid"')
    for path in (*warm.sockets.parents[:1], warm.sockets):
        path.chmod(0o755)
    warm.files.socket.chmod(0o777)
    child = os.fork()
    if child == 0:
        os.setuid(NOBODY)
        os._exit(receive_status(warm.files.socket) != b"")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    warm.sockets.chmod(0o700)
    os.chown(warm.sockets, NOBODY, NOBODY)
    assert warm("--version").stderr == ""  # a folder that another user has made is none of this user's business
    asked = warm("--version", **{WARM_ENV: "1"})
    assert "must be a folder of this user" in asked.stderr
    os.chown(warm.sockets, 0, 0)
    assert warm.served() == 0


def receive_status(path: Path) -> bytes:
    """Returns the answer of a server; nothing if it closes the connection."""
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(ConnectionError):
        connection.settimeout(120)
        connection.connect(str(path))
        connection.sendall(b'{"ask": "status"}\n')
        return connection.recv(4096)
    return b""


@pytest.mark.slow
def test_commands_in_turn_with_other_words_each(warm: Warm) -> None:
    """The results are those of cold commands, to the last bit."""
    warm.serve()
    for number in range(20):
        words = (*RUN, f"seed={number}", "tracking=none", f"model.units=[{8 + number % 3}]", f"hydra.run.dir={number}")
        assert warm(*words).returncode == 0
    assert warm.served() == 20
    for number in (0, 7, 13, 19):
        words = (*RUN, f"seed={number}", "tracking=none", f"model.units=[{8 + number % 3}]", f"hydra.run.dir=c{number}")
        assert warm(*words, **{WARM_ENV: "0"}).returncode == 0
        assert read_weights(warm.folder / f"c{number}") == read_weights(warm.folder / str(number))
    assert warm.served() == 20


def read_weights(folder: Path) -> bytes:
    """Returns the weights of the last checkpoint."""
    (file,) = folder.glob("checkpoints/*/*.data-*")
    return file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "socket deleted", "stopped"])
def test_eight_runs_at_once_end_as_they_would_cold(warm: Warm, fault: str) -> None:
    warm.serve()
    words = (*RUN, "training.epochs=40", "tracking=none", "hardware.intra_op_threads=1")
    with contextlib.ExitStack() as running:
        processes = [running.enter_context(warm.start(*words, f"hydra.run.dir={n}", f"seed={n}")) for n in range(8)]
        wait_for(lambda: any((warm.folder / str(n) / "events.jsonl").exists() for n in range(8)))
        if fault == "killed":
            os.kill(warm.pid, signal.SIGKILL)
        elif fault == "stopped":
            assert warm("warm", "stop").stdout.startswith("ends with its last command: ")
        else:
            warm.files.socket.unlink()
        for process in processes:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            assert "FINISHED" in out
    wait_for(warm.has_ended)
    wait_for(lambda: not find_processes_of(warm.folder))


@contextlib.contextmanager
def mount_full_disk(folder: Path) -> Iterator[None]:
    """A disk without room for one more file."""
    options = ["-t", "tmpfs", "-o", "size=4k,nr_inodes=1,mode=0700", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(["mount", *options], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@needs_root
@pytest.mark.slow
def test_a_full_disk_makes_commands_start_cold(warm: Warm) -> None:
    with mount_full_disk(warm.sockets):
        done = warm(*RUN, "tracking=none", **{WARM_ENV: "1"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "scaleflow: the warm server is not used: it cannot be started: [Errno 28] No space left on device: "
        f"'{warm.sockets}/lock'\n"
    )


@pytest.mark.slow
def test_processes_of_a_hydra_launcher_end_with_the_command(warm: Warm) -> None:
    warm.serve()
    words = ("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2", *RUN, "tracking=none")
    done = warm(*words)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: not find_processes_of(warm.folder))
