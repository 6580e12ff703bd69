"""What the tests share: a child process with TensorFlow in it, the command, a composed config."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import pytest
from filelock import FileLock
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import OmegaConf

from scaleflow.cluster.tpu import VARIABLES
from scaleflow.config.compose import ComposedConfig
from scaleflow.config.words import quote_nan_option
from scaleflow.features.kubernetes.engine import INDEX, JOB, PODS
from scaleflow.features.warm.server import keep_config_files
from scaleflow.interfaces import Plan
from scaleflow.launcher.prepare import make_plan
from scaleflow.launcher.processes.handover import SERVER_ENV, WARM_ENV
from tests.event_log import events_in
from tests.object_store import serve_store
from tests.processes import (
    ADDRESS,
    SESSION,
    CommandProcess,
    call,
    empty_store_of,
    remember_configs,
    remember_entry_points,
    run_server,
    server,
)
from tests.tiers import mark_slow_cases

T = TypeVar("T")

#: Messages name the commands by `python -m`, also where an activated environment has the console script on the PATH.
os.environ["PATH"] = os.pathsep.join(
    folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "scaleflow").is_file()
)
os.environ.setdefault("PYTEST_TIMEOUT", "600")  # no key of pyproject.toml: `make gpu` works without that plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--scripts", action="store_true", help="run all Keras scripts, not a cover of their kinds")
    parser.addoption("--matrix", action="store_true", help="train every allowed cell of the table, not a cover of them")
    parser.addoption("--pictures", metavar="DIR", help="keep what MLflow's UI shows as PNG files")


def pytest_configure(config: pytest.Config) -> None:
    """One server for all of pytest's workers; they find it by the environment."""
    keep_config_files()
    remember_configs()
    remember_entry_points()
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ[ADDRESS] = SESSION.enter_context(run_server())


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in argument for argument in config.args):  # a case that is asked for by name runs
        mark_slow_cases(items)


def pytest_collection_finish() -> None:
    """Each of pytest's workers collects all tests."""
    if slow := {"hypothesis", "keras", "mlflow", "optuna", "tensorflow"} & sys.modules.keys():
        raise pytest.UsageError(f"modules of tests import {', '.join(slow)}: import it in the functions that use it")


def pytest_unconfigure() -> None:
    SESSION.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The seconds that each folder's tests took, the slowest folder first."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[folder_of(report.nodeid)] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("seconds by folder")
        for folder, total in seconds.most_common():
            terminalreporter.write_line(f"{total:8.1f}  {folder}")


