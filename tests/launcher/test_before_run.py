"""What features do before a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scaleflow.config.compose import compose_config
from scaleflow.config.parse import list_key_types, parse_value
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Training, features
from scaleflow.interfaces.features import Feature, Placeholder, find_placeholders
from scaleflow.launcher import launch
from scaleflow.launcher.command_exit import Outcome
from scaleflow.launcher.launch import launch_run
from scaleflow.launcher.prepare import PreparedRun, make_plan, prepare_run
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.runs import Task, WorkerProcess
from scaleflow.runs.folder_use import create_folder

Launch = Callable[[PreparedRun], Outcome]


def set_epochs(run: PreparedRun, launch_other: Launch, stop: StopRequest) -> PreparedRun:
    """Sets the epochs to the exit code of another run."""
    outcome = launch_other(replace(run, spec=replace(run.spec, label="other")))
    composed = run.composed.set({"training.epochs": outcome.code})
    return replace(run, composed=composed, spec=replace(run.spec, plan=make_plan(composed)))


class NoTraining(Task):
    """A task that trains no model."""

    def run(self, process: WorkerProcess) -> None:
        raise NotImplementedError


def end_command(run: PreparedRun, launch_other: Launch, stop: StopRequest) -> Outcome:
    return Outcome(1, error="nothing is found")


def refuse(run: PreparedRun, launch_other: Launch, stop: StopRequest) -> PreparedRun:
    raise ConfigError("it is refused")


def fail(run: PreparedRun, launch_other: Launch, stop: StopRequest) -> PreparedRun:
    raise ValueError("it has a mistake")


def leave(run: PreparedRun, launch_other: Launch, stop: StopRequest) -> PreparedRun:
    return run


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[PreparedRun, dict[str, Any]]]:
    """The runs that were launched, each with the arguments. Each ends with the exit code 7."""
    monkeypatch.chdir(tmp_path)
    runs: list[tuple[PreparedRun, dict[str, Any]]] = []

    def record(run: PreparedRun, **arguments: Any) -> Outcome:
        runs.append((run, arguments))
        return Outcome(7)

    monkeypatch.setattr(launch, "launch_completed_run", record)
    return runs


def prepare(*words: str) -> PreparedRun:
    run = prepare_run(compose_config(["tracking=none", "debug.inline=true", "hydra.run.dir=run", *words]))
    create_folder(run.spec.folder)
    return run


def use(monkeypatch: pytest.MonkeyPatch, *names: str, **fields: Any) -> None:
    declared = {name: Feature(name=name, before_run=f"{__name__}:{name}", **fields) for name in names}
    monkeypatch.setattr(launch, "list_features", lambda: declared)


def test_a_feature_launches_another_run_and_changes_the_config(
    launched: list[tuple[PreparedRun, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, "set_epochs")
    events: list[Any] = []
    assert launch_run(prepare(), on_event=events.append).code == 7
    (other, of_other), (run, of_run) = launched
    assert (other.spec.label, other.spec.plan.training.epochs) == ("other", 20)
    assert not of_other["adopts"]
    assert (run.spec.plan.training.epochs, run.composed.raw["training"]["epochs"]) == (7, 7)
    assert of_run["adopts"]
    assert of_run["on_event"] == events.append
    assert of_run["stop"] is of_other["stop"]


def test_a_feature_that_ends_the_command_or_refuses_it_leaves_no_folder(
    launched: list[tuple[PreparedRun, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, "end_command", "set_epochs")
    assert launch_run(prepare()).error == "nothing is found"
    use(monkeypatch, "refuse")
    with pytest.raises(ConfigError, match="it is refused"):
        launch_run(prepare())
    assert launched == []
    assert not Path("run").exists()


def test_an_error_in_a_feature_is_told_and_the_run_goes_on(
    launched: list[tuple[PreparedRun, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(monkeypatch, "fail", "set_epochs")
    assert launch_run(prepare()).code == 7
    assert [run.spec.plan.training.epochs for run, _ in launched] == [20, 7]
    assert capsys.readouterr().err == "scaleflow: the feature fail: before the run: ValueError: it has a mistake\n"


def test_a_placeholder_that_is_left_refuses_the_run(
    launched: list[tuple[PreparedRun, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepare_run(compose_config(["tracking=none", "hydra.run.dir=run", "optimizer.learning_rate=auto"]))
    create_folder(run.spec.folder)
    use(monkeypatch, "leave")
    with pytest.raises(ConfigError, match="=auto: no value was found before the run"):
        launch_run(run)
    monkeypatch.setattr(launch, "list_features", dict)
    with pytest.raises(ConfigError, match=r"type one, such as that of .*scaleflow find lr"):
        launch_run(run)
    assert launched == []
    assert not Path("run").exists()


def test_a_feature_that_is_not_used_and_a_task_that_trains_nothing_have_nothing_before_them(
    launched: list[tuple[PreparedRun, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, "refuse", is_used=lambda plan: False)
    launch_run(prepare())
    use(monkeypatch, "refuse")
    run = prepare()
    launch_run(replace(run, spec=replace(run.spec, task=NoTraining())))
    assert [each.spec.plan.training.epochs for each, _ in launched] == [20, 20]


def test_a_key_takes_the_placeholders_that_features_have_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    placeholder = Placeholder(key="training.epochs", word="enough", command="find epochs")
    declared = {"mine": Feature(name="mine", placeholders=(placeholder,))}
    monkeypatch.setattr(features, "list_features", lambda: declared)
    list_key_types.cache_clear()
    try:
        types = list_key_types(Training, "training")
        assert parse_value("enough", types["epochs"], "training.epochs") == "enough"
        assert parse_value(3, types["epochs"], "training.epochs", {"at_least": 1}) == 3
        message = "training.epochs=many: expected an integer, at least 1 or one of by_size, enough"
        with pytest.raises(ConfigError, match=message):
            parse_value("many", types["epochs"], "training.epochs", {"at_least": 1})
        with pytest.raises(ConfigError, match="expected an integer, at least 1 or by_size"):
            parse_value("auto", types["batch_size"], "training.batch_size", {"at_least": 1})
        assert find_placeholders({"training": {"epochs": "enough"}}) == [placeholder]
        assert find_placeholders({"training": {"epochs": 3}, "model": None}) == []
        assert find_placeholders({}) == []
    finally:
        list_key_types.cache_clear()
