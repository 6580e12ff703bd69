"""Metrics of a user's own code, and MLflow's fluent API where a run trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scaleflow
from scaleflow.interfaces import Plan
from scaleflow.runs import RunSpec, Task, WorkerProcess
from scaleflow.runs.user_metrics import user_metrics
from scaleflow.worker.process import run_worker
from tests.conftest import Command


def test_a_metric_outside_of_a_run_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"scaleflow.log_metric\('a'\): no run trains in this process"):
        scaleflow.log_metric("a", 1)


def test_numbers_are_logged_and_nothing_else() -> None:
    logged: list[tuple[str, float]] = []
    with user_metrics(lambda name, value: logged.append((name, value))):
        for value in (1, 2.5, np.float32(0.5), np.array(3)):
            scaleflow.log_metric("a", value)
        for wrong in ("1", None, [1, 2]):
            with pytest.raises(TypeError, match="expected a name and a number"):
                scaleflow.log_metric("a", wrong)
    assert logged == [("a", 1.0), ("a", 2.5), ("a", 0.5), ("a", 3.0)]


def fluent(is_imported_before: bool) -> list[str]:
    """What MLflow's fluent API says where a run trains."""
    if is_imported_before:
        import mlflow
    messages = []
    for _ in range(2):
        with user_metrics(lambda name, value: None):
            import mlflow

            try:
                mlflow.log_metric("a", 1.0)
            except RuntimeError as error:
                messages.append(str(error))
    return messages


@pytest.mark.parametrize("is_imported_before", [True, False])
def test_mlflows_fluent_api_names_what_to_use(isolated: Callable[..., Any], is_imported_before: bool) -> None:
    messages = isolated(fluent, is_imported_before)
    assert len(messages) == 2
    assert all("use scaleflow.log_metric(name, value)" in message for message in messages)


class UseOtherRuns(Task):
    """Does what code of a user might do while a run is built."""

    def run(self, process: WorkerProcess) -> None:
        import mlflow

        with pytest.raises(RuntimeError, match=r"use scaleflow\.log_metric"):
            mlflow.set_tag("a", "b")
        with pytest.raises(RuntimeError, match="no run trains in this process"):
            scaleflow.log_metric("a", 1)


def test_code_that_builds_a_run_begins_no_other_one(
    plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_worker(RunSpec(plan("tracking=none"), tmp_path, 0.0, UseOtherRuns()), lambda event: None, bool)


MINE = """
import keras
import scaleflow

class Log(keras.callbacks.Callback):
    def __init__(self, uses_mlflow=False):
        super().__init__()
        self.uses_mlflow = uses_mlflow

    def on_epoch_end(self, epoch, logs=None):
        scaleflow.log_metric("mine/epoch", epoch + 1)
        logs["gap"] = logs["val_loss"] - logs["loss"]
        logs["val_word"] = "good"
        if self.uses_mlflow:
            import mlflow
            mlflow.log_metric("stray", 1.0)
"""


def test_run_holds_what_a_callback_logs(command: Command) -> None:
    (command.folder / "mine.py").write_text(MINE)
    ended = command(
        *("training.callbacks=[{_target_: mine.Log}]", "training.max_steps=3", "tracking=none", "evaluation=none")
    )
    assert ended.returncode == 0, ended.stderr
    values = {
        key: (event["step"], value)
        for event in command.events()
        if event["event"] == "metrics"
        for key, value in event["values"].items()
    }
    assert values["mine/epoch"] == (3, 1.0)
    assert values["train/gap"] == (3, pytest.approx(values["val/loss"][1] - values["train/loss"][1]))
    assert not {"val/word", "stray"} & set(values)


@pytest.mark.slow
def test_a_callback_that_uses_mlflows_fluent_api_is_told_what_to_use(command: Command) -> None:
    (command.folder / "mine.py").write_text(MINE)
    words = ("training.callbacks=[{_target_: mine.Log, uses_mlflow: true}]", "training.max_steps=3", "tracking=none")
    ended = command(*words)
    assert ended.returncode == 1
    assert "use scaleflow.log_metric(name, value)" in ended.stderr
    assert "mine.py, line" in ended.stderr
    assert not (command.folder / "mlflow.db").exists()
