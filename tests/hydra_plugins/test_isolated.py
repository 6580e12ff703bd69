"""The launchers `isolated` and `ray`, which run only scaleflow's own sweeps."""

from __future__ import annotations

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher

from hydra_plugins.scaleflow import isolated
from tests.conftest import Command

APP = """
import hydra

@hydra.main(version_base="1.3", config_path=None)
def main(config):
    print("ran")

main()
"""


def test_hydra_finds_the_launchers() -> None:
    launchers = set(Plugins.instance().discover(Launcher))  # the scan executes the module again
    assert {isolated.IsolatedLauncher, isolated.RayLauncher} <= launchers


@pytest.mark.parametrize("launcher", ["isolated", "ray"])
def test_another_app_is_refused_with_what_works(launcher: str, command: Command) -> None:
    (command.folder / "app.py").write_text(APP)
    ended = command.cold("app.py", "-m", f"hydra/launcher={launcher}", "+a=0,1")
    assert (ended.returncode, ended.stdout) == (1, "")
    message = ended.stderr.splitlines()[0]
    assert message.startswith(f"hydra/launcher={launcher}: runs only scaleflow's own sweeps")
    assert "hydra-joblib-launcher" in message
    assert "Traceback" not in ended.stderr
    assert not (command.folder / "multirun").exists()
