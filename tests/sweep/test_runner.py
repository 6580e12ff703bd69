"""Sweeps of jobs that do not train: which of them run, in which folders, and what the report says."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

from scaleflow.cli import main
from scaleflow.cluster.gpus import CUDA_DEVICES, GROWTH, share
from scaleflow.config.compose import CommandWords, compose_sweep
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import EpochEnded, MetricsLogged, ModelExported, RunEnded, RunReady
from scaleflow.launcher.command_exit import Outcome
from scaleflow.launcher.executor import divide_machine
from scaleflow.launcher.prepare import PreparedRun
from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.launcher.recording import recovery
from scaleflow.runs import EventWriter, RunFolder
from scaleflow.runs.run_name import make_run_name
from scaleflow.runs.state import RunState
from scaleflow.sweep import plots, progress, runner
from scaleflow.sweep.composer import JobComposer, abbreviate_override
from scaleflow.sweep.ledger import Ledger, LedgerEntry, read_job_state
from scaleflow.sweep.ranking import choose_mode
from scaleflow.sweep.sweep_report import SweepReport, make_loading_row
from tests.event_log import events_in
from tests.launcher.test_supervisor import wait_for
from tests.sweep.fake_runs import Ended, FakeLaunch

DRAW_PLOTS = plots.draw_plots


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["scaleflow"])
    monkeypatch.setenv(SERVER_ENV, "no server is needed")
    monkeypatch.setattr(
        plots, "draw_plots", lambda *arguments: []
    )  # a fifth of the time of a sweep that trains nothing
    return tmp_path


def sweep(monkeypatch: pytest.MonkeyPatch, *words: str, statuses: Sequence[Ended] = (), **more: Any) -> FakeLaunch:
    """Sends a sweep without a store into the folder `s`; its exit code is the fake's `code`."""
    fake = FakeLaunch(statuses, **more)
    monkeypatch.setattr(runner, "launch_run", fake)
    fake.code = main(["-m", "tracking=none", "hydra.sweep.dir=s", *words])  # type: ignore[attr-defined]
    return fake


def statuses_in(folder: Path) -> list[str]:
    return [entry.status for entry in Ledger.load(RunFolder(folder / "s")).entries]


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["FINISHED", "FINISHED"], 0),
        (["FINISHED", "FAILED"], 1),
        (["REFUSED", "FINISHED"], 1),
        (["REFUSED", "REFUSED"], 2),
    ],
)
def test_the_exit_code_tells_of_the_jobs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, statuses: list[Ended], code: int
) -> None:
    fake = sweep(monkeypatch, "training.epochs=1,2", statuses=statuses)
    assert fake.code == code  # type: ignore[attr-defined]
    assert statuses_in(folder) == statuses
    assert [path.name for path in fake.folders] == ["0", "1"]
    entries = Ledger.load(RunFolder(folder / "s")).entries
    assert {entry.reason for entry in entries if entry.status == "REFUSED"} <= {"the test refuses it"}


def test_a_combination_that_cannot_exist_is_refused_by_its_number_and_the_others_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = sweep(monkeypatch, "model=mlp,linear", "model.units=8,16")
    assert fake.code == 1  # type: ignore[attr-defined]
    assert statuses_in(folder) == ["FINISHED", "FINISHED", "REFUSED", "REFUSED"]
    errors = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in errors] == [
        f"scaleflow: #{number} model.units: there is no such key" for number in (2, 3)
    ]
    assert "model.units is a key of model=cnn, dlrm, gpt, mlp" in errors[0]
    assert len(sweep(monkeypatch, "dataset=digits,csv").plans) == 1  # dataset.data_dir has no default
    assert "dataset.data_dir, dataset.target: have no default" in capsys.readouterr().err
    for words in (["model=mlp,linear", "model.unist=8,16"], ["model=linear", "model.units=8,16"]):
        assert sweep(monkeypatch, *words).code == 2  # type: ignore[attr-defined]
        assert "scaleflow: model.uni" in capsys.readouterr().err


RECIPES = {
    "searches": "defaults:\n  - override /hydra/sweeper: optuna5\n  - override /model: linear\n",
    "alone": "defaults:\n  - override /hydra/launcher: basic\n",
    "parallel": "hydra: {launcher: {n_jobs: 3}}\n",
    "away": "hydra: {sweep: {dir: away}}\n",
    "plain": "seed: 3\n",
}


@pytest.fixture
def recipes(folder: Path) -> list[str]:
    for name, text in RECIPES.items():
        path = folder / "conf" / "experiment" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# @package _global_\n{text}")
    return ["--config-dir", "conf"]


