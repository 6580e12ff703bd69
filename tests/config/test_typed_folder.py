"""Calls in another Hydra app that lets Hydra change the current folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

import scaleflow
from scaleflow.config.typed_folder import find_typed_folder, in_typed_folder

APP = """
from pathlib import Path
import hydra
from scaleflow.config.typed_folder import in_typed_folder, use_typed_folder

@in_typed_folder
def find(path):
    return Path(path).absolute()

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    job = Path.cwd()
    print("found", find("mlflow.db"), Path.cwd() == job)
    try:
        with use_typed_folder():
            1 / 0
    except ZeroDivisionError:
        print("back", Path.cwd() == job)
    Path("own").mkdir()
    import os
    os.chdir("own")
    print("chosen", find("x").parent.name)

main()
"""


@pytest.mark.parametrize("words", [("hydra.job.chdir=true",), ("-m", "hydra.job.chdir=true"), ()])
def test_relative_paths_start_where_the_command_of_an_app_was_typed(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "app.py").write_text(APP)
    done = subprocess.run([sys.executable, "app.py", *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if "HYDRA" not in line and "#0" not in line]
    assert lines == [f"found {tmp_path}/mlflow.db True", "back True", "chosen own"]


def test_without_an_app_the_current_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert in_typed_folder(Path.cwd)() == tmp_path


def test_the_config_of_a_sweep_is_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = OmegaConf.create({"hydra": {"runtime": {"cwd": str(tmp_path), "output_dir": "???"}}})
    monkeypatch.setattr(HydraConfig.instance(), "cfg", config)
    assert find_typed_folder() is None


def test_all_functions_that_take_paths_are_decorated() -> None:
    functions = [name for name in scaleflow.__all__ if name.islower() and not name.startswith("_")]
    plain = [name for name in functions if not hasattr(getattr(scaleflow, name), "__wrapped__")]
    assert plain == ["log_metric"]  # it takes no path
