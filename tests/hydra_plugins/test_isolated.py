"""Hydra's own suite for launchers, on ours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import (
    BatchedSweeperTestSuite,
    IntegrationTestSuite,
    LauncherTestSuite,
)
from hydra.test_utils.test_utils import TSweepRunner, chdir_plugin_root  # noqa: F401
from hydra.version import _UNSPECIFIED_, VersionBase
from omegaconf import DictConfig

from hydra_plugins.scaleflow.isolated import IsolatedLauncher
from scaleflow.launcher.worker_process import SERVER
from tests.processes import server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Hydra's own, of its test apps
]


@pytest.fixture(autouse=True)
def shared_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVER, server())


def test_hydra_finds_the_launcher() -> None:
    assert IsolatedLauncher.__name__ in [found.__name__ for found in Plugins.instance().discover(Launcher)]


@pytest.mark.parametrize(("launcher_name", "overrides"), [("isolated", []), ("isolated", ["hydra.launcher.n_jobs=2"])])
class TestIsolatedLauncher(LauncherTestSuite):
    """One job at a time, and two."""


@pytest.mark.parametrize(
    ("launcher_name", "overrides"),
    [("isolated", ["hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2"])],
)
class TestIsolatedLauncherWithBatches(BatchedSweeperTestSuite):
    """Several batches to a sweep."""


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [({}, ["-m", "hydra/launcher=isolated"])],
)
class TestIsolatedLauncherIntegration(IntegrationTestSuite):
    """Apps in processes of their own."""


def pid(_: DictConfig) -> int:
    return os.getpid()


def die(_: DictConfig) -> None:
    os._exit(7)


def test_each_job_is_a_process_of_its_own(hydra_sweep_runner: TSweepRunner, tmpdir: Path) -> None:
    with swept(hydra_sweep_runner, pid, tmpdir) as found:
        values = [returned.return_value for returned in found.returns[0]]
    assert len({*values, os.getpid()}) == 3


def test_a_process_that_dies_is_a_job_that_failed(hydra_sweep_runner: TSweepRunner, tmpdir: Path) -> None:
    with pytest.raises(Exception, match="job 0 ended with exit status 7"), swept(hydra_sweep_runner, die, tmpdir):
        pass


def swept(runner: TSweepRunner, task: Any, folder: Path) -> Any:
    return runner(
        calling_file=None,
        calling_module="hydra.test_utils.a_module",
        task_function=task,
        config_path="configs",
        config_name="compose.yaml",
        overrides=["hydra/launcher=isolated", "+a=0,1"],
        temp_dir=folder,
    )


@pytest.fixture(autouse=True)
def no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's suite is written for an app that names no version; other tests of this process do."""
    monkeypatch.setattr(VersionBase.instance(), "version_base", _UNSPECIFIED_)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Hydra's test apps change into folders of theirs."""
    before = Path.cwd()
    yield
    os.chdir(before)
