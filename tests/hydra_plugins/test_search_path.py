"""Config options that installed packages bring, discovered from real package metadata."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import Command


def install(site: Path, name: str, package: str) -> None:
    """A distribution as pip would leave it, whose entry point names `write_mlflow_model`."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[scaleflow.conf]\n{name} = {package}\n")


def install_good(site: Path) -> None:
    install(site, "my_models", "my_models.conf")
    conf = site / "my_models" / "conf"
    (conf / "model").mkdir(parents=True)
    for folder in (conf.parent, conf):
        (folder / "__init__.py").touch()
    (conf / "model" / "my_net.yaml").write_text("_target_: my_models.build\n_partial_: true\nwidth: 7\n")


def test_an_installed_package_brings_its_options(command: Command) -> None:
    install_good(command.folder / "site")
    shown = command("--cfg", "job", "model=my_net", PYTHONPATH=str(command.folder / "site"))
    assert shown.returncode == 0, shown.stderr
    assert "width: 7" in shown.stdout
    assert "my_net" in command("--help", PYTHONPATH=str(command.folder / "site")).stdout


def test_one_that_cannot_be_imported_is_named_and_skipped(command: Command) -> None:
    install_good(command.folder / "site")
    install(command.folder / "site", "broken", "nowhere.conf")
    shown = command("--cfg", "job", "model=my_net", PYTHONPATH=str(command.folder / "site"))
    assert shown.returncode == 0
    assert "width: 7" in shown.stdout
    assert "broken names the config package nowhere.conf" in shown.stderr


def test_a_strangers_app_is_left_alone(command: Command) -> None:
    install_good(command.folder / "site")
    app = command.folder / "app.py"
    app.write_text(
        "import hydra\n\n\n@hydra.main(version_base='1.3', config_path=None)\ndef main(config):\n    pass\n\n\nmain()\n"
    )
    shown = subprocess.run(
        [sys.executable, str(app), "--info", "searchpath"],
        env={**command.environment, "PYTHONPATH": str(command.folder / "site")},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert "scaleflow" not in shown.stdout
    assert "my_models" not in shown.stdout