def folder_of(nodeid: str) -> str:
    """`tests/dataset` for what is in a folder, the file for what is not."""
    path = PurePosixPath(nodeid.partition("::")[0])
    return str(path if path.parent.name == "tests" else path.parent)


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is put where temporary files are by a process that is killed goes with the session."""
    folder = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv("XDG_CACHE_HOME", str(link_cache(folder / "cache")))
        yield
    for path in folder.glob("[!p]*"):  # pymp-*: multiprocessing takes that away at exit
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def link_cache(folder: Path) -> Path:
    """A cache folder of the session's, with links to what other libraries keep in the user's."""
    folder.mkdir()
    real = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    for path in real.glob("*"):
        if path.name != "scaleflow":
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(autouse=True)
def no_tpu_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def isolated() -> Callable[..., Any]:
    """`isolated(function, *arguments)`: its result from a process of its own, which may set up any devices."""
    return call


@pytest.fixture(scope="session")
def empty_store() -> Path:
    """An SQLite file with MLflow's tables, to be copied: making them takes seconds, so the session does it once."""
    call(os.getpid)  # the server makes it before it forks the first process
    return empty_store_of(server())


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment variables of an S3 server on this machine. Each test uses its own bucket."""
    pytest.importorskip("moto.server")
    with serve_store(tmp_path_factory.mktemp("moto") / "log") as environment:
        yield environment


@pytest.fixture(scope="module")
def server_uri(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[str]:
    """The address of an MLflow server of the module's."""
    from tests.tracking.servers import serving  # it imports this module

    for started in serving(tmp_path_factory.mktemp("server"), empty_store):
        yield started.uri


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, server_uri: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The pages of this server in a browser."""
    from tests.tracking.browser import Pages, chromium

    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        pictures = request.config.getoption("--pictures")
        yield Pages(driver, server_uri, pictures and Path(pictures))


class Command:
    """`python -m scaleflow ...` in a folder of the test's.

    It is forked from the session's server, with everything imported; `cold` starts an interpreter.
    """

    module = "scaleflow"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        address = server()  # which the environment then has, too
        self.environment = {**clean_environment(), SERVER_ENV: address}

    def arguments(self, *words: str) -> list[str]:
        """The command for another way to start it."""
        return [sys.executable, "-m", *self.module.split(), *words]

    def __call__(self, *words: str, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", *self.module.split(), *words, timeout=timeout, **environment)

    def python(self, *words: str, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
        """`python WORDS...`; a module of ours is forked unless Python's own variables are set."""
        if words[0] != "-m" or any(name.startswith("PYTHON") for name in environment):
            return self.cold(*words, timeout=timeout, **environment)
        with CommandProcess(words[1:], self.folder, {**self.environment, **environment}) as process:
            out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.wait(), out, err)

    def cold(self, *words: str, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
        """`python WORDS...` in an interpreter of its own."""
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def start(self, *words: str, output: Sequence[int] | None = None, **environment: str) -> CommandProcess:
        """Runs in the background. Close it, or use it as a context."""
        return CommandProcess((*self.module.split(), *words), self.folder, {**self.environment, **environment}, output)

    def run_folder(self) -> Path:
        """The one output folder that the command made."""
        (found,) = self.folder.glob("outputs/*/*")
        return found

    def events(self) -> list[dict[str, Any]]:
        return events_in(self.run_folder() / "events.jsonl")


def make_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> tuple[Path, T]:
    """A folder that one of the test processes fills with `make(folder)`, and what that returned.

    A module's fixture is made in each test process that runs one of the module's tests. Use this for the slow ones.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared-{name}"
    folder, result = shared / "folder", shared / "result"
    with FileLock(shared.with_suffix(".lock")):
        if not result.exists():
            shutil.rmtree(shared, ignore_errors=True)  # of a process that failed
            folder.mkdir(parents=True)
            result.write_bytes(pickle.dumps(make(folder)))
    made: T = pickle.loads(result.read_bytes())
    return folder, made


def clean_environment() -> dict[str, str]:
    """The environment without what would lead a run elsewhere."""
    led = ("MLFLOW_", "TF_CONFIG", "HYDRA_", "SLURM_", INDEX, PODS, JOB, *VARIABLES)
    return {k: v for k, v in os.environ.items() if not k.startswith(led)} | {
        "CUDA_VISIBLE_DEVICES": "-1",
        WARM_ENV: "0",
    }


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.fixture
def compose() -> Iterator[Callable[..., dict[str, Any]]]:
    """`compose("model=cnn")`: the composed and resolved config as plain containers."""

    def run(*overrides: str) -> dict[str, Any]:
        with initialize_config_module("scaleflow.conf", version_base="1.3"):
            config = hydra_compose("config", overrides=quote_nan_option(overrides))
        plain = OmegaConf.to_container(config, resolve=True)
        assert isinstance(plain, dict)
        return {str(k): v for k, v in plain.items()}

    return run


@pytest.fixture
def plan(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Plan]:
    """`plan("model=cnn")`: the checked plan, its store in the test's folder unless it names one."""

    def run(*overrides: str) -> Plan:
        uri = (
            ()
            if any(o.startswith("tracking") for o in overrides)
            else (f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",)
        )
        return make_plan(ComposedConfig(compose(*uri, *overrides)))

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Skips a test of what the installed version of a package cannot do, if the refusal names the version that can."""
    report = yield
    refusal = re.search(
        r"this needs \w+ [\d.]+ or newer, and [\d.]+ is installed", str(call.excinfo and call.excinfo.value)
    )
    if report.failed and refusal:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: {refusal[0]}")
    return report
