"""A server within a host of `tests.cluster.hosts`, from which that host's commands and workers are forked.

    python -m tests.cluster.host_server NAMESPACE HOSTS_FILE NAME SOCKET

It is forked from the session's server itself, so everything is imported already.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from scaleflow.launcher.processes.fork_server import ForkServer

#: Of Linux's sched.h.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x0002_0000, 0x0400_0000, 0x4000_0000

LIBC = ctypes.CDLL(None, use_errno=True)


def enter(namespace: str, hosts_file: str, name: str) -> None:
    """Enters a host: its network, its hosts file and its name are there for this thread and what it starts."""
    with Path("/run/netns", namespace).open() as network:
        check(LIBC.setns(network.fileno(), CLONE_NEWNET))
    check(LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS))
    for words in (["--make-rprivate", "/"], ["--bind", hosts_file, "/etc/hosts"]):
        subprocess.run(["mount", *words], check=True)
    socket.sethostname(name)


def check(result: Any) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main(namespace: str, hosts_file: str, name: str, address: str) -> None:
    """Serves until it is killed."""
    enter(namespace, hosts_file, name)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    alive, _ = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("listens", flush=True)
        ForkServer(listener, alive).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
