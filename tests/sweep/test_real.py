"""Sweeps that train, into a real store."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces.events import RunEnded
from scaleflow.interfaces.secret_masking import MASK
from scaleflow.runs import RunFolder
from scaleflow.runs.event_log import append_event
from scaleflow.runs.provenance.record import read_states
from tests.conftest import Command, make_once
from tests.event_log import events_in
from tests.launcher.test_supervisor import processes, wait_for
from tests.processes import NEW_STORE, ROOT, CommandProcess

SMALL = (
    *("dataset=synthetic", "dataset.shape=[16]", "dataset.examples=500", "dataset.validation=null"),
    "evaluation=none",
)
SWEEP = ("-m", *SMALL, "hydra.sweep.dir=s")


def runs(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The parent, and its children by their folder's name."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("scaleflow").experiment_id])
    (parent,) = [run for run in found if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in found if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} <= {parent.info.run_id}
    return parent, {Path(run.data.tags["scaleflow.folder"]).name: run for run in children}


def artifacts(folder: Path, run_id: str) -> set[str]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    places = [None, "plots", "evaluation"]
    return {file.path for place in places for file in client.list_artifacts(run_id, place)}


#: What a command prints, and the folder that it ran in.
Finished = tuple[Command, str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A sweep of two jobs at a time, with validation."""

    def make(folder: Path) -> str:
        ended = Command(folder)("-m", *FINISHED)
        assert ended.returncode == 0, ended.stderr
        return ended.stderr + ended.stdout

    folder, output = make_once(tmp_path_factory, "sweep", make)
    return Command(folder), output


FINISHED = (
    *("model.units=4,32", "training.epochs=2", "checkpoint=none", "hydra.sweep.dir=s", "hydra.launcher.n_jobs=2"),
    "tracking.tags={token: sesame}",
)


def test_a_sweep_is_a_parent_with_a_child_to_each_job(finished: Finished) -> None:
    command, output = finished
    parent, children = runs(command.folder)
    assert (parent.info.status, parent.info.run_name) == ("FINISHED", "sweep of model.units")
    assert parent.data.tags["scaleflow.status"] == "FINISHED"
    assert {name: run.info.status for name, run in children.items()} == {"0": "FINISHED", "1": "FINISHED"}
    rows = list(csv.DictReader((command.folder / "s" / "report.csv").read_text().splitlines()))
    assert {row["job"]: row["run"] for row in rows} == {name: run.info.run_id for name, run in children.items()}
    assert all(float(row["examples/s"]) > 0 for row in rows)
    kept = artifacts(command.folder, parent.info.run_id)
    assert {"report.json", "report.csv", "report.md", "multirun.yaml", "config.yaml"} <= kept
    assert {"plots/throughput.svg", "plots/curves.svg", "plots/over-model.units.svg"} <= kept
    assert {"evaluation/comparison.html", "evaluation/comparison.csv"} <= kept
    assert parent.data.tags["mlflow.note.content"].count("| FINISHED") == 2
    assert json.loads(parent.data.tags["mlflow.loggedArtifacts"]) == [{"path": "report.json", "type": "table"}]
    states = [read_states(RunFolder(command.folder / "s" / name))[0] for name in "01"]
    assert states[0] == replace(states[1], data=states[0].data), "all jobs are made of the same"
    assert states[0].variables["TF_NUM_INTRAOP_THREADS"] == "1"

    rerun = command.python("-m", "scaleflow", "rerun", parent.info.run_id)
    assert rerun.returncode == 2
    assert "this is the run of a sweep; use the run of one of its jobs" in rerun.stderr

    append_event(command.folder / "s" / "events.jsonl", RunEnded("KILLED", ""))  # as if stopped after its last job
    again = command("-m", *FINISHED)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("is already FINISHED") == 2
    same, children = runs(command.folder)
    assert (same.info.run_id, same.info.status, len(children)) == (parent.info.run_id, "FINISHED", 2)
    assert {run.data.tags["token"] for run in (same, *children.values())} == {MASK}
    files = [path for path in command.folder.rglob("*") if path.is_file()]
    assert {"multirun.yaml", "sweep.json", "mlflow.db", "events.jsonl"} <= {path.name for path in files}
    assert [path for path in files if b"sesame" in path.read_bytes()] == []
    assert "sesame" not in output + again.stdout


@pytest.mark.slow
def test_a_job_of_another_strategy_joins_the_sweep_with_the_same_loss(command: Command) -> None:
    swept = ("strategy=one_device,mirrored", "hardware.logical_devices=2", "training.max_steps=8", "checkpoint=none")
    same = (*SWEEP, *swept, "training.global_batch_size=50")
    for words, number in (((), 2), (("seed=0,1",), 4)):
        ended = command(*same, *words)
        assert ended.returncode == 0, ended.stderr
        _, children = runs(command.folder)
        assert [children[str(n)].data.params["resolved.replicas"] for n in range(number)] == ["1", "2", "1", "2"][
            :number
        ]
    rows = list(csv.DictReader((command.folder / "s" / "report.csv").read_text().splitlines()))
    one, two = (row for row in rows if row["seed"] == "0")
    assert float(one["test/loss"]) == pytest.approx(float(two["test/loss"]), abs=1e-5)  # the same batches


