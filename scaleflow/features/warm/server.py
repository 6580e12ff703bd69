"""The process of the warm server: `python -m scaleflow.features.warm.server SOCKET`.

Standard input is the listening socket.

The server imports the modules of commands and workers but starts none of their runtimes. Users' code is imported only
in forks.
"""

import contextlib
import gc
import importlib
import os
import pickle
import pkgutil
import signal
import socket
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil
from hydra import compose, initialize_config_module
from hydra.plugins.config_source import ConfigResult, ConfigSource

import hydra_plugins
from scaleflow.commands.table import list_commands
from scaleflow.compat.hydra import find_package_source
from scaleflow.features.warm import forked_command
from scaleflow.interfaces.collector import pause_collector
from scaleflow.launcher.processes.fork_server import ForkRequest, ForkServer, import_tensorflow
from scaleflow.launcher.processes.handover import (
    COMMAND,
    NotWarm,
    ServerFiles,
    check_peer,
    describe_files,
    describe_installation,
)

#: The server ends after this many seconds without a process.
IDLE_SECONDS = 1800.0

#: It also ends when less memory is free than this share of the machine's memory, and than this many bytes.
MIN_FREE_MEMORY = 0.05
MIN_FREE_BYTES = 1e9

#: Modules that commands import while they run. Their own imports come with them.
IMPORTED_LATER = (
    *("scaleflow.cli", "scaleflow.launcher.launch", "scaleflow.sweep", "scaleflow.api", "scaleflow.worker.main"),
    *("scaleflow.worker.evaluate", "scaleflow.worker.train"),
    *("mlflow", "mlflow.store.tracking.sqlalchemy_store", "mlflow.store.tracking.sqlalchemy_workspace_store"),
    *("mlflow.pyfunc", "mlflow.utils.search_logged_model_utils", "sqlalchemy.dialects.sqlite.json", "alembic.command"),
    *("omegaconf._impl", "pyarrow.parquet", "rich.progress", "rich.status", "rich._emoji_codes"),
    *("PIL.BmpImagePlugin", "PIL.GifImagePlugin", "PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.PpmImagePlugin"),
    *("scipy.stats", "sklearn.ensemble", "sklearn.linear_model", "sklearn.metrics", "threadpoolctl"),
)


class WarmServer(ForkServer):
    """A user's fork server, which serves many commands. The socket `listener` is already bound."""

    check_seconds: ClassVar[float] = 5.0

    def __init__(self, listener: socket.socket, files: ServerFiles) -> None:
        super().__init__(listener, alive=None)
        self._files = files
        self._identity = files.socket.stat().st_ino
        self._sources = describe_installation()
        self._began = self._used = time.monotonic()
        self._commands = 0
        self._is_closing = False
        self._checked = self._began
        self._other_files: list[Any] = []  # the state of imported files outside of scaleflow, when the server began

    def _is_over(self) -> bool:
        """Returns whether the server ends now. Every few seconds it decides whether to close."""
        now = time.monotonic()
        if self._forked:
            self._used = now
        if not self._is_closing and now - self._checked >= self.check_seconds:
            self._checked = now
            if now - self._used > IDLE_SECONDS or not self._is_found() or is_memory_short():
                self.close()
        return self._is_closing and not self._forked

    def _is_found(self) -> bool:
        """Returns whether commands can use this server: its socket exists, and imported files are unchanged."""
        is_unchanged = describe_files(path for path, *_ in self._other_files) == self._other_files
        with contextlib.suppress(OSError):
            is_same = self._files.socket.stat().st_ino == self._identity
            return is_same and is_unchanged and describe_installation() == self._sources
        return False

    def run(self) -> None:
        """Runs the server until it ends."""
        self._other_files = describe_files(list_other_files())
        with contextlib.suppress(OSError):  # disk full: commands then wait longer for an answer
            self._files.ready.touch()
        super().run()

    def close(self) -> None:
        """Takes no new commands. The server ends after the running ones."""
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
        from scaleflow.compat.tensorflow import has_runtime

        if has_runtime():
            return "TensorFlow's runtime has started in the server"
        if threading.active_count() > 1:
            return f"threads run in the server: {[thread.name for thread in threading.enumerate()]}"
        return "it ends" if self._is_closing else None

    def _answer(self, request: ForkRequest, message: dict[str, Any]) -> None:
        if message.get("ask") == "stop":
            self.close()
        request.send(
            pid=os.getpid(),
            memory_bytes=psutil.Process().memory_info().rss,
            age_seconds=time.monotonic() - self._began,
            commands=self._commands,
            running=len(self._forked),
        )

    def _fork(self, request: ForkRequest, message: dict[str, Any]) -> None:
        is_command = message["module"] == COMMAND
        if is_command:
            message = {**message, "module": forked_command.__name__}
        super()._fork(request, message)
        if request.pid is not None and is_command:
            self._commands += 1


def is_memory_short() -> bool:
    memory = psutil.virtual_memory()
    return memory.available < min(MIN_FREE_MEMORY * memory.total, MIN_FREE_BYTES)


def list_other_files() -> list[str]:
    """Returns the files of imported modules, except Python's, installed copies, and the package scaleflow."""
    paths = sysconfig.get_paths()
    known = tuple({paths["stdlib"], paths["platstdlib"], str(Path(__file__).parents[2])})
    files = [str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
    return sorted({file for file in files if file and "-packages" not in file and not file.startswith(known)})


@pause_collector()
def import_all() -> None:
    """Imports the modules that commands and their workers use."""
    import_tensorflow()
    from scaleflow import dataset, evaluation, model, objective, tracking
    from scaleflow.dataset import batches

    names = list(IMPORTED_LATER)
    names += [command.module for command in list_commands().values()]
    for package in (batches, dataset, evaluation, model, objective, tracking):
        names += [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    for name in names:
        with contextlib.suppress(Exception):  # not installed, or another package's broken command
            importlib.import_module(name)
    keep_config_files()
    with initialize_config_module("scaleflow.conf", version_base="1.3"):
        compose("config")  # Hydra loads its grammar
    forked_command.PLUGIN_FOLDERS[:] = hydra_plugins.__path__
    gc.collect()
    gc.freeze()  # memory that the collector does not touch stays shared with forks


def keep_config_files() -> None:
    """Caches the YAML files that Hydra reads: reading them takes a third of the time to compose a config."""
    source_class = find_package_source()
    read = source_class.load_config
    known: dict[tuple[str, str, str], bytes] = {}  # pickled, because that is copied in a quarter of the time

    def load_config(source: ConfigSource, config_path: str) -> ConfigResult:
        key = source.provider, source.path, config_path
        if key not in known:
            known[key] = pickle.dumps(read(source, config_path))
        result: ConfigResult = pickle.loads(known[key])
        return result

    source_class.load_config = load_config  # type: ignore[assignment,method-assign]


def main() -> None:
    """Runs the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    path = Path(sys.argv[1])
    server = WarmServer(listener, ServerFiles(path.parent, path.stem))
    signal.signal(signal.SIGTERM, lambda *_: server.close())
    if is_memory_short():
        print("too little memory is free", flush=True)
    else:
        import_all()
        server.run()
    server.close()
    os._exit(0)


if __name__ == "__main__":
    main()