def test_a_recipe_chooses_hydras_own_groups(recipes: list[str]) -> None:
    for name, typed, sweeper, launcher in (
        ("searches", [], "optuna5.OptunaSweeper", "isolated.IsolatedLauncher"),
        ("searches", ["hydra/sweeper=grid"], "grid.GridSweeper", "isolated.IsolatedLauncher"),
        ("alone", [], "grid.GridSweeper", "basic_launcher.BasicLauncher"),
        ("plain", [], "grid.GridSweeper", "isolated.IsolatedLauncher"),
    ):
        _, config = compose_sweep(CommandWords([f"experiment={name}", "seed=1,2", *typed], ["conf"], is_sweep=True))
        assert str(config.hydra.sweeper._target_).endswith(sweeper)
        assert str(config.hydra.launcher._target_).endswith(launcher)


def test_a_swept_recipe_cannot_choose_how_the_sweep_runs(
    recipes: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = sweep(monkeypatch, *recipes, "experiment=searches,alone,parallel,away,plain")
    assert statuses_in(folder) == ["REFUSED"] * 3 + ["FINISHED"] * 2
    assert fake.folders == [folder / "s" / "3", folder / "s" / "4"]
    errors = capsys.readouterr().err
    assert "#0 hydra.sweeper: the recipe of this job sets other values than the sweep has; type them in the" in errors
    assert "#1 hydra.launcher: " in errors
    assert "#2 hydra.launcher: " in errors


def test_a_job_that_cannot_work_is_refused_and_the_others_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = sweep(monkeypatch, "training.epochs=1,-2,3")
    assert fake.code == 1  # type: ignore[attr-defined]
    assert [plan.training.epochs for plan in fake.plans] == [1, 3]
    assert statuses_in(folder) == ["FINISHED", "REFUSED", "FINISHED"]
    assert "scaleflow: #1 training.epochs=-2: expected" in capsys.readouterr().err


def test_a_sweep_of_which_nothing_can_run_is_refused_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = sweep(monkeypatch, "training.epochs=-1,-2")
    assert fake.code == 2  # type: ignore[attr-defined]
    assert fake.plans == []
    assert not (folder / "s").exists()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [("resume=outputs/a", "training.epochs=1,2"), ("resume=outputs/a,outputs/b",)])
def test_a_sweep_that_resumes_one_run_is_refused_with_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake = sweep(monkeypatch, *words)
    assert (fake.code, fake.plans) == (2, [])  # type: ignore[attr-defined]
    error = capsys.readouterr().err
    assert "resume=outputs/a: continues a single run, and this is a sweep" in error
    assert "remove -m" in error
    assert "hydra.sweep.dir=FOLDER" in error
    assert not (folder / "s").exists()


def test_sent_again_what_is_finished_is_skipped_and_the_rest_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sweep(monkeypatch, "training.epochs=1,2,3", statuses=["FINISHED", "FAILED", "KILLED"])
    assert first.code == 1  # type: ignore[attr-defined]
    again = sweep(monkeypatch, "training.epochs=4,3,2,1")
    assert again.code == 0  # type: ignore[attr-defined]
    assert [(path.name, number) for path, number in zip(again.folders, again.resume_numbers, strict=True)] == [
        ("3", 0),  # new, after the others
        ("2", 1),
        ("1", 1),
    ]
    assert statuses_in(folder) == ["FINISHED"] * 4
    third = sweep(monkeypatch, "training.epochs=1,2,3,4")
    assert third.code == 0  # type: ignore[attr-defined]
    assert third.plans == []


@pytest.mark.parametrize(
    ("status", "code", "batch"), [("FINISHED", 0, ()), ("FAILED", 1, ("hydra.sweeper.max_batch_size=1",))]
)
def test_a_value_that_is_given_twice_is_one_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch, status: Ended, code: int, batch: Sequence[str]
) -> None:
    returned: list[Any] = []
    launch = runner.SweepRunner.launch

    def spy(sweep: runner.SweepRunner, overrides: Any) -> Any:
        returned.extend(launch(sweep, overrides))
        return returned[-len(overrides) :]

    monkeypatch.setattr(runner.SweepRunner, "launch", spy)
    fake = sweep(monkeypatch, "seed=1,1", *batch, statuses=[status])
    assert fake.code == code  # type: ignore[attr-defined]
    assert len(fake.plans) == 1
    assert statuses_in(folder) == [status]
    value = 0.05 if status == "FINISHED" else nan
    assert [job.overrides[-1] for job in returned] == ["seed=1", "seed=1"]
    assert [job.return_value for job in returned] == pytest.approx([value] * 2, nan_ok=True)


class DiedError(Exception):
    """Stands for a kill."""


