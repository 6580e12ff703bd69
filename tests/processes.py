"""Processes of the test session, forked from one server that has imported TensorFlow, MLflow and scaleflow.

Importing them takes seconds of processor time. One server for the whole session, shared by all of pytest's workers,
pays for it once. Three kinds of process are forked from it: scaleflow's own workers, commands (`CommandProcess`)
and functions of a test (`call`).
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import importlib
import json
import os
import pickle
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn, TextIO

from scaleflow.launcher.processes.server_start import make_process_environment
from scaleflow.launcher.processes.worker_process import ForkedProcess

ROOT = Path(__file__).parent.parent

#: The server's address, for pytest's workers.
ADDRESS = "SCALEFLOW_TEST_SERVER"

#: The environment of a command that makes the tables of its store itself.
NEW_STORE = {"SCALEFLOW_TEST_NEW_STORE": "1"}

#: What lasts as long as the session.
SESSION = contextlib.ExitStack()


@contextlib.contextmanager
def run_server() -> Iterator[str]:
    """Runs the server while the block lasts; yields its address."""
    with (
        tempfile.TemporaryDirectory(prefix="scaleflow-tests-", dir="/tmp") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        address = str(Path(folder, "socket"))
        listener.bind(address)
        listener.listen(64)
        theirs, ours = os.pipe()  # the server ends when `ours` is closed
        with Path(folder, "log").open("wb") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.processes", str(theirs), str(empty_store_of(address))],
                cwd=ROOT,
                stdin=listener.fileno(),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**make_process_environment(), "CUDA_VISIBLE_DEVICES": "-1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs],
                process_group=0,
            )
        os.close(theirs)
        listener.close()
        try:
            yield address
        finally:
            os.close(ours)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(5)
            server.kill()
            server.wait()


@functools.cache
def server() -> str:
    """The address of the session's server; it is started if nobody has."""
    if ADDRESS not in os.environ:
        os.environ[ADDRESS] = SESSION.enter_context(run_server())
    return os.environ[ADDRESS]


def empty_store_of(address: str) -> Path:
    """The SQLite file with MLflow's tables that a server has made."""
    return Path(address).with_name("empty.db")


def call(function: Callable[..., Any], *arguments: Any, timeout: float = 240, **keywords: Any) -> Any:
    """The result of a function in a process of its own, which may set up any devices.

    The function has to be at the top of a module of tests; arguments and result have to pickle.
    """
    with tempfile.TemporaryDirectory(prefix="call-") as folder:
        log, result = Path(folder, "log"), Path(folder, "result")
        Path(folder, "work").write_bytes(pickle.dumps(sys.path) + pickle.dumps((function, arguments, keywords)))
        process = ForkedProcess(server(), log, os.environ, module="tests.processes")
        process.send(to_line(kind="call", folder=str(ROOT), work=folder))
        try:
            process.wait(timeout)
            if process.poll() is None:
                raise TimeoutError(f"{function.__name__} did not end within {timeout} s\n{log.read_text()[-4000:]}")
        finally:
            process.kill()
            process.wait(10)
            process.close()
        sys.stdout.write(log.read_text(errors="replace"))
        if not result.exists():
            raise AssertionError(f"{function.__name__} ended its process ({process.returncode})\n{log.read_text()}")
        is_returned, value = pickle.loads(result.read_bytes())
    assert is_returned, value
    return value


