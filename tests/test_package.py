import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import scaleflow
from scaleflow.launcher.processes.handover import SERVER_ENV
from tests.conftest import clean_environment
from tests.processes import server

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

IN_THE_WHEEL = ("scaleflow", "conf", "hydra_plugins", "pyproject.toml", "README.md", "LICENSE")


def test_the_version_is_the_same_everywhere() -> None:
    assert scaleflow.__version__ == PROJECT["version"]
    latest = re.search(r"^## \[?v?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest is not None
    assert latest[1] == PROJECT["version"]


def test_the_console_script_is_a_function_that_exits_with_the_commands_code() -> None:
    assert PROJECT["scripts"] == {"scaleflow": "scaleflow.__main__:entry"}
    (found,) = importlib.metadata.entry_points(group="console_scripts", name="scaleflow")
    from scaleflow import __main__

    assert found.load() is __main__.entry


# ---------------------------------------------------------------------------------------------
# The wheel
# ---------------------------------------------------------------------------------------------


def run(words: Sequence[str | Path], folder: Path, installed: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = clean_environment() | ({"PYTHONPATH": str(installed)} if installed else {})
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in IN_THE_WHEEL:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    run([sys.executable, *build], source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    folder = wheel.parent / "installed"
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--quiet"]
    run([sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(wheel)], wheel.parent)
    return folder


def test_the_wheel_holds_every_module_and_every_config_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    conf = {
        f"scaleflow/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*") if path.suffix in (".yaml", ".py")
    }
    conf |= {str(path.relative_to(ROOT)) for path in (ROOT / "scaleflow/features").glob("*/conf/**/*.yaml")}
    folders = (ROOT / "scaleflow", ROOT / "hydra_plugins")
    code = {str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*.py")}
    starter = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "scaleflow/features/housekeeping/starter").rglob("*")
        if path.is_file()
    }
    assert names == conf | code | starter | {"scaleflow/py.typed"}


@pytest.mark.slow
def test_the_wheel_says_what_it_is(installed: Path) -> None:
    (found,) = importlib.metadata.distributions(path=[str(installed)])
    assert (found.name, found.version) == ("scaleflow", PROJECT["version"])
    assert sorted(found.metadata["Requires-Python"].split(",")) == sorted(PROJECT["requires-python"].split(","))
    (script,) = [point for point in found.entry_points if point.group == "console_scripts"]
    assert (script.name, script.value) == ("scaleflow", "scaleflow.__main__:entry")
    assert "Apache-2.0" in found.metadata["License-Expression"]


def place_of(module: str, folder: Path, installed: Path) -> Path:
    return Path(
        run([sys.executable, "-c", f"import {module}; print({module}.__file__)"], folder, installed).stdout.strip()
    )


@pytest.mark.slow
def test_installed_package_runs_from_any_folder_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    for module in ("scaleflow", "scaleflow.conf", "scaleflow.worker.main", "hydra_plugins.scaleflow"):
        assert place_of(module, tmp_path, installed).is_relative_to(installed)
    shown = run([sys.executable, "-m", "scaleflow", "--cfg", "job"], tmp_path, installed).stdout
    assert "_target_: scaleflow.dataset.digits.Digits" in shown
    assert "experiment: scaleflow" in shown
    script = installed / "bin" / "scaleflow"
    assert run([script, "--cfg", "job"], tmp_path, installed).stdout == shown
    searched = run([sys.executable, "-m", "scaleflow", "--info", "searchpath"], tmp_path, installed).stdout
    assert "pkg://scaleflow.conf" in searched
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_users_logs_inside_of_a_run_have_its_tags(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text('{"scaleflow.host": "here", "mlflow.source.git.commit": "abc"}')
    asked = (
        "import os, sys, json, scaleflow.runs.provenance as p;"
        "heavy = {'mlflow', 'tensorflow', 'numpy'} & set(sys.modules);"
        "from mlflow.tracking.context.registry import resolve_tags; outside = resolve_tags();"
        "os.environ[p.tags.INSIDE] = os.getcwd(); print(json.dumps([sorted(heavy), outside, resolve_tags()]))"
    )
    heavy, outside, inside = json.loads(run([sys.executable, "-c", asked], tmp_path, installed).stdout)
    assert heavy == []
    assert not [key for key in outside if "scaleflow" in key]
    own = {"scaleflow.host": "here", "mlflow.source.git.commit": "abc", "scaleflow.inside": str(tmp_path)}
    assert {key: inside.get(key) for key in own} == own


@pytest.mark.slow
def test_mlflow_run_starts_a_run_that_is_adopted_with_the_cluster_settings_of_a_file(
    installed: Path, tmp_path: Path
) -> None:
    uri, folder = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "run"
    (tmp_path / "cluster.json").write_text('{"cluster.max_restarts": 1, "cluster": {"stall_seconds": 90}}')
    overrides = (
        f"training.epochs=1 checkpoint=none 'tracking.tags={{why: a test}}' precision=mixed hydra.run.dir={folder}"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "mlflow", "run", str(ROOT), "--env-manager", "local"]
        + ["--backend", "scaleflow", "--backend-config", "cluster.json"]
        + ["-P", "experiment=digits_mirrored", "-P", f"overrides={overrides}"],
        env={**clean_environment(), "MLFLOW_TRACKING_URI": uri, "PYTHONPATH": str(installed), SERVER_ENV: server()}
        | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (found,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    params, tags = found.data.params, found.data.tags
    assert json.loads((folder / "record.json").read_text())["run_id"] == found.info.run_id
    assert found.info.status == tags["scaleflow.status"] == "FINISHED"
    assert (params["cluster.max_restarts"], params["cluster.stall_seconds"]) == ("1", "90")
    assert (params["strategy"], params["resolved.strategy"]) == ("auto", "mirrored"), "the recipe's"
    assert (params["scaleflow.strategy"], params["scaleflow.precision"]) == ("mirrored", "mixed")
    assert (tags["why"], tags["mlflow.project.backend"]) == ("a test", "scaleflow")
    assert tags["mlflow.source.type"] == "PROJECT"
    assert tags["scaleflow.command"].startswith("python")
    assert found.data.metrics["test/accuracy"] > 0.3


@pytest.mark.slow
def test_installed_package_trains_and_records(installed: Path, tmp_path: Path) -> None:
    short = ["training.max_steps=2", "dataset.limit=64", "hardware.intra_op_threads=1"]
    done = run([sys.executable, "-m", "scaleflow", *short], tmp_path, installed)
    assert "FINISHED" in done.stdout
    assert (tmp_path / "mlflow.db").is_file()
    (folder,) = tmp_path.glob("outputs/*/*")
    assert (folder / "model" / "model.keras").is_file()