@pytest.mark.slow
def test_output_of_a_sweep_leads_to_its_best_model(finished: Finished, isolated: Callable[..., Any]) -> None:
    """The last line, the snippet of docs/sweeps.md and the descriptions in MLflow."""
    command, output = finished
    parent, children = runs(command.folder)
    rows = list(csv.DictReader((command.folder / "s" / "report.csv").read_text().splitlines()))
    assert [row["best"] for row in rows] == ["*", ""]
    assert float(rows[0]["val/loss"]) < float(rows[1]["val/loss"])
    best = children[rows[0]["job"]]
    compared = list(csv.DictReader((command.folder / "s" / "evaluation" / "comparison.csv").read_text().splitlines()))
    assert [row["model"].split()[0] for row in compared] == [f"#{row['job']}" for row in rows]
    assert re.search(rf"^compared +#{rows[1]['job']} .*differs from the best by accuracy ", output, re.M)
    label, line = output.splitlines()[-2].split(maxsplit=1)
    assert label == "best"
    assert line.startswith(f"#{rows[0]['job']} model.units={rows[0]['model.units']}, val/loss ")
    loading = output.splitlines()[-1].removeprefix("load it").lstrip()
    (code,) = re.findall(r"```python\n(import mlflow.*?)```", (ROOT / "docs" / "sweeps.md").read_text(), re.S)
    snippet = code.replace("PARENT_ID", parent.info.run_id)
    assert snippet != code
    described = {name: read_snippet(run) for name, run in (("sweep", parent), ("job", best))}
    for named, more in ((parent.info.run_id, ("--uri", "sqlite:///mlflow.db")), ("s", ())):
        done = command.python("-m", "scaleflow", "best", named, *more, "--json")
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout.splitlines()[-1])
        assert (answer["run_id"], answer["job"]) == (best.info.run_id, int(rows[0]["job"]))
        assert answer["model"] == loading.rpartition("(")[2].strip('")')
        assert answer["value"] == parent.data.metrics["val/loss"] == best.data.metrics["val/loss"]
    assert parent.data.metrics["test/loss"] == best.data.metrics["test/loss"]
    told = isolated(predict_all, str(command.folder), loading, snippet, described)
    assert told.pop("runs") == [row["run"] for row in rows]
    (first, *others) = told.values()
    assert all(outputs == first for outputs in others)  # all four lead to one model
    assert len(first) == 2


def read_snippet(run: Any) -> str:
    """The Python in a run's description."""
    (code,) = re.findall(r"```python\n(.*?)```", run.data.tags["mlflow.note.content"], re.S)
    return str(code)


def predict_all(folder: str, loading: str, snippet: str, described: dict[str, str]) -> dict[str, Any]:
    """What the best model makes of its input example, however it is loaded; and the runs that the snippet finds."""
    import mlflow

    os.chdir(folder)
    *first, last = loading.split("; ")
    exec("; ".join(first), {"mlflow": mlflow})
    model = eval(last, {"mlflow": mlflow})
    told: dict[str, Any] = {"line": model.predict(model.input_example).to_numpy().tolist()}
    for name, code in described.items():
        names: dict[str, Any] = {}
        exec(code, names)
        told[name] = names["outputs"].to_numpy().tolist()
    names = {}
    exec(snippet, names)
    told["docs"] = names["best"].predict(model.input_example).to_numpy().tolist()
    return {**told, "runs": list(names["runs"].run_id)}


@contextlib.contextmanager
def started(command: Command, *words: str) -> Iterator[CommandProcess]:
    """A sweep in the background, whose first job has written a checkpoint; it does not outlive the block."""
    with (command.folder / "out.txt").open("w") as out:
        launcher = command.start(*SWEEP, *words, output=(out.fileno(), out.fileno()))
    events = command.folder / "s" / "0" / "events.jsonl"
    try:
        wait_for(lambda: launcher.poll() is not None or has_checkpoint(events))
        assert launcher.poll() is None, (command.folder / "out.txt").read_text()
        yield launcher
    finally:
        launcher.close()


def has_checkpoint(events: Path) -> bool:
    return events.exists() and '"event": "checkpoint"' in events.read_text()


LONG = ("training.epochs=100000", "model.units=8,16", "training.steps_per_epoch=10")


