"""A command in a process that the warm server has forked. See `launcher/processes/handover.py`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from scaleflow.__main__ import greet_and_run
from scaleflow.commands.process import end_with
from scaleflow.launcher.processes.handover import Client, ServerFiles, report_exit


def main() -> None:
    """Runs the command. `sys.argv` is described at `COMMAND_MODULE`."""
    _, address, typed, *words, link = sys.argv
    Client.link = socket.socket(fileno=int(link))
    Client.files = ServerFiles(Path(address).parent, Path(address).stem)
    if not Client.link.recv(1):  # the client starts cold, or is gone
        os._exit(0)
    threading.Thread(target=end_with_client, args=(Client.link,), name="client", daemon=True).start()
    sys.argv, sys.orig_argv = words, json.loads(typed)
    code = 1
    try:
        end_with(greet_and_run)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        sys.stdout.flush()
        report_exit(code)


def end_with_client(link: socket.socket) -> None:
    """Ends this process when the process that typed the command is gone. It was killed: it passes other signals on."""
    while link.recv(1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
