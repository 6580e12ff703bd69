"""Starts fork servers: a new interpreter that imports TensorFlow, or a fork of the warm server, which already has."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from scaleflow.cluster.tf_config import TF_CONFIG
from scaleflow.launcher.processes.handover import (
    SERVER_ENV,
    NotWarm,
    ServerFiles,
    find_warm_server,
    give_up_warm_server,
    request_process,
)

#: The module of a fork server.
FORK_SERVER_MODULE = "scaleflow.launcher.processes.fork_server"

#: The file with a server's output, next to its socket.
SERVER_LOG = "log"

#: Workers that can be requested without waiting while the server imports TensorFlow. The system may allow fewer.
MAX_PENDING = 4096

#: The limit of open files that a launcher sets for itself.
MAX_OPEN_FILES = 16_384

#: Maximum length of the folder for a socket. The path of a Unix socket may have 104 bytes; about 30 are added.
MAX_SOCKET_FOLDER_LENGTH = 70

#: Seconds to wait for the server to report the end of a killed process.
KILL_SECONDS = 10.0


@contextlib.contextmanager
def start_fork_server(
    requested: str | None = None, lost: str | None = None, module: str = FORK_SERVER_MODULE
) -> Iterator[str]:
    """Starts a fork server for the block, unless one already runs. Yields its address.

    The server imports TensorFlow first; requests wait until then. A server should already run at the address
    `requested`. If it does not answer, another one is started. The server at the address `lost` is known to be gone: a
    killed server loses its workers shortly before its address stops answering. `module` is the server's program.
    """
    existing = os.environ.get(SERVER_ENV) if not requested else None
    if requested and requested != lost and is_server_reachable(requested):
        existing = requested
    if existing:
        yield existing
        return
    raise_file_limit()
    parent = None if len(tempfile.gettempdir()) < MAX_SOCKET_FOLDER_LENGTH else "/tmp"
    with (
        tempfile.TemporaryDirectory(prefix="scaleflow-", dir=parent) as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        address = str(Path(folder, "socket"))
        listener.bind(address)
        listener.listen(MAX_PENDING)
        ours, theirs = os.pipe()
        os.set_inheritable(theirs, False)
        with Path(folder, SERVER_LOG).open("wb") as log:
            server = (module == FORK_SERVER_MODULE and fork_warm(listener, log, ours)) or subprocess.Popen(
                [sys.executable, "-m", module, str(ours)],
                stdin=listener.fileno(),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=make_process_environment(),
                pass_fds=[ours],
                process_group=0,
            )
        os.close(ours)
        listener.close()  # so that connecting fails when the server is gone
        try:
            yield address
        finally:
            os.close(theirs)
            server.kill()  # it may still be importing; its workers have ended or end by themselves
            server.wait()


class WarmFork:
    """A fork server that the warm server forked and that outlives it. The pipe `alive` tells it
    when the launcher ends.
    """

    def __init__(self, files: ServerFiles, listener: socket.socket, log: IO[bytes], alive: int) -> None:
        descriptors = [listener.fileno(), log.fileno(), log.fileno(), alive]
        self._connection, _ = request_process(
            files, descriptors, module=FORK_SERVER_MODULE, environment=make_process_environment()
        )

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # the warm server is gone; the closed pipe ends the process
            self._connection.sendall(json.dumps({"signal": signal.SIGKILL}).encode() + b"\n")

    def wait(self) -> None:
        with self._connection, contextlib.suppress(OSError):
            self._connection.settimeout(KILL_SECONDS)
            self._connection.recv(4096)


def fork_warm(listener: socket.socket, log: IO[bytes], alive: int) -> WarmFork | None:
    """Requests a fork server from the warm server; None without one. If one is required, prints why it is not used."""
    try:
        files = find_warm_server()
        return None if files is None else WarmFork(files, listener, log, alive=alive)
    except (NotWarm, OSError) as why:
        give_up_warm_server(why)
        return None


def raise_file_limit() -> None:
    """Raises the limit of open files of this process and its children to `MAX_OPEN_FILES`, if permitted.

    A worker needs two files in the launcher and one in the fork server. The usual limit is 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(ValueError, OSError):  # the system may have a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def is_server_reachable(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(address) == 0


def make_process_environment() -> dict[str, str]:
    """Returns the launcher's environment, with Keras on TensorFlow (whatever keras.json says) and unbuffered logs.

    It lacks TF_CONFIG, which would make a strategy of one process wait for others.
    """
    inherited = {key: value for key, value in os.environ.items() if key != TF_CONFIG}
    return {**inherited, "KERAS_BACKEND": "tensorflow", "PYTHONUNBUFFERED": "1"}