class CommandInput:
    """What a command reads from standard input."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process

    def write(self, data: bytes) -> None:
        self._process.send(data)

    def flush(self) -> None:
        """`write` does it."""

    def close(self) -> None:
        self._process.close_input()


class CommandProcess:
    """A command that runs, with the part of `subprocess.Popen` that tests use; its output goes through pipes.

    Args:
        words: the module and its arguments.
        folder: it runs in.
        environment: all of its environment.
        output: descriptors that take its standard output and standard error, instead of pipes. The number of a third
            one takes the place of its last word.
        address: of the server that forks it; None: the session's.
        keeps_input: whether the command reads `stdin`; it ends with the test's process if not.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        output: Sequence[int] | None = None,
        address: str | None = None,
        keeps_input: bool = False,
    ) -> None:
        self.args = [sys.executable, "-m", *words]
        ends = [] if output else [os.pipe(), os.pipe()]
        self._pipes = [os.fdopen(ours, encoding="utf-8", errors="replace") for ours, _ in ends]
        streams = output or (ends[0][1], ends[1][1])
        self._process = ForkedProcess(
            address or server(), Path(os.devnull), environment, module="tests.processes", streams=streams
        )
        for _, theirs in ends:
            os.close(theirs)
        task = {"folder": str(folder), "module": words[0], "words": list(words[1:]), "keeps_input": keeps_input}
        self._process.send(to_line(kind="command", **task))
        self.stdin = CommandInput(self._process)

    @property
    def pid(self) -> int:
        """Its number; waits until the server has forked it."""
        while not self._process.pid and self.poll() is None:
            self._process.wait(0.02)
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        self._process.wait(timeout)
        if self._process.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.returncode

    @property
    def stdout(self) -> TextIO:
        return self._pipes[0]

    @property
    def stderr(self) -> TextIO:
        return self._pipes[1]

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it says on standard output and standard error until it has ended."""
        with ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(pipe.read) for pipe in self._pipes]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()  # its pipes end with it
                raise
            out, err = (text.result(timeout) for text in texts)
        self.close()
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self._process.signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._process.wait(10)
        self._process.close()
        for pipe in self._pipes:
            pipe.close()

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> CommandProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ForkedPopen(CommandProcess):
    """In place of `subprocess.Popen`, for `python -m MODULE ...`. Both outputs go through pipes, or neither does.

    The command's last word is the descriptor in `pass_fds`, if there is one. It leads a process group of its own, and
    its output is text, whatever else is asked for.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdout: int | IO[Any] = 1,
        stderr: int | IO[Any] = 2,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
        **_: Any,
    ) -> None:
        with Path(os.devnull).open("wb") as nothing:
            streams = [nothing if stream == subprocess.DEVNULL else stream for stream in (stdout, stderr)]
            files = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
            super().__init__(
                words_of_module(words),
                cwd or Path.cwd(),
                os.environ if env is None else env,
                None if subprocess.PIPE in files else (*files, *pass_fds),
                keeps_input=stdin == subprocess.PIPE,
            )


def run_forked(
    words: Sequence[str],
    *,
    timeout: float,
    capture_output: bool,
    text: bool,
    check: bool,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str = "",
    **_: Any,
) -> subprocess.CompletedProcess[str]:
    """In place of `subprocess.run`, for `python -m MODULE ...` whose output is captured as text."""
    assert (capture_output, text, check) == (True, True, False)
    environment = os.environ if env is None else env
    with CommandProcess(words_of_module(words), cwd or Path.cwd(), environment, keeps_input=True) as process:
        process.stdin.write(input.encode())
        process.stdin.close()
        out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(words, process.wait(), out, err)


def words_of_module(words: Sequence[str]) -> Sequence[str]:
    """The module and its arguments."""
    assert list(words[:2]) == [sys.executable, "-m"], words
    return words[2:]


#: What takes the place of the module `subprocess` in code whose commands are to be forked.
FORKING = SimpleNamespace(
    Popen=ForkedPopen,
    run=run_forked,
    DEVNULL=subprocess.DEVNULL,
    PIPE=subprocess.PIPE,
    TimeoutExpired=subprocess.TimeoutExpired,
)


#: Modules that start a module of ours in an interpreter of its own. Commands of tests fork it; `Command.cold` does not.
FORKERS = (
    "scaleflow.features.doctor.command",
    "scaleflow.features.formats.runtime",
    "scaleflow.features.formats.task",
    "scaleflow.profiler.analysis_process",
)