def test_sent_again_what_was_not_recorded_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, empty_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient

    def die(sweep: runner.SweepRunner) -> None:
        recorder = sweep._progress.parent.recorder
        assert recorder is not None
        wait_for(lambda: recorder.recorded > 0)
        recorder.stop()
        raise DiedError

    shutil.copy(empty_store, folder / "mlflow.db")
    words = ("-m", "tracking.uri=sqlite:///mlflow.db", "hydra.sweep.dir=s", "training.epochs=1,2")
    monkeypatch.setattr(runner, "launch_run", FakeLaunch())  # which records nothing
    with monkeypatch.context() as patch:
        patch.setattr(runner.SweepRunner, "_end_parent", die)
        with pytest.raises(DiedError):
            main(words)
    assert main(words) == 0
    client = MlflowClient("sqlite:///mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("scaleflow").experiment_id])
    assert [run.info.status for run in found] == ["FINISHED"] * 3
    (parent,) = [run for run in found if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in found if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert sorted(run.data.metrics["val/loss"] for run in children) == [0.5, 1.0]
    assert "report.csv" in {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert "not taken" not in capsys.readouterr().err


@pytest.mark.slow
def test_another_dimension_adds_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(monkeypatch, "training.epochs=1,2")
    again = sweep(monkeypatch, "training.epochs=1,2", "optimizer=adam,sgd", "optimizer.learning_rate=0.001")
    assert [plan.choices["optimizer"] for plan in again.plans] == ["sgd", "sgd"]


@pytest.mark.slow
def test_another_base_is_refused_with_what_differs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(monkeypatch, "training.epochs=1,2")
    again = sweep(monkeypatch, "training.epochs=1,2", "model.units=[7]")
    assert again.code == 2  # type: ignore[attr-defined]
    assert again.plans == []
    error = capsys.readouterr().err
    assert "started with another config: model.units=[7] (was [128, 128])" in error or "model.units=[7] (was" in error
    assert "sweep.on_change=new" in error
    assert len(error.splitlines()) == 2
    allowed = sweep(monkeypatch, "training.epochs=1,2", "model.units=[7]", "sweep.on_change=new")
    assert [path.name for path in allowed.folders] == ["2", "3"]


def test_how_a_sweep_is_kept_is_no_part_of_its_base(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(monkeypatch, "training.epochs=1,2")
    again = sweep(monkeypatch, "training.epochs=1,2", "checkpoint.keep=5", "sweep.metric=val/accuracy")
    assert (again.code, again.plans) == (0, [])  # type: ignore[attr-defined]


def test_the_choice_of_the_exported_model_makes_another_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("training.epochs=1", "checkpoint.export=last,best")
    first = sweep(monkeypatch, *words, "checkpoint.best={monitor: val/loss}")
    assert [plan.checkpoint.export for plan in first.plans] == ["last", "best"]
    assert sweep(monkeypatch, *words, "checkpoint.best={monitor: train/loss}").code == 2  # type: ignore[attr-defined]
    assert "checkpoint.best.monitor=train/loss (was val/loss)" in capsys.readouterr().err
    assert sweep(monkeypatch, *words, "checkpoint.best={monitor: val/loss}", "checkpoint.keep=3").plans == []


def test_a_job_that_is_stopped_before_it_begins_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(run: PreparedRun, *, stop: StopRequest, **others: object) -> Outcome:
        signal.raise_signal(signal.SIGINT)
        return Outcome(stop.exit_code, error="stopped by SIGINT")

    monkeypatch.setattr(runner, "launch_run", interrupt)
    assert main(("-m", "tracking=none", "hydra.sweep.dir=s", "training.epochs=1,2")) == 130
    entries = Ledger.load(RunFolder(folder / "s")).entries
    assert [(entry.status, entry.reason) for entry in entries] == [("KILLED", "stopped by SIGINT"), ("waiting", "")]
    assert [path.name for path in sweep(monkeypatch, "training.epochs=1,2").folders] == ["0", "1"]
    assert {(entry.status, entry.reason) for entry in Ledger.load(RunFolder(folder / "s")).entries} == {
        ("FINISHED", "")
    }


def test_a_time_limit_stops_a_sweep_which_the_same_command_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, timers = FakeLaunch(), list[threading.Timer]()

    class Timer(threading.Timer):
        def start(self) -> None:
            timers.append(self)

    def end_in_second(run: PreparedRun, *, stop: StopRequest, **others: Any) -> Outcome:
        if run.spec.folder.name == "1":
            timers[0].function()
        fake(run, stop=stop, **others)
        return Outcome(stop.exit_code if stop.is_set() else 0)

    monkeypatch.setattr(runner, "launch_run", end_in_second)
    monkeypatch.setattr(threading, "Timer", Timer)
    words = ("-m", "tracking=none", "hydra.sweep.dir=s", "training.epochs=1,2,3")
    assert main((*words, "sweep.max_seconds=10m")) == 143
    assert 0 < timers[0].interval < 600
    assert statuses_in(folder) == ["FINISHED", "KILLED", "waiting"]
    shown = capsys.readouterr().out
    assert "ended   sweep.max_seconds=10m: 1 stopped, 1 not begun" in shown
    assert "go on   the same command with hydra.sweep.dir=s" in shown
    assert "best    #0" in shown
    again = sweep(monkeypatch, "training.epochs=1,2,3", "sweep.max_seconds=1h")
    assert [path.name for path in again.folders] == ["1", "2"]
    assert again.resume_numbers == [1, 0]
    assert statuses_in(folder) == ["FINISHED"] * 3
    assert again.code == 0  # type: ignore[attr-defined]


def test_two_commands_do_not_share_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "s").mkdir()
    with RunFolder(folder / "s").lock_sweep():
        assert sweep(monkeypatch, "training.epochs=1,2").code == 2  # type: ignore[attr-defined]
    assert "another command runs the sweep in this folder" in capsys.readouterr().err


def test_a_sweeps_folder_is_free_when_the_command_is_through(tmp_path: Path) -> None:
    first = RunFolder(tmp_path).lock_sweep()  # the garbage collector does not see it before the end of this test
    with first:
        pass
    with RunFolder(tmp_path).lock_sweep():
        pass


def test_several_jobs_at_a_time_share_the_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = sweep(monkeypatch, "training.epochs=1,2,3", "hydra.launcher.n_jobs=2")
    assert fake.code == 0  # type: ignore[attr-defined]
    assert {run.spec.environment["TF_NUM_INTRAOP_THREADS"] for run in fake.runs} == {
        divide_machine(2)[0]["TF_NUM_INTRAOP_THREADS"]
    }
    assert statuses_in(folder) == ["FINISHED"] * 3


@pytest.mark.parametrize("words", [("hydra.launcher.n_jobs=0",), ("hydra.launcher.n_jobs=2", "debug=inline")])
def test_a_number_of_jobs_that_makes_no_sense_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(monkeypatch, "training.epochs=1,2", *words).code == 2  # type: ignore[attr-defined]
    assert "hydra.launcher.n_jobs=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "count", "shares"),
    [("01", 2, ["0", "1"]), ("0123", 2, ["01", "23"]), ("0", 2, ["0", "0"]), ("012", 2, ["0", "1"])],
)
def test_gpus_are_divided_among_jobs(gpus: str, count: int, shares: list[str]) -> None:
    assert ["".join(share(list(gpus), slot, count)) for slot in range(count)] == shares


@pytest.mark.parametrize(("gpus", "growth"), [("0", "true"), ("0,1", None)])
def test_jobs_that_share_a_gpu_take_its_memory_as_they_need_it(
    monkeypatch: pytest.MonkeyPatch, gpus: str, growth: str | None
) -> None:
    monkeypatch.setenv(CUDA_DEVICES, gpus)
    environments = divide_machine(2)
    assert [each[CUDA_DEVICES] for each in environments] == [gpus[0], gpus[-1]]
    assert [each.get(GROWTH) for each in environments] == [growth, growth]


def test_the_report_compares_the_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(plan: Any) -> dict[str, float]:
        return {"test/loss": 1 / plan.training.epochs, "perf/examples_per_second": 100.0 * plan.training.epochs}

    monkeypatch.setattr(plots, "draw_plots", DRAW_PLOTS)
    sweep(monkeypatch, "training.epochs=1,2", statuses=["FINISHED", "FAILED"], measured=measured)
    table = json.loads((folder / "s" / "report.json").read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["training/epochs"] for row in rows] == ["1", "2"]
    assert [row["examples/s"] for row in rows] == [100.0, 200.0]
    assert [row["test/loss"] for row in rows] == [1.0, 0.5]
    assert [row["status"] for row in rows] == ["FINISHED", "FAILED"]
    assert rows[1]["reason"] == "the test lets it fail"
    assert (folder / "s" / "report.csv").read_text().count("\n") == 3
    assert "| 1 | 2 |" in (folder / "s" / "report.md").read_text()
    assert (folder / "s" / "throughput.svg").read_text().startswith("<svg ")
    assert (folder / "s" / "over-training.epochs.svg").exists()


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (["model.units=8,[8,4]", "strategy=mirrored"], ["units=8", "units=[8,4]"]),
        (["precision=float32,mixed", "optimizer=sgd"], ["float32", "mixed"]),
        (["optimizer=sgd,adam", "training.epochs=2"], ["optimizer=sgd", "optimizer=adam"]),
    ],
)
def test_a_job_is_named_by_what_varies(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], labels: list[str]
) -> None:
    assert [run.spec.label for run in sweep(monkeypatch, *words).runs] == labels


