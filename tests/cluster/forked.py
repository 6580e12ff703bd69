"""`python forked.py ADDRESS -m MODULE WORDS...`: `python -m MODULE WORDS...`, forked from the server at an address.

For commands that something else starts: the script of a manifest, Slurm. Importing takes seconds of processor time,
which the server has spent already. Signals are passed on, and the exit code is the command's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any


def words(address: str) -> list[str]:
    """What takes the place of `python`."""
    return [sys.executable, __file__, address]


def main(address: str, option: str, module: str, *words: str) -> int:
    assert option == "-m"
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    task, ours = os.pipe()
    folder = str(Path.cwd())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: server.sendall(line(signal=number)))
    request = line(module="tests.processes", environment=dict(os.environ), folder=folder)
    sent = socket.send_fds(server, [request], [task, 1, 2])
    server.sendall(request[sent:])
    os.close(task)
    os.write(ours, line(kind="command", folder=folder, module=module, words=words))
    with server.makefile() as messages:
        return next(int(message["status"]) for message in map(json.loads, messages) if "status" in message)


def line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
