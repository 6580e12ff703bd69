"""What the tests share: a child process with TensorFlow in it, the command, a composed config."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import OmegaConf

from scaleflow.cluster.kubernetes import INDEX, JOB, PODS
from scaleflow.cluster.tpu import VARIABLES
from scaleflow.command import options_as_text
from scaleflow.config.plan import make_plan
from scaleflow.interfaces import Plan
from scaleflow.launcher.process import SERVER, serving

ROOT = Path(__file__).parent.parent

#: One server for the whole session imports TensorFlow once; every child is forked from it.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tensorflow", "keras", "tests.preload"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", action="store_true", help="train every allowed cell of the table, not a cover of them")
    parser.addoption("--pictures", metavar="DIR", help="keep what MLflow's UI shows as PNG files")


def in_child(
    pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> None:
    """Runs in the child: sends (True, result) or (False, traceback)."""
    try:
        pipe.send((True, function(*arguments, **keywords)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()


#: What lasts as long as the session.
SESSION = contextlib.ExitStack()


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is put where temporary files are by a process that is killed goes with the session."""
    folder = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        with SESSION:
            yield
    for path in folder.glob("[!p]*"):  # pymp-*: multiprocessing takes that away at exit
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@functools.cache
def server() -> str:
    """The server that the session's commands have their workers forked from: TensorFlow is imported once."""
    return SESSION.enter_context(serving())


@pytest.fixture(autouse=True)
def no_tpu_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def isolated() -> Callable[..., Any]:
    """`isolated(function, *arguments)`: its result from a process of its own, which may set up any devices.

    The function has to be at the top of a test module; what it takes and returns has to pickle.
    """

    def run(function: Callable[..., Any], *arguments: Any, timeout: float = 240, **keywords: Any) -> Any:
        receive, send = FORKSERVER.Pipe(duplex=False)
        child = FORKSERVER.Process(target=in_child, args=(send, function, arguments, keywords))
        child.start()
        send.close()
        try:
            if not receive.poll(timeout):
                raise TimeoutError(f"{function.__name__} did not end within {timeout} s")
            worked, result = receive.recv()
        except EOFError:
            child.join(5)
            raise AssertionError(f"{function.__name__} ended its process (exit code {child.exitcode})") from None
        finally:
            child.kill() if receive.closed or not child.is_alive() else child.join(5)
            if child.is_alive():
                child.kill()
            child.join()
        assert worked, result
        return result

    return run


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with MLflow's tables, to be copied: making them takes seconds."""
    from scaleflow.interfaces import Tracking
    from scaleflow.tracking.store import MlflowTracker

    path = tmp_path_factory.mktemp("store") / "empty.db"
    MlflowTracker(Tracking(uri=f"sqlite:///{path}")).connect()
    return path


class Command:
    """`python -m scaleflow ...` in a folder of the test's."""

    module = "scaleflow"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**clean_environment(), SERVER: server()}

    def arguments(self, *words: str) -> list[str]:
        return [sys.executable, "-m", self.module, *words]

    def __call__(self, *words: str, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", self.module, *words, timeout=timeout, **environment)

    def python(self, *words: str, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
        """Another module, or a script."""
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

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.arguments(*words),
            cwd=self.folder,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def run_folder(self) -> Path:
        """The one output folder that the command made."""
        (found,) = self.folder.glob("outputs/*/*")
        return found

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_folder() / "events.jsonl").read_text().splitlines()]


def clean_environment() -> dict[str, str]:
    """The environment without what would lead a run elsewhere."""
    led = ("MLFLOW_", "TF_CONFIG", "HYDRA_", "SLURM_", INDEX, PODS, JOB, *VARIABLES)
    return {k: v for k, v in os.environ.items() if not k.startswith(led)} | {"CUDA_VISIBLE_DEVICES": "-1"}


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.fixture
def compose() -> Iterator[Callable[..., dict[str, Any]]]:
    """`compose("model=cnn")`: the composed and resolved config as plain containers."""

    def run(*overrides: str) -> dict[str, Any]:
        with initialize_config_module("scaleflow.conf", version_base="1.3"):
            config = hydra_compose("config", overrides=options_as_text(overrides))
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
        return make_plan(compose(*uri, *overrides), {})

    return run
