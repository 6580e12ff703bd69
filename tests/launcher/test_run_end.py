"""The last lines of a run."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaleflow.config.compose import CommandWords
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import CheckpointSaved, MetricsLogged, RunEnded, RunReady
from scaleflow.interfaces.features import Feature
from scaleflow.launcher import run_end
from scaleflow.launcher.launch import describe_longer
from scaleflow.launcher.run_end import describe_continuation, describe_results, describe_wait, run_end_tasks
from scaleflow.runs import EventWriter, RunSpec, RunState
from scaleflow.runs.run_name import label_overrides, make_run_name, name_sweep
from scaleflow.worker.tasks import TrainModel

BASELINE = MetricsLogged(0, {"baseline/loss": 2.3, "baseline/accuracy": 0.12, "baseline/test/accuracy": 0.101})


@pytest.fixture
def spec(tmp_path: Path, plan: Any) -> RunSpec:
    made: Plan = plan("tracking=none")
    return RunSpec(made, tmp_path, 0.0, TrainModel())


def state_of(*events: Any) -> RunState:
    state = RunState()
    for event in (RunReady("a-run"), *events):
        state.apply(event)
    return state


def test_the_baseline_stands_beside_the_result(spec: RunSpec) -> None:
    rows = describe_results(
        spec, state_of(BASELINE, MetricsLogged(9, {"test/loss": 168401787944.96, "test/accuracy": 0.95}))
    )
    assert rows == [
        ("test loss", "1.68e+11"),
        ("test accuracy", "0.95 (baseline 0.101: always the most frequent class)"),
    ]


def test_without_a_test_split_the_result_is_that_of_validation(spec: RunSpec) -> None:
    rows = describe_results(spec, state_of(BASELINE, MetricsLogged(9, {"val/loss": 0.5, "val/auc": 0.7})))
    assert rows == [("val loss", "0.5 (baseline 2.3)"), ("val auc", "0.7")]


def test_a_resumed_run_has_its_baseline_from_the_command_that_began_it(spec: RunSpec, plan: Any) -> None:
    write = EventWriter(spec.events)
    write(RunReady("a-run"))
    write(BASELINE)
    write.close()
    resumed = RunSpec(plan("tracking=none", f"resume={spec.folder}"), spec.folder, 0.0, TrainModel())
    rows = describe_results(resumed, state_of(MetricsLogged(9, {"test/accuracy": 0.95})))
    assert rows == [("test accuracy", "0.95 (baseline 0.101: always the most frequent class)")]


def test_a_resumed_run_that_repeats_no_value_of_the_test_has_those_of_before(spec: RunSpec, plan: Any) -> None:
    resumed = RunSpec(plan("tracking=none", f"resume={spec.folder}"), spec.folder, 0.0, TrainModel())
    events = (RunReady("a-run"), MetricsLogged(9, {"test/loss": 0.5}), RunEnded("FINISHED"))
    write = EventWriter(spec.events)
    for event in events:
        write(event)
    write.close()
    longer = MetricsLogged(12, {"val/loss": 0.4})
    assert describe_results(resumed, state_of(longer, RunEnded("FINISHED"))) == [("test loss", "0.5")]
    assert describe_results(resumed, state_of(longer, RunEnded("KILLED"))) == [("val loss", "0.4")]


def test_a_run_that_early_stopping_ended_is_not_made_longer_by_more_epochs(tmp_path: Path, plan: Any) -> None:
    write = EventWriter(RunSpec(plan("tracking=none"), tmp_path, 0.0, TrainModel()).events)
    for event in (RunReady("a-run", epochs=20, steps=820), MetricsLogged(41, {"val/loss": 0.5}), RunEnded("FINISHED")):
        write(event)
    stops = RunSpec(
        plan("tracking=none", "training.early_stopping={monitor: val/loss, patience: 3}"), tmp_path, 0.0, TrainModel()
    )
    assert "it ended at step 41 of 820; a longer run keeps training.early_stopping" in describe_longer(stops)
    assert describe_longer(stops).endswith(f" {os.path.relpath(tmp_path)} training.early_stopping=null")
    goes_on = RunSpec(plan("tracking=none"), tmp_path, 0.0, TrainModel())
    assert describe_longer(goes_on) == "to train longer, add training.epochs=N, more than 20"
    write(MetricsLogged(820, {"val/loss": 0.5}))
    write.close()
    assert describe_longer(stops) == describe_longer(goes_on)


def test_a_job_of_a_sweep_leaves_the_baseline_to_the_report(spec: RunSpec) -> None:
    job = RunSpec(spec.plan, spec.folder, 0.0, TrainModel(), parent="/sweep")
    assert describe_results(job, state_of(BASELINE, MetricsLogged(9, {"test/accuracy": 0.95}))) == [
        ("test accuracy", "0.95")
    ]


@pytest.mark.parametrize(
    "folder",
    ["outputs/2026-11-22/13-59-59-745934", "my runs/a (1)", "it's,=&$x", "~a/{b}", "ü/#1", "../x", "a 'b"],
)
def test_the_command_that_continues_a_run_can_be_pasted(folder: str) -> None:
    state = state_of(CheckpointSaved(2990, "step-2990"), RunEnded("KILLED", "SIGTERM"))
    (_, step), (label, line) = describe_continuation(state, folder)
    assert (step, label) == ("of step 2990", "go on")
    *command, word = shlex.split(line)
    assert command == ["python", "-m", "scaleflow"]
    (override,) = CommandWords([word]).parsed
    assert (override.key_or_group, override.value()) == ("resume", folder)
    state.apply(RunEnded("FINISHED"))
    assert describe_continuation(state, folder) == []


@pytest.mark.parametrize(
    ("words", "label"),
    [
        ([], ""),
        (["model=cnn", "training.epochs=3", "dataset.seed=1", "~model.dropout"], ""),
        (["model.units=8", "optimizer=sgd", "optimizer.learning_rate=0.1"], "units=8 optimizer=sgd learning_rate=0.1"),
        (["model.units=[8,4]", "model.units=16"], "units=16"),
        (["+model.width=8", "+optimizer.width=2"], "model.width=8 optimizer.width=2"),
        (["+model.hub_token=planted", "model.a=2"], "a=2"),
        (["model.init_from=/a/path/that/is/much/longer/than/a/name"], "init_from=/a/path/that/is/much/lon..."),
    ],
)
def test_a_single_run_is_named_by_the_typed_keys_of_its_model_and_optimizer(words: list[str], label: str) -> None:
    assert label_overrides(words, {}) == label


def test_a_name_has_the_values_of_interpolations() -> None:
    words = ["model.units=${oc.decode:${oc.env:UNITS}}", "+model.depth=${other}", "optimizer.learning_rate=0.1"]
    config = {"model": {"units": 17}}
    assert label_overrides(words, config) == "units=17 depth=${other} learning_rate=0.1"


def test_the_parent_of_a_sweep_has_no_value_of_a_single_job_in_its_name() -> None:
    config = {"seed": 4, "model": {"units": 17, "name": "mlp"}}
    assert name_sweep("exp-s${seed}-${model.units}", ["seed"], config) == "exp-s*-17"
    assert name_sweep("exp-${model.name}", ["model"], config) == "exp-*"
    assert name_sweep("exp-${oc.decode:${seed}}", ["seed"], config) == "sweep of seed"
    assert name_sweep(None, [], config) == "sweep of one job"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["dataset.data_dir=in/churn.csv", "dataset.target=churned"], "churn.csv-churned"),
        (["dataset.data_dir=s3://bucket/a/churn.parquet", "dataset.target=[low,high]"], "churn.parquet-low+high"),
        (["dataset.data_dir=in/", "dataset.target=a_name_with_more_letters_than_most"], "in-a_name_with_more_letters"),
        (["dataset.data_dir=/run/data-1234567890ab.feather", "dataset.target=churned"], "table-churned"),
        (["dataset=image_folder", "dataset.data_dir=photos/", "model=cnn"], "photos"),
        (["dataset=digits", "model=mlp"], "digits"),
    ],
)
def test_a_run_is_named_by_its_data(plan: Any, words: list[str], name: str) -> None:
    typed = dict(word.split("=", 1) for word in ("dataset=table", "model=tabular", *words))
    chosen = {group: typed[group] for group in ("dataset", "model")}
    made = replace(plan(*(f"{key}={value}" for key, value in typed.items())), choices=chosen)
    resolved = {"strategy": "one_device", "precision": "float32"}
    assert make_run_name(made, resolved, "") == f"{name}-{chosen['model']}-one_device-float32"


def test_the_last_lines_say_how_long_the_store_was_waited_for() -> None:
    assert describe_wait(60.02, 60, is_interrupted=False) == " within tracking.flush_seconds=60"
    assert describe_wait(14.0, 60, is_interrupted=True) == " in 14 s, when a signal ended the wait"
    assert describe_wait(0.1, 60, is_interrupted=False) == ""


class SayRecorded:
    """An end task that says whether the run is recorded."""

    def run(self, monitor: Any, is_recorded: bool) -> list[tuple[str, str]]:
        return [("recorded", str(is_recorded))]


class Fail:
    """An end task that fails."""

    def run(self, monitor: Any, is_recorded: bool) -> list[tuple[str, str]]:
        raise OSError("the disk is full")


def test_the_end_tasks_of_features_add_lines_and_an_error_becomes_a_note(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = [
        Feature(name="broken", end_task=f"{__name__}:Fail"),
        Feature(name="idle", end_task="no_such_module:Task", is_used=lambda plan: False),
        Feature(name="plain"),
        Feature(name="useful", end_task=f"{__name__}:SayRecorded"),
    ]
    monkeypatch.setattr(run_end, "list_features", lambda: {each.name: each for each in features})
    notes: list[str] = []
    display = SimpleNamespace(print_line=lambda text, color: notes.append(text))
    monitor: Any = SimpleNamespace(spec=spec, display=display)
    assert run_end_tasks(monitor, is_recorded=True) == [("recorded", "True")]
    (note,) = notes
    assert note.startswith("note: the feature broken: missing, and the rest goes on (OSError: the disk is full")