def to_line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def main() -> None:
    """In a forked process: does what the line on standard input says."""
    message = json.loads(sys.stdin.buffer.raw.readline())  # type: ignore[attr-defined]
    os.chdir(message["folder"])
    sys.path[:1] = [message["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not message.get("keeps_input"):
        watch_parent()
    if message["kind"] == "call":
        make_call(Path(message["work"]))
    passed = sys.argv[1:]
    become_command(message["module"], [*message["words"][: -len(passed) or None], *passed])


def watch_parent() -> None:
    """Ends this process when the test's process is gone; its standard input is then at its end."""
    parent = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115

    def wait() -> None:
        select.select([parent], [], [])
        time.sleep(2)  # an orderly end comes first
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name="parent").start()


def make_call(folder: Path) -> NoReturn:
    try:
        function, arguments, keywords = load_work(folder / "work")
        outcome = True, function(*arguments, **keywords)
    except BaseException:
        outcome = False, traceback.format_exc()
    (folder / "part").write_bytes(pickle.dumps(outcome))
    (folder / "part").rename(folder / "result")
    leave(0)


def load_work(path: Path) -> Any:
    """The import path first, and the rest with its help."""
    with path.open("rb") as file:
        sys.path[:] = pickle.load(file)
        return pickle.load(file)


def become_command(module: str, words: Sequence[str]) -> NoReturn:
    """Runs `python -m MODULE WORDS...`, and ends as Python does."""
    sys.argv = [module, *words]
    for imported in ("scaleflow.__main__", module):  # by the server, about which `runpy` would warn
        sys.modules.pop(imported, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        leave(code_of(end))
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        leave(1)
    leave(0)


def code_of(end: SystemExit) -> int:
    if isinstance(end.code, int | None):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1


def leave(code: int) -> NoReturn:
    """Ends the process as Python does: threads are joined, exit functions are called, output is flushed."""
    for end in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            end()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def serve() -> None:
    """The server: imports everything, then forks what it is asked for until the session is over."""
    import gc

    import tests.processes  # noqa: F401
    from scaleflow.features.warm.server import import_all
    from scaleflow.launcher.processes.fork_server import ForkServer

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    remember_configs()
    remember_entry_points()
    import_all()
    importlib.import_module("tests.conftest")  # with pytest, which modules of tests import
    use_empty_store(Path(sys.argv[2]))
    for name in FORKERS:
        importlib.import_module(name).subprocess = FORKING  # type: ignore[attr-defined]
    gc.freeze()
    ForkServer(listener, int(sys.argv[1])).run()
    os._exit(0)


def remember_configs() -> None:
    """Lets Hydra merge the YAML files of the same options once in a process and its forks.

    With `keep_config_files`, that is two thirds of the time in which it composes a config. Keys are overridden each
    time.
    """
    from hydra._internal import config_loader_impl
    from hydra._internal.defaults_list import DefaultsList, Overrides

    loader_class = config_loader_impl.ConfigLoaderImpl
    list_defaults = config_loader_impl.create_defaults_list
    merge = loader_class._compose_config_from_defaults_list
    known: dict[Any, Any] = {}

    def remember(key: Any, make: Callable[[], Any], sources: Sequence[Any] = ()) -> Any:
        key = (key, *((source.provider, source.path, *list_files(source)) for source in sources))
        if key not in known:
            known[key] = make()
        return known[key]

    def list_files(source: Any) -> list[tuple[str, int, int]]:
        """The files of a folder that is not the package's, with what changes when they do."""
        paths = Path(source.path).rglob("*.yaml") if source.scheme() == "file" else ()
        return [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in paths]

    def create_defaults_list(repo: Any, config_name: str, overrides_list: Any, **options: bool) -> Any:
        own = Overrides(repo=repo, overrides_list=overrides_list)
        choices = own.override_choices, own.append_group_defaults, own.deletions
        made = remember(
            (config_name, repr(choices), *options.items()),
            lambda: list_defaults(repo, config_name, overrides_list, **options),
            repo.get_sources(),
        )
        return DefaultsList(made.defaults, made.defaults_tree, own.config_overrides, made.overrides)

    def compose_config(loader: Any, defaults: Any, repo: Any) -> Any:
        make = functools.partial(merge, loader, defaults, repo)
        return pickle.loads(remember(repr(defaults), lambda: pickle.dumps(make()), repo.get_sources()))

    def keep_repository(caching: Any, repo: Any) -> None:
        """Hydra copies the repository with all that its sources know, and then only replaces the list of sources."""
        caching.delegate = copy.copy(repo)
        caching.cache = {}

    config_loader_impl.create_defaults_list = create_defaults_list
    loader_class._compose_config_from_defaults_list = compose_config
    config_loader_impl.CachingConfigRepository.__init__ = keep_repository


def remember_entry_points() -> None:
    """Lets a process and its forks read the entry points of each folder of packages once, until the folder changes.

    Hydra asks for them each time that it composes a config.
    """
    from hydra_plugins.scaleflow import search_path

    known: dict[tuple[str, int], dict[str, Sequence[Any]]] = {}

    def find_entry_points(group: str) -> Any:
        found: dict[str, Sequence[Any]] = {}
        for path in sys.path:
            key = path, modification_time(path or os.curdir)
            if key not in known:
                known[key] = {each.name: each.entry_points for each in metadata.distributions(path=[path])}
            found = {**known[key], **found}  # Python takes the first package of a name
        return metadata.EntryPoints(point for points in found.values() for point in points).select(group=group)

    search_path.entry_points = find_entry_points  # type: ignore[assignment]


def modification_time(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def use_empty_store(path: Path) -> None:
    """Has every process that is forked later copy one empty store in place of making its tables."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    child = os.fork()
    if child == 0:
        SqlAlchemyStore(f"sqlite:///{path}", str(path.parent / "artifacts"))
        os._exit(0)
    os.waitpid(child, 0)
    connect = SqlAlchemyStore.__init__

    def copy_and_connect(self: Any, uri: str, *arguments: Any, **keywords: Any) -> None:
        file = Path(uri.removeprefix("sqlite:///"))
        is_copied = uri.startswith("sqlite:///") and not os.environ.keys() & NEW_STORE.keys()
        if is_copied and not file.exists() and file.parent.is_dir():
            shutil.copy(path, file)
        connect(self, uri, *arguments, **keywords)

    SqlAlchemyStore.__init__ = copy_and_connect


if __name__ == "__main__":
    serve()
