"""The process of the warm server: `python -m scaleflow.warm.server`, with a listening Unix socket as standard input.

It imports what commands and workers import, and starts none of their runtimes. Code of users is imported in the forks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil
from hydra.core.plugins import Plugins

from scaleflow import dataset, model, objective
from scaleflow.commands.table import COMMANDS
from scaleflow.dataset import pipeline
from scaleflow.launcher.processes.fork_server import ForkRequest, ForkServer, import_tensorflow
from scaleflow.launcher.processes.handover import COMMAND_MODULE, NotWarm, ServerFiles, check_peer, list_sources

#: The server ends after so many seconds without a process.
IDLE_SECONDS = 1800.0

#: It ends when less than this share of the machine's memory is free.
MIN_FREE_MEMORY = 0.05

#: What commands import while they run, each with what it imports itself.
IMPORTED_LATER = (
    *("scaleflow.launcher.launch", "scaleflow.sweep", "scaleflow.api", "scaleflow.conf"),
    *("mlflow", "mlflow.store.tracking.sqlalchemy_store", "mlflow.pyfunc", "sqlalchemy.dialects.sqlite.json"),
    *("rich.progress", "rich.status", "matplotlib.figure", "matplotlib.backends.backend_agg"),
)


class WarmServer(ForkServer):
    """A fork server of the user, which serves many commands.

    Args:
        listener: its socket, which is bound already.
        files: its files.
    """

    check_seconds: ClassVar[float] = 5.0

    def __init__(self, listener: socket.socket, files: ServerFiles) -> None:
        super().__init__(listener, alive=None)
        self._files = files
        self._identity = files.socket.stat().st_ino
        self._sources = list_sources()
        self._began = self._used = time.monotonic()
        self._commands = 0
        self._is_closing = False
        self._checked = self._began

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._forked:
            self._used = now
        if not self._is_closing and now - self._checked >= self.check_seconds:
            self._checked = now
            if now - self._used > IDLE_SECONDS or not self._is_found() or is_memory_short():
                self._close()
        return self._is_closing and not self._forked

    def _is_found(self) -> bool:
        """Whether commands find this server: its socket is there, and scaleflow's sources are those it has imported."""
        try:
            return self._files.socket.stat().st_ino == self._identity and list_sources() == self._sources
        except OSError:
            return False

    def run(self) -> None:
        """Runs the server until it ends."""
        with contextlib.suppress(OSError):  # a full disk: commands then wait longer for an answer
            self._files.ready.touch()
        super().run()

    def _close(self) -> None:
        """Takes no more commands. The server ends after those that run."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            if self._files.socket.stat().st_ino == self._identity:
                self._files.remove()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            check_peer(connection)
        except (NotWarm, OSError):
            connection.close()
            return
        self._watch(connection)

    def _find_obstacle(self) -> str | None:
        context = sys.modules["tensorflow.python.eager.context"].context_safe()
        if context is not None and context._initialized:
            return "TensorFlow's runtime has started in the server"
        if threading.active_count() > 1:
            return f"threads run in the server: {[thread.name for thread in threading.enumerate()]}"
        return "it ends" if self._is_closing else None

    def _answer(self, request: ForkRequest, message: dict[str, Any]) -> None:
        if message.get("ask") == "stop":
            self._close()
        request.send(
            pid=os.getpid(),
            memory_bytes=psutil.Process().memory_info().rss,
            age_seconds=time.monotonic() - self._began,
            commands=self._commands,
            running=len(self._forked),
        )

    def _fork(self, request: ForkRequest, message: dict[str, Any]) -> None:
        super()._fork(request, message)
        if request.pid is not None and message["module"] == COMMAND_MODULE:
            self._commands += 1


def is_memory_short() -> bool:
    memory = psutil.virtual_memory()
    return memory.available < MIN_FREE_MEMORY * memory.total


def import_all() -> None:
    """Imports what commands and their workers use."""
    import_tensorflow()
    commands = [command.module for command in COMMANDS.values()]
    parts = [
        f"{package.__name__}.{module.name}"
        for package in (dataset, pipeline, model, objective)
        for module in pkgutil.iter_modules(package.__path__)
    ]
    for name in (*IMPORTED_LATER, *commands, *parts):
        importlib.import_module(name)
    Plugins.instance()  # imports Hydra's plugins
    gc.collect()
    gc.freeze()  # memory that the collector does not touch stays shared with the forks


def main() -> None:
    """Runs the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    path = Path(listener.getsockname())
    server = WarmServer(listener, ServerFiles(path.parent, path.stem))
    import_all()
    server.run()
    os._exit(0)


if __name__ == "__main__":
    main()