@pytest.mark.slow
def test_a_launcher_that_is_killed_is_made_up_for_when_the_sweep_is_sent_again(command: Command) -> None:
    folder = command.folder / "s" / "0"
    with started(command, *LONG):
        (worker,) = processes(folder)
    wait_for(lambda: not worker.is_running())
    step = last_step(folder)
    refused = command(*SWEEP, f"training.epochs={step // 10 + 2}", *LONG[1:])
    assert refused.returncode == 2
    assert "training.epochs=" in refused.stderr
    with started(command, *LONG) as again:
        wait_for(lambda: last_step(folder) > step)
        os.kill(again.pid, signal.SIGINT)
        assert again.wait(240) == 130, (command.folder / "out.txt").read_text()
    parent, children = runs(command.folder)
    assert parent.info.status == "KILLED"
    assert {name: run.info.status for name, run in children.items()} == {"0": "KILLED"}
    statuses = [job["status"] for job in json.loads((command.folder / "s" / "sweep.json").read_text())["jobs"]]
    assert statuses == ["KILLED", "waiting"]
    assert "the same command with hydra.sweep.dir=s" in (command.folder / "out.txt").read_text()


def last_step(folder: Path) -> int:
    for _ in range(100):
        steps = [event["step"] for event in events_in(folder / "events.jsonl") if event["event"] == "metrics"]
        if steps:
            return int(max(steps))
        time.sleep(0.1)
    raise AssertionError("no step")


@pytest.mark.slow
def test_two_sweeps_at_once_share_a_new_store(command: Command) -> None:
    words = ("-m", *SMALL, "training.max_steps=2", "checkpoint=none", "hydra.launcher.n_jobs=2", "seed=0,1")
    sweeps = [command.start(*words, f"hydra.sweep.dir={name}", f"model.units={name}", **NEW_STORE) for name in (8, 16)]
    outputs = [sweep.communicate(timeout=240) for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [0, 0], outputs
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{command.folder}/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("scaleflow").experiment_id])
    assert [run.info.status for run in found] == ["FINISHED"] * 6
    parents = {run.data.tags.get("mlflow.parentRunId") for run in found} - {None}
    assert len(parents) == 2
    jobs = [run for run in found if "mlflow.parentRunId" in run.data.tags]
    asked = {(units, seed) for units in ("8", "16") for seed in "01"}
    assert {(run.data.params["model.units"], run.data.params["seed"]) for run in jobs} == asked


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_another_launcher_of_hydras_runs_each_job_as_a_command_of_its_own(command: Command, launcher: str) -> None:
    package = f"hydra-{launcher.partition('_')[0]}-launcher"
    if launcher != "basic" and find_spec(f"hydra_plugins.{package.replace('-', '_')}") is None:
        pytest.skip(f"{package} is not installed")
    words = (*SMALL, "training.max_steps=2", "tracking=none", "optimizer=sgd", "optimizer.learning_rate=0.1,-1")
    ended = command("-m", f"hydra/launcher={launcher}", *words, "hydra.sweep.dir=b")
    assert ended.returncode == 1
    folder = command.folder / "b"
    last = [events_in(path)[-1] for path in sorted(folder.glob("?/events.jsonl"))]
    assert [event["status"] for event in last] == ["FINISHED"]
    if launcher.startswith("submitit"):  # it keeps what jobs print
        output = "".join(path.read_text() for path in folder.glob(".submitit/*/*log.*"))
    else:
        output = ended.stdout + ended.stderr
    assert output.count("FINISHED") == 1
    assert "optimizer.learning_rate=-1: expected a number, above 0.0" in output


@pytest.mark.slow
def test_folds_judge_all_rows_and_the_best_job_is_trained_on_them(tmp_path: Path) -> None:
    from scaleflow.evaluation.predictions import load_predictions

    command, random = Command(tmp_path), np.random.default_rng(0)
    with (tmp_path / "visits.csv").open("w") as file:
        file.write("customer,x,bought\n")
        file.writelines(f"{n // 4},{random.normal():.3f},{'yes' if n % 3 else 'no'}\n" for n in range(120))
    words = ("dataset=table", "dataset.data_dir=visits.csv", "dataset.target=bought", "training.epochs=1")
    split = "dataset.split={by: group, column: customer}"
    ended = command("-m", *words, split, "model.units=4,8", "sweep.folds=2", "hydra.sweep.dir=s")
    assert ended.returncode == 0, ended.stderr
    pooled = load_predictions(tmp_path / "s" / "evaluation" / "predictions.parquet")
    assert len(pooled.table) == len({*pooled.column("row")}) == 96, "each row but those of the test, once"
    assert (tmp_path / "s" / "evaluation" / "report.html").exists()
    refit = command.python("-m", "scaleflow", "refit", "s", "hydra.run.dir=r")
    assert refit.returncode == 0, refit.stderr
    (state,) = read_states(RunFolder(tmp_path / "r"))
    assert {name: each["examples"] for name, each in state.data["splits"].items()} == {"train": 96, "test": 24}
    assert "global batch 32, 2 steps" in refit.stdout, "as many as were best in the folds"
