"""MLproject, what its entry points call, and the backend that reads cluster settings from a file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from scaleflow import project
from scaleflow.commands.table import list_commands
from tests.conftest import Command
from tests.processes import ROOT

ENTRY_POINTS = yaml.safe_load((ROOT / "MLproject").read_text())["entry_points"]


@pytest.mark.parametrize("name", ["main", "sweep"])
def test_the_parameters_are_the_config_groups_with_their_defaults(name: str) -> None:
    parameters = {key: value["default"] for key, value in ENTRY_POINTS[name]["parameters"].items()}
    assert parameters.pop("overrides") == ""
    assert parameters == project.default_options()
    assert all(f" {key}={{{key}}}" in ENTRY_POINTS[name]["command"] for key in parameters)


def test_the_entry_points_are_commands() -> None:
    assert set(ENTRY_POINTS) - set(list_commands()) == set(project.ENTRY_POINTS)
    for name, entry in ENTRY_POINTS.items():
        assert entry["command"].startswith(f"python -m scaleflow project {name} ")
        assert entry["command"].endswith(" --overrides {overrides}")


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["main", "strategy=auto", "model=cnn", "experiment=null", "--overrides", ""], ["scaleflow", "model=cnn"]),
        (["main", "debug=none", "--overrides", "seed=1 a='b c'"], ["scaleflow", "--overrides", "seed=1 a='b c'"]),
        (["sweep", "strategy=one_device,mirrored"], ["scaleflow", "-m", "strategy=one_device,mirrored"]),
        (["evaluate", "abc", "dataset=", "--overrides", " "], ["scaleflow", "evaluate", "abc"]),
        (["pipeline", "table", "--overrides", ""], ["scaleflow", "pipeline", "table"]),
    ],
)
def test_words_that_nobody_typed_are_left_out(words: list[str], command: list[str], monkeypatch: Any) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: became.append(arguments[1:]))
    project.main(words)
    assert became == [["-m", *command]]


@pytest.mark.parametrize("words", [[], ["mian", "seed=1"]])
def test_an_entry_point_that_is_none_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert project.main(words) == 2
    assert "expected main, sweep or a command as the first argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, []),
        ({"cluster": "tf_config"}, ["cluster=tf_config"]),
        ({"cluster.workers": 2, "cluster.stall_seconds": None}, ["cluster.workers=2", "cluster.stall_seconds=null"]),
        ({"cluster": {"workers": 2, "x": [1]}}, ["cluster.workers=2", "cluster.x=[1]"]),
    ],
)
def test_the_settings_of_a_file_become_overrides(config: dict[str, Any], expected: list[str]) -> None:
    from scaleflow.tracking.backend import to_overrides

    assert to_overrides(config) == expected


def test_unknown_setting_of_the_cluster_is_named() -> None:
    from mlflow.exceptions import ExecutionException

    from scaleflow.tracking.backend import to_overrides

    with pytest.raises(ExecutionException, match="--backend-config: strategy: expected keys of the config group"):
        to_overrides({"strategy": "mirrored"})


SMALL = (
    "dataset=synthetic dataset.shape=[4] dataset.examples=50 dataset.validation=null training.max_steps=1 "
    "checkpoint=none"
)


def mlflow_run(command: Command, *words: str, project: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`mlflow run` of this project, or of a copy of its file, with the store in the test's folder."""
    environment = command.environment | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{command.folder}/mlflow.db",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    return subprocess.run(
        [sys.executable, "-m", "mlflow", "run", str(project), "--env-manager", "local", *words],
        cwd=command.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.slow  # the entry point main: test_package, with the backend of ours
def test_mlflow_run_starts_a_sweep_and_an_evaluation(command: Command, empty_store: Path) -> None:
    from mlflow import MlflowClient

    shutil.copy(empty_store, command.folder / "mlflow.db")
    client = MlflowClient(f"sqlite:///{command.folder}/mlflow.db")
    more = f"overrides={SMALL} hydra.sweep.dir={command.folder}/s"
    ended = mlflow_run(command, "-e", "sweep", "-P", "optimizer=sgd,adam", "-P", more)
    assert ended.returncode == 0, ended.stderr
    runs = {run.info.run_name: run for run in client.search_runs(["0"])}
    parent = runs["sweep of optimizer"]
    assert parent.info.status == parent.data.tags["scaleflow.status"] == "FINISHED"
    assert parent.data.tags["mlflow.project.entryPoint"] == "sweep"
    assert {run.info.status for run in children(runs.values(), parent)} == {"FINISHED"}
    assert {run.data.params["optimizer"] for run in children(runs.values(), parent)} == {"sgd", "adam"}
    assert "report.json" in {file.path for file in client.list_artifacts(parent.info.run_id)}

    adam = runs["optimizer=adam synthetic-mlp-one_device-float32"]
    ended = mlflow_run(command, "-e", "evaluate", "-P", f"run_id={adam.info.run_id}", "-P", "overrides=--split train")
    assert ended.returncode == 0, ended.stderr
    runs = {run.info.run_name: run for run in client.search_runs(["0"])}
    assert len(runs) == 4
    adam = client.get_run(adam.info.run_id)
    assert "evaluate/synthetic.train/loss" in adam.data.metrics
    (opened,) = children(runs.values(), adam)
    assert (opened.info.run_name, opened.info.status) == (f"evaluation of {adam.info.run_name}", "FINISHED")


@pytest.mark.slow  # what is special about it: tests/features/pipelines/test_stages.py
def test_mlflow_run_starts_a_pipeline(command: Command, empty_store: Path) -> None:
    from mlflow import MlflowClient

    shutil.copy(empty_store, command.folder / "mlflow.db")
    client = MlflowClient(f"sqlite:///{command.folder}/mlflow.db")
    project = command.folder / "project"  # a pipeline has its folder beside the file
    project.mkdir()
    for name in ("MLproject", "python_env.yaml"):
        shutil.copy(ROOT / name, project)
    short = "overrides=search.training.max_steps=2 fit.training.max_steps=2"
    ended = mlflow_run(command, "-e", "pipeline", "-P", "name=table", "-P", short, project=project)
    assert ended.returncode == 0, ended.stderr
    runs = client.search_runs(["0"])
    (parent,) = [run for run in runs if run.info.run_name == "table"]
    assert parent.data.tags["mlflow.project.entryPoint"] == "pipeline"
    stages = {run.data.tags["scaleflow.stage"] for run in children(runs, parent)}
    assert stages == {"look", "search", "fit", "valid", "go"}
    assert {run.info.status for run in runs} == {"FINISHED"}
    wrong = "overrides=fit.model.x=it's"
    ended = mlflow_run(command, "-e", "pipeline", "-P", "name=table", "-P", wrong, project=project)
    assert ended.returncode != 0
    assert "--overrides: fit.model.x=it's: no closing quotation; write this word as" in ended.stderr


def children(runs: Iterable[Any], parent: Any) -> list[Any]:
    return [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
