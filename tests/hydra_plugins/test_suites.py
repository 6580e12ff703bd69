"""Hydra's own suites for plugins, with our sweeper and a launcher that other apps can use."""

from __future__ import annotations

import pytest
from hydra import version
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the rules of ours: the other files here

GRID = ["hydra/sweeper=grid"]


@pytest.fixture(autouse=True)
def without_version_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suites change into each job's folder, as Hydra does if no earlier test in this process named a version."""
    monkeypatch.setattr(version.VersionBase.instance(), "version_base", version._UNSPECIFIED_)


@pytest.mark.parametrize(("launcher_name", "overrides"), [("basic", GRID)])
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.parametrize(("launcher_name", "overrides"), [("basic", [*GRID, "hydra.sweeper.max_batch_size=2"])])
class TestBatches(BatchedSweeperTestSuite):
    pass


@pytest.mark.parametrize(("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=basic", *GRID])])
class TestIntegration(IntegrationTestSuite):
    pass