def test_a_run_is_named_by_what_varies_before_the_rest(plan: Callable[..., Plan]) -> None:
    resolved = {"strategy": "mirrored", "precision": "float32"}
    nameless = replace(plan(), choices={"dataset": "digits", "model": "mlp"})
    assert make_run_name(nameless, resolved, "") == "digits-mlp-mirrored-float32"
    assert make_run_name(nameless, resolved, "mirrored units=8") == "mirrored units=8 digits-mlp-float32"
    named = plan("tracking.run_name=mine")
    assert [make_run_name(named, resolved, label) for label in ("", "units=8")] == ["mine", "mine units=8"]
    assert abbreviate_override("model.units=8", {"units": 2}) == "model.units=8"


REPEATED = ("training.epochs=1,2", "sweep.repeat=3", "sweep.warm_up=1")


def rates_in_order(*rates: float) -> Any:
    """Measures one of these rates for each job, in the order of the jobs."""
    left = iter(rates)
    return lambda plan: {"test/loss": 1.0, "perf/examples_per_second": next(left)}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    table = json.loads((folder / "s" / "report.json").read_text())
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


@pytest.mark.slow
def test_repeats_alternate_and_the_report_has_their_medians(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = rates_in_order(1, 1, 20, 50, 10, 70, 40, 60)
    fake = sweep(monkeypatch, *REPEATED, measured=measured)
    assert [plan.training.epochs for plan in fake.plans] == [1, 2] * 4
    assert [path.name for path in fake.folders] == [*"01234567"]
    assert [run.spec.label for run in fake.runs] == [
        f"epochs={epochs} {turn}" for turn in ("warm-up", "repeat 1", "repeat 2", "repeat 3") for epochs in (1, 2)
    ]
    rows = rows_of(folder)
    assert [(row["job"], row["counted"]) for row in rows] == [("0 2 4 6", 3), ("1 3 5 7", 3)]
    assert [(row["examples/s"], row["least"], row["most"]) for row in rows] == [(20, 10, 40), (60, 50, 70)]
    assert [row["status"] for row in rows] == ["FINISHED"] * 2
    assert "#0 training.epochs=1 (warm-up)" in capsys.readouterr().out


@pytest.mark.slow
def test_repeats_are_jobs_of_their_own_when_the_sweep_is_sent_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sweep(monkeypatch, "training.epochs=1,2", "sweep.repeat=2", statuses=["FINISHED", "FINISHED", "FAILED"])
    assert first.code == 1  # type: ignore[attr-defined]
    assert [row["status"] for row in rows_of(folder)] == ["FINISHED", "1 FINISHED, 1 FAILED"]
    again = sweep(monkeypatch, "training.epochs=1,2", "sweep.repeat=3")
    assert again.code == 0  # type: ignore[attr-defined]
    assert [(path.name, number) for path, number in zip(again.folders, again.resume_numbers, strict=True)] == [
        ("2", 1),
        ("4", 0),
        ("5", 0),
    ]
    assert [row["job"] for row in rows_of(folder)] == ["1 3 5", "0 2 4"]


def test_a_sweeper_is_told_the_median_of_repeats(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[Any] = []
    ran = runner.SweepRunner.launch
    monkeypatch.setattr(runner.SweepRunner, "launch", lambda *args: returned.extend(ran(*args)) or returned)
    losses = iter([3.0, 9.0, 1.0, 9.0, 2.0, 9.0])
    ends: list[Ended] = ["FINISHED", "FAILED"]
    words = ("training.epochs=1,2", "sweep.repeat=3")
    sweep(monkeypatch, *words, statuses=ends, measured=lambda plan: {"val/loss": next(losses)})
    assert [job.return_value for job in returned] == [2.0, pytest.approx(float("nan"), nan_ok=True)]


def test_each_job_trains_on_all_folds_and_the_means_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([1.0, 2.0, 2.0, 2.1, 6.0, 2.2])
    words = ("training.epochs=1,2", "sweep.folds=3")
    fake = sweep(monkeypatch, *words, measured=lambda plan: {"val/loss": next(losses)})
    assert [(plan.training.epochs, plan.dataset.fold) for plan in fake.plans] == [
        (epochs, f"{fold}/3") for fold in (1, 2, 3) for epochs in (1, 2)
    ]
    assert [run.spec.label for run in fake.runs][:3] == ["epochs=1 fold 1", "epochs=2 fold 1", "epochs=1 fold 2"]
    rows = [(row["job"], row["val/loss"], row["deviation"]) for row in rows_of(folder)]
    assert rows == [("1 3 5", 2.1, 0.1), ("0 2 4", 3.0, 2.6458)]
    assert "training.epochs=2, val/loss 2.1 (deviation 0.1 over 3 folds)" in capsys.readouterr().out
    assert sweep(monkeypatch, *words).plans == [], "sent again, nothing is missing"


@pytest.mark.parametrize("word", ["sweep.folds=1", "sweep.folds=many"])
def test_folds_that_make_no_sense_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(monkeypatch, "training.epochs=1,2", word).code == 2  # type: ignore[attr-defined]
    assert f"{word}: expected" in capsys.readouterr().err
    assert sweep(monkeypatch, "training.epochs=1,2", "sweep.folds=3", "sweep.repeat=2").code == 2  # type: ignore[attr-defined]
    assert "a job trains once for each fold" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["sweep.repeat=0", "sweep.repeat=many", "sweep.warm_up=-1", "sweep=5"])
def test_repeats_that_make_no_sense_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(monkeypatch, "training.epochs=1,2", word).code == 2  # type: ignore[attr-defined]
    assert f"{word}: expected" in capsys.readouterr().err
    assert not (folder / "s").exists()


@pytest.mark.parametrize("word", ["sweep.repeat=2", "sweep.folds=5", "sweep.same_losses=true"])
def test_one_run_is_not_repeated(folder: Path, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tracking=none", word]) == 2
    assert f"{word}: applies only to the jobs of a sweep" in capsys.readouterr().err


def losing(*losses: float) -> Any:
    left = iter(losses)
    return lambda plan: {"train/loss": next(left)}


STRATEGIES = ("strategy=one_device,mirrored", "hardware.logical_devices=2", "sweep.same_losses=true")


@pytest.mark.slow
def test_first_losses_that_differ_are_named_and_stay_wrong_when_the_sweep_is_sent_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "#1 strategy=mirrored has a loss of 2.1 at step 1, which differs by more than 0.001 from the 2 of #0 "
        "strategy=one_device"
    )
    for _ in range(2):
        fake = sweep(monkeypatch, *STRATEGIES, measured=losing(2.0, 2.1))
        assert fake.code == 1  # type: ignore[attr-defined]
        output = capsys.readouterr()
        assert f"the first losses differ: {line}" in output.err
        assert "DIFFER" in output.out
    assert f"THE FIRST LOSSES DIFFER: {line}" in (folder / "s" / "report.md").read_text()
    end = events_in(folder / "s" / "events.jsonl")[-1]
    assert (end["status"], end["error"]) == ("FAILED", f"the first losses differ: {line}")


@pytest.mark.slow
def test_losses_are_not_compared_where_nothing_does_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = sweep(monkeypatch, "training.epochs=1,2", "sweep.same_losses=true", measured=losing(2.0, 3.0))
    assert fake.code == 0  # type: ignore[attr-defined]
    assert [row["first losses"] for row in rows_of(folder)] == ["not compared"] * 2


def test_efficiency_is_blank_with_its_reason_where_no_job_has_one_replica(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(monkeypatch, "training.epochs=1,2", "strategy=mirrored", "hardware.logical_devices=2")
    assert "efficiency: no finished job of the sweep has one replica" in capsys.readouterr().out
    assert "blank: no finished job" in (folder / "s" / "report.md").read_text()


def test_there_is_no_efficiency_where_all_jobs_have_one_replica(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(monkeypatch, "training.epochs=1,2", measured=lambda plan: {"perf/examples_per_second": 9.0})
    assert "efficiency" not in (folder / "s" / "report.md").read_text()


#: By the number of epochs.
QUALITY = {
    1: {"val/loss": 3.0, "val/accuracy": 0.7, "test/loss": 168401787944.96, "test/accuracy": 0.5, "test/rmse": 7.0},
    2: {"val/loss": 1.0, "val/accuracy": 0.8, "test/loss": 2.0, "test/accuracy": 0.6},
    3: {"val/loss": 2.0, "val/accuracy": 0.9, "test/loss": 0.001234, "test/accuracy": 0.7},
    4: {"val/loss": nan, "val/accuracy": nan},
    5: {"val/loss": 0.5, "val/accuracy": 1.0},
}


#: What is typed, the epochs of the jobs from the best to the last, and the last line.
RANKINGS = {
    (): ([2, 3, 1, 4, 5], "#1 training.epochs=2, val/loss 1"),
    ("sweep.metric=val/accuracy",): ([3, 2, 1, 4, 5], "#2 training.epochs=3, val/accuracy 0.9"),
    ("sweep.mode=max",): ([1, 3, 2, 4, 5], "#0 training.epochs=1, val/loss 3"),
}


def test_the_best_job_is_first_and_named_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(plan: Plan) -> dict[str, float]:
        return QUALITY[plan.training.epochs or 0]

    ends: list[Ended] = ["FINISHED"] * 4  # NaN is not ranked, and neither is what failed
    for words, (order, best) in RANKINGS.items():
        sweep(monkeypatch, "training.epochs=1,2,3,4,5", *words, statuses=[*ends, "FAILED"], measured=measured)
        ends = []  # they are skipped when the sweep is sent again
        rows = rows_of(folder)
        assert [row["training/epochs"] for row in rows] == [str(epochs) for epochs in order]
        assert [row["best"] for row in rows] == ["*", "", "", "", ""]
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(maxsplit=1) for line in lines[-2:]] == [["best", best], ["folder", f"s/{best[1]}"]]
    (head,) = [line.split() for line in lines if line.startswith("best  job")]
    assert {"val/loss", "val/accuracy", "test/loss", "test/accuracy"} <= set(head)
    assert "test/rmse" not in head
    assert "test/rmse" in rows[0]
    text = "\n".join(lines)
    assert "1.68e+11" in text
    assert "168401787944" not in text


def test_a_model_that_no_store_has_is_loaded_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    uri, model = "models:/m-1", tmp_path / "s" / "1" / "model"
    (model / "saved_model").mkdir(parents=True)
    assert make_loading_row(None, None, model.parent)[1] == 'tf.saved_model.load("s/1/model/saved_model")'
    (model / "model.keras").touch()
    assert make_loading_row(uri, None, model.parent)[1] == 'keras.models.load_model("s/1/model/model.keras")'
    plain = 'mlflow.pyfunc.load_model("models:/m-1")'
    assert make_loading_row(uri, f"sqlite:///{tmp_path}/mlflow.db", model.parent)[1] == plain
    there = f'mlflow.set_tracking_uri("http://host:5000"); {plain}'
    assert make_loading_row(uri, "http://****@host:5000", model.parent)[1] == there
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:sesame@host:5000")
    assert make_loading_row(uri, "http://****@host:5000", model.parent)[1] == plain


def test_without_a_direction_no_job_is_the_best(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(monkeypatch, "training.epochs=1,2", "sweep.metric=val/mine", measured=lambda plan: {"val/mine": 1.0})
    why = (
        "no best job: scaleflow does not know whether larger values of sweep.metric=val/mine are better; set "
        "sweep.mode=max"
    )
    assert why in capsys.readouterr().out


@pytest.mark.slow
def test_without_the_metric_no_job_is_the_best(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"train/loss": 1.0, "test/loss": 2.0, "test/accuracy": 0.5}
    sweep(monkeypatch, "training.epochs=1,2", measured=lambda plan: measured)
    why = "no best job: no finished job has sweep.metric=val/loss; the metrics are test/loss, test/accuracy"
    lines = capsys.readouterr().out.splitlines()
    assert why in lines
    assert not any(line.startswith("best") for line in lines)
    assert why in (folder / "s" / "report.md").read_text()
    assert [row["job"] for row in rows_of(folder)] == [0, 1]


@pytest.mark.parametrize(
    ("metric", "typed", "direction", "mode"),
    [
        *(("val/loss", "auto", None, "min"), ("val/accuracy", "auto", None, "max")),
        *(("perf/examples_per_second", "auto", None, "max"), ("perf/step_ms", "auto", None, "min")),
        *(("val/top3", "auto", None, "max"), ("val/wave/mape", "auto", None, "min")),  # the run knows them
        *(("val/mine", "auto", None, None), ("val/mine", "max", None, "max"), ("val/accuracy", "min", None, "min")),
        *(("val/mine", "auto", "minimize", "min"), ("val/loss", "auto", "Direction.maximize", "max")),
        ("val/loss", "min", "maximize", "min"),
        *(("val/cohen_kappa_score", "auto", None, "max"), ("val/matthews_corrcoef", "auto", None, "max")),
        *(("val/log_loss", "auto", None, "min"), ("val/max_error", "auto", None, "min")),  # as scikit-learn names them
        *(("val/f1_at_threshold", "auto", None, "max"), ("val/neg_log_loss", "auto", None, "max")),
        *(("test/cost_at_threshold", "auto", None, "min"), ("test/top3_low", "auto", None, "max")),
    ],
)
def test_which_values_are_better(metric: str, typed: str, direction: str | None, mode: str | None) -> None:
    run = RunState(RunReady("run", modes={"loss": "min", "top3": "max", "wave/mape": "min"}))
    assert choose_mode(metric, typed, direction, [RunState(), run]) == mode


@pytest.mark.slow
def test_of_repeats_the_best_run_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([0.0, 0.0, 3.0, 4.0, 9.0, 5.0, 1.0, 6.0])
    sweep(monkeypatch, *REPEATED, measured=lambda plan: {"val/loss": next(losses)})
    assert [(row["job"], row["val/loss"]) for row in rows_of(folder)] == [("0 2 4 6", 3.0), ("1 3 5 7", 5.0)]
    best, where = (line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[-2:])
    assert (best, where) == (["best", "#6 training.epochs=1, val/loss 1"], ["folder", "s/6"])


def test_a_sweep_leaves_no_password_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "launch_run", FakeLaunch(["REFUSED", "REFUSED"]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        uri = f"http://me:sesame@127.0.0.1:{listener.getsockname()[1]}"
        main(["-m", f"tracking.uri='{uri}'", "training.epochs=1,2", "tracking.tags={token: sesame}"])
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if "sesame" in path.read_text()] == []
    assert any(path.name == "sweep.json" for path in files)


@pytest.mark.slow
def test_a_warm_up_that_fails_does_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[Any] = []
    ran = runner.SweepRunner.launch
    monkeypatch.setattr(runner.SweepRunner, "launch", lambda *args: returned.extend(ran(*args)) or returned)
    losses = iter([9.0, 3.0, 1.0])
    ends: list[Ended] = ["FAILED"]
    words = ("training.epochs=1", "sweep.repeat=2", "sweep.warm_up=1")
    sweep(monkeypatch, *words, statuses=ends, measured=lambda plan: {"val/loss": next(losses)})
    assert [job.return_value for job in returned] == [2.0]


def test_recognised_jobs_are_neither_prepared_nor_looked_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(monkeypatch, "training.epochs=range(1,16)")
    for number in range(15):
        RunFolder(folder / "s" / str(number)).write_record({"run_id": None})
    calls: list[str] = []

    def count(owner: Any, name: str) -> None:
        called = getattr(owner, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return called(*args, **kwargs)

        monkeypatch.setattr(owner, name, spy)

    capsys.readouterr()
    count(JobComposer, "prepare")
    count(recovery, "repair")
    count(progress, "read_job_state")
    again = sweep(monkeypatch, "training.epochs=range(1,17)")
    assert [plan.training.epochs for plan in again.plans] == [16]
    assert calls.count("prepare") == 2  # the new job: when it is checked, and when it runs
    assert "repair" not in calls
    assert calls.count("read_job_state") <= 17  # each job once, and the new one also while it ran
    output = capsys.readouterr().out
    assert output.count("is already FINISHED") == 10
    assert "5 more are already FINISHED" in output


def test_a_job_whose_folder_is_gone_runs_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(monkeypatch, "training.epochs=1,2")
    shutil.rmtree(folder / "s" / "1")
    assert [plan.training.epochs for plan in sweep(monkeypatch, "training.epochs=1,2").plans] == [2]


def test_the_report_is_not_written_anew_after_each_of_many_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[int] = []
    update = runner.ParentRun.update

    def spy(parent: runner.ParentRun, report: Any) -> None:
        updates.append(sum(row["status"] == "FINISHED" for row in report.rows))
        update(parent, report)

    monkeypatch.setattr(runner.ParentRun, "update", spy)
    monkeypatch.setattr(progress, "REPORT_SHARE", 1e-9)
    sweep(monkeypatch, "training.epochs=1,2,3,4,5")
    assert updates == [1, 5]


def test_a_job_that_cannot_be_prepared_any_more_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, calls = JobComposer.prepare, iter(range(9))

    def fail_at_fourth(*args: Any) -> Any:
        if next(calls) == 3:
            raise ConfigError("the port is in use now")
        return prepare(*args)

    monkeypatch.setattr(JobComposer, "prepare", fail_at_fourth)
    fake = sweep(monkeypatch, "training.epochs=1,2")
    assert fake.code == 1  # type: ignore[attr-defined]
    entries = Ledger.load(RunFolder(folder / "s")).entries
    assert [(entry.status, entry.reason) for entry in entries] == [
        ("FINISHED", ""),
        ("REFUSED", "the port is in use now"),
    ]


def test_memory_of_a_sweep_does_not_grow_with_a_jobs_run(tmp_path: Path) -> None:
    write = EventWriter(RunFolder(tmp_path).events)
    write(RunReady("run", params={"seed": "1"}))
    for step in range(1, 5001):
        write(MetricsLogged(step, {"train/loss": 1 / step, "train/accuracy": 0.5}))
        if step % 500 == 0:
            write(EpochEnded(step // 500, 10, step, {}))
            write(MetricsLogged(step, {"perf/examples_per_second": float(step)}))
    write(RunEnded("FINISHED"))
    write.close()
    kept, whole = read_job_state(tmp_path), RunState.read(tmp_path, has_points=True)
    assert kept.metrics == whole.metrics
    assert (kept.rate, kept.results, kept.status) == (whole.rate, whole.results, "FINISHED")
    assert kept.curves.keys() == {"train/loss", "perf/examples_per_second"}
    points = kept.curves["train/loss"]
    assert points[:500] == whole.curves["train/loss"][:500]  # the first epoch, for the comparison of losses
    assert len(points) < 500 + 400
    assert {*points} <= {*whole.curves["train/loss"]}
    assert points[-1][0] > 4900


def write_run(folder: Path, losses: Sequence[float], model_step: int) -> RunState:
    """Writes a run with the validation loss after each ten steps, and the step of the exported model; reads it."""
    folder.mkdir()
    write = EventWriter(RunFolder(folder).events)
    write(RunReady("run"))
    for step, loss in enumerate(losses, 1):
        write(MetricsLogged(10 * step, {"train/loss": loss / 2, "perf/examples_per_second": float(step)}))
        write(MetricsLogged(10 * step, {"val/loss": loss}))
    write(MetricsLogged(model_step, {"test/loss": losses[model_step // 10 - 1] + 0.01}))
    write(ModelExported("model", model_step))
    write(RunEnded("FINISHED"))
    write.close()
    return read_job_state(folder)


def test_jobs_are_ranked_by_the_model_that_is_exported(tmp_path: Path) -> None:
    runs = {"best": ([0.9, 0.1, 0.8], 20), "last": ([0.9, 0.6, 0.5], 30)}
    histories = [write_run(tmp_path / name, *run) for name, run in runs.items()]
    assert histories[0].metrics == {
        "train/loss": 0.05,
        "val/loss": 0.1,
        "test/loss": 0.11,
        "perf/examples_per_second": 3.0,
    }
    entries = [LedgerEntry(n, str(n), [f"seed={n}"], str(n), "FINISHED") for n in range(2)]
    report = SweepReport(list(zip(entries, histories, strict=True)), ["seed"])
    assert [(row["job"], row["val/loss"], row["test/loss"]) for row in report.rows] == [(0, 0.1, 0.11), (1, 0.5, 0.51)]
    assert report.describe_best() == "#0 seed=0, val/loss 0.1"
