"""`python -m scaleflow find` and `training.batch_size=auto` in real runs, and what they refuse."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from scaleflow.cli import main
from scaleflow.config.compose import compose_config
from scaleflow.features.search import find
from scaleflow.features.search.before_run import choose_trial, make_search, use_setting
from scaleflow.features.search.events import SettingFound
from scaleflow.features.search.trial_kinds import BatchSearch, RateTest
from scaleflow.launcher.prepare import prepare_run
from scaleflow.runs import RunFolder, RunState
from tests.conftest import Command
from tests.launcher.test_supervisor import wait_for

LR, BATCH_SIZE = "lr", "batch_size"


def test_a_task_of_several_machines_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    assert main(["training.batch_size=auto"]) == 2
    assert "training.batch_size=auto with cluster=tf_config: " in capsys.readouterr().err
    assert find.main([LR, "checkpoint.folder=x"]) == 2
    assert "cluster=tf_config with python -m scaleflow find lr: " in capsys.readouterr().err


def test_the_run_takes_the_batch_size_and_the_figures_of_its_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["training.batch_size=auto", "tracking=none"]
    run = prepare_run(compose_config(words))
    run.spec.folder.mkdir(parents=True, exist_ok=True)
    search = make_search(run, BatchSearch())
    (search.spec.folder / BatchSearch.table).write_text("the figures")
    (search.spec.folder / "record.json").write_text('{"run_id": "of the search"}')
    found = use_setting(run, search, SettingFound("training.batch_size", 16, "the fastest", ""))
    assert (found.spec.plan.training.batch_size, found.composed.raw["training"]["batch_size"]) == (16, 16)
    assert (run.spec.folder / BatchSearch.table).read_text() == "the figures"
    assert found.spec.tags["scaleflow.batch_size"] == "auto: training.batch_size=16, the fastest"
    assert found.spec.tags["scaleflow.batch_size.run"] == "of the search"


def test_both_are_searched_and_the_batch_size_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["training.batch_size=auto", "optimizer.learning_rate=auto", "optimizer.schedule=cosine", "tracking=none"]
    run = prepare_run(compose_config(words))
    run.spec.folder.mkdir(parents=True, exist_ok=True)
    found = {"training.batch_size": 16, "optimizer.learning_rate": 0.0025}
    for key, value in found.items():
        trial = choose_trial(run.spec.plan)
        assert trial is not None
        assert trial.key == key
        search = make_search(run, trial)
        (search.spec.folder / trial.table).write_text("the figures")
        run = use_setting(run, search, SettingFound(key, value, "best", ""))
    assert search.spec.plan.optimizer.schedule == "constant"  # the test has a schedule of its own
    assert (run.spec.plan.optimizer.schedule, run.spec.plan.optimizer.learning_rate) == ("cosine", 0.0025)
    assert run.composed.raw["optimizer"]["learning_rate"] == 0.0025
    assert run.spec.tags["scaleflow.learning_rate"] == "auto: optimizer.learning_rate=0.0025, best"
    for table in (RateTest.table, BatchSearch.table):
        assert (run.spec.folder / table).read_text() == "the figures"
    assert choose_trial(run.spec.plan) is None


@pytest.mark.slow  # the test above has what the run takes
def test_a_run_finds_its_learning_rate_and_keeps_it(command: Command) -> None:
    words = ("model.units=32", "training.epochs=2", "optimizer.learning_rate=auto", "optimizer.schedule=linear")
    ended = command(*words, "hydra.run.dir=run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rate = OmegaConf.load(command.folder / "run" / "config.yaml").optimizer.learning_rate
    assert 1e-4 <= rate <= 3e-2
    assert f"use         optimizer.learning_rate={rate}\n" in ended.stdout
    folder = command.folder / "run-learning-rate"
    assert (command.folder / "run" / "learning_rates.csv").read_text() == (folder / "learning_rates.csv").read_text()
    resumed = [f"resume={command.folder / 'run'}", "training.epochs=3", "optimizer.learning_rate=auto"]
    assert prepare_run(compose_config(resumed)).spec.plan.optimizer.learning_rate == rate


def test_a_learning_rate_is_found(command: Command) -> None:
    ended = command.python("-m", "scaleflow", "find", LR, "model.units=32", "hydra.run.dir=found", "--steps", "100")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (word,) = re.findall(r"^use +optimizer\.learning_rate=(\S+)$", ended.stdout, re.M)
    assert 1e-4 <= float(word) <= 3e-2
    folder = command.folder / "found"
    record = json.loads((folder / "record.json").read_text())
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{command.folder}/mlflow.db")
    run = client.get_run(record["run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.tags["scaleflow.found"] == f"optimizer.learning_rate={word}"
    assert run.data.params["find"] == LR
    assert run.data.params["find.steps"] == "100"
    assert {each.path for each in client.list_artifacts(run.info.run_id, "plots")} == {
        "plots/learning_rates.csv",
        "plots/learning_rates.svg",
    }
    rows = list(csv.DictReader((folder / "learning_rates.csv").read_text().splitlines()))
    rates = [float(row["learning_rate"]) for row in rows]
    assert rates == pytest.approx([1e-6 * 1e7 ** (step / 99) for step in range(len(rates))])
    assert not (folder / "checkpoints").exists()
    assert not (folder / "model").exists()
    resumed = command("resume=found")
    assert resumed.returncode == 2
    assert "repeat its command" in resumed.stderr


@pytest.mark.slow  # test_trial_rules.py has the rules, and a test above what the run takes
def test_a_run_finds_its_batch_size_and_keeps_it(command: Command) -> None:
    words = ("dataset.limit=200", "model=linear", "training.epochs=1", "training.batch_size=auto")
    words += ("tracking.run_name='bs${training.batch_size}'",)
    ended = command(*words, "hydra.run.dir=run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run, search = command.folder / "run", command.folder / "run-batch-size"
    size = OmegaConf.load(run / "config.yaml").training.batch_size
    assert size in (8, 16)  # 180 examples to train on, and an epoch has at least eight steps
    assert f"use         training.batch_size={size}\n" in ended.stdout
    assert (run / "batch_sizes.csv").read_text() == (search / "batch_sizes.csv").read_text()
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{command.folder}/mlflow.db")
    searched, trained = (
        client.get_run(json.loads((folder / "record.json").read_text())["run_id"]) for folder in (search, run)
    )
    assert searched.data.params["training.batch_size"] == "auto"
    assert searched.data.params["find"] == BATCH_SIZE
    assert "resolved.batch_size" not in searched.data.params
    assert searched.data.tags["scaleflow.found"] == f"training.batch_size={size}"
    points = client.get_metric_history(searched.info.run_id, "find/examples_per_second")
    assert {point.step for point in points} == {8, 16}
    assert trained.data.params["training.batch_size"] == trained.data.params["resolved.batch_size"] == str(size)
    assert trained.info.run_name == f"bs{size}"
    assert trained.data.tags["scaleflow.batch_size"].startswith(f"auto: training.batch_size={size}, ")
    assert trained.data.tags["scaleflow.batch_size.run"] == searched.info.run_id
    assert "batch_sizes.csv" in [each.path for each in client.list_artifacts(trained.info.run_id)]
    resumed = [f"resume={run}", "training.epochs=2", "training.batch_size=auto"]
    assert prepare_run(compose_config(resumed)).spec.plan.training.batch_size == size
    for again in (command(*words, "hydra.run.dir=run"), command(*words, f"hydra.run.dir={'x' * 250}")):
        assert again.returncode == 2, again.stdout + again.stderr
        assert "hydra.run.dir=" in again.stderr
    evaluated = command.python("-m", "scaleflow", "evaluate", trained.info.run_id, "training.batch_size=auto")
    assert evaluated.returncode == 2
    assert "training.batch_size=auto: an evaluation needs a number" in evaluated.stderr
    assert sorted(path.name for path in command.folder.glob("run*")) == ["run", "run-batch-size"]
    assert not list(command.folder.glob("x*"))


def test_a_search_that_finds_nothing_starts_no_run(command: Command) -> None:
    ended = command(
        *("dataset.limit=200", "training.batch_size=auto", "optimizer=sgd", "optimizer.learning_rate=1e30"),
        "hydra.run.dir=run",
    )
    assert ended.returncode == 1
    assert "training.batch_size=auto: the search in run-batch-size ended as FAILED: " in ended.stderr
    assert "optimizer.learning_rate" in ended.stderr
    assert not (command.folder / "run").exists()


@pytest.mark.slow  # six commands, two of them with two workers
@pytest.mark.parametrize(
    "words",
    [
        ("strategy=mirrored", "hardware.logical_devices=2"),
        ("strategy=multi_worker", "cluster.workers=2"),
        ("strategy=pipeline", "hardware.logical_devices=2", "strategy.micro_batches=3"),
    ],
    ids=["mirrored", "multi_worker", "pipeline"],
)
def test_every_strategy_finds_both(words: tuple[str, ...], command: Command) -> None:
    words = (*words, "hardware=cpu", "hardware.intra_op_threads=1", "dataset.limit=300", "tracking=none")
    batch = "training.batch_size=24"
    rated = command.python(
        "-m", "scaleflow", "find", LR, *words, batch, "--steps", "20", "--low", "1e-4", "--high", "1"
    )
    assert rated.returncode == 0, rated.stdout + rated.stderr
    assert re.search(r"^use +optimizer\.learning_rate=\S+$", rated.stdout, re.M)
    sized = command.python("-m", "scaleflow", "find", BATCH_SIZE, *words)
    assert sized.returncode == 0, sized.stdout + sized.stderr
    (size,) = re.findall(r"^use +training\.batch_size=(\d+)$", sized.stdout, re.M)
    assert int(size) > 0
    if "strategy=pipeline" in words:
        assert int(size) % 3 == 0


@pytest.mark.slow  # a further search
def test_a_signal_during_the_search_ends_the_command(command: Command) -> None:
    search = RunFolder(command.folder / "run-batch-size")
    with command.start("training.batch_size=auto", "tracking=none", "hydra.run.dir=run") as process:
        wait_for(lambda: search.events.exists() and b"trying training.batch_size=16" in search.events.read_bytes())
        process.terminate()
        out, err = process.communicate(timeout=240)
    assert process.wait() == 143, out + err
    assert "training.batch_size=auto: the search in run-batch-size ended as stopped by SIGTERM" in err
    assert RunState.read(search.path).status == "KILLED"
    assert not (command.folder / "run").exists()
