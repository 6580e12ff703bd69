"""A command in a process forked by the warm server. See `launcher/processes/handover.py`."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from functools import partial
from pathlib import Path

import hydra_plugins
from scaleflow.__main__ import greet_and_run
from scaleflow.commands.process import end_with
from scaleflow.compat.hydra import find_plugins_again
from scaleflow.compat.python import join_threads, run_exit_functions
from scaleflow.launcher.processes.handover import FORKED_BY, ServerFiles, report_exit

#: Folders of Hydra plugins that the server has imported.
PLUGIN_FOLDERS: list[str] = []


def main() -> None:
    """Runs the command. `COMMAND` describes `sys.argv`."""
    _, address, typed, *words, descriptor = sys.argv
    link = socket.socket(fileno=int(descriptor))
    FORKED_BY.append(ServerFiles(Path(address).parent, Path(address).stem))
    if not link.recv(1):  # the client starts cold, or is gone
        os._exit(0)
    threading.Thread(target=end_with_client, args=(link,), name="client", daemon=True).start()
    sys.argv = words
    sys.orig_argv = json.loads(typed)
    sys.modules["__main__"] = sys.modules["scaleflow.__main__"]  # `multiprocessing` imports this module
    if [*hydra_plugins.__path__] != PLUGIN_FOLDERS:  # the user has further plugins
        find_plugins_again()
    code = 1
    try:
        end_with(greet_and_run, report=partial(report_exit, link))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:  # like the end of an interpreter
        join_threads()
        run_exit_functions()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        report_exit(link, code)


def end_with_client(link: socket.socket) -> None:
    """Kills this process when the process that typed the command was killed.

    That process forwards other signals itself.
    """
    while link.recv(1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
