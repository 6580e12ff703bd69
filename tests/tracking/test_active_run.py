"""Runs that begin while an MLflow run of the user is active in the same thread."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import scaleflow
from scaleflow.interfaces import Tracking
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.launcher.recording.recorder import CommandRun
from scaleflow.tracking.active_run import PARENT, find_active_run
from tests.conftest import Command

UNKNOWN = "0" * 32


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def active(uri: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A run that is active in this thread, in an experiment of its own."""
    import mlflow

    for variable in ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.setenv(variable, "")  # restored at the end: MLflow's functions set them
        monkeypatch.delenv(variable)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient()
    theirs = client.get_experiment_by_name("theirs")
    experiment = theirs.experiment_id if theirs else client.create_experiment("theirs")
    try:
        with mlflow.start_run(experiment_id=experiment) as run:
            yield run
            assert mlflow.active_run().info.run_id == run.info.run_id
            mlflow.log_param("mine", 1)
            assert mlflow.get_run(run.info.run_id).data.params == {"mine": "1"}
    finally:
        mlflow.set_tracking_uri(before)


def record(folder: Path, uri: str, **options: Any) -> Any:
    """Records a run of a command, such as that of a sweep, and returns it from the store."""
    from mlflow import MlflowClient

    run = CommandRun(folder, "the run")
    run.open("ours", Tracking(uri=uri, **options), tags={}, params={})
    run.end("FINISHED")
    assert run.finish(StopRequest())
    assert run.recorder is not None
    return MlflowClient(uri).get_run(run.recorder.transfer.record.run_id)


def test_a_run_is_a_child_of_the_active_run_in_its_experiment(
    uri: str, active: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", UNKNOWN)  # it is not adopted while a run is active
    run = record(tmp_path, uri)
    assert run.data.tags[PARENT] == active.info.run_id
    assert run.info.experiment_id == active.info.experiment_id
    assert run.info.status == "FINISHED"
    again = record(tmp_path, uri)  # a command that continues it
    assert again.info.run_id == run.info.run_id


def test_an_experiment_that_is_named_counts(uri: str, active: Any, tmp_path: Path) -> None:
    run = record(tmp_path, uri, experiment="ours")
    assert run.data.tags[PARENT] == active.info.run_id
    assert run.info.experiment_id != active.info.experiment_id


def test_an_active_run_of_another_store_is_named_in_a_note(
    active: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    for folder in ("first", "second"):  # before and after the file exists
        assert PARENT not in record(tmp_path / folder, other).data.tags
        assert capsys.readouterr().out == (
            f"note: the active MLflow run {active.info.run_id} is not in the store {other}, so the new run is not its "
            "child; to make it one, set tracking.uri to the store of the active run\n"
        )


def test_the_active_run_of_each_thread_counts_alone(uri: str, active: Any) -> None:
    import mlflow

    options, found = Tracking(uri=uri), []

    def look() -> None:
        found.append(find_active_run(options))
        with mlflow.start_run(experiment_id=active.info.experiment_id) as own:
            found.append(find_active_run(options))
            found.append(own.info.run_id)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    without, inside, own_id = found
    assert without is None
    assert inside.run_id == own_id
    here = find_active_run(options)
    assert here is not None
    assert here.run_id == active.info.run_id
    assert find_active_run(Tracking(name="none")) is None


#: A script whose run is refused after the launcher has looked for the active run.
WITHOUT_MLFLOW = """
import sys
from scaleflow.interfaces import Tracking
from scaleflow.tracking.active_run import find_active_run

assert find_active_run(Tracking(uri="sqlite:///mlflow.db")) is None
assert "mlflow" not in sys.modules
"""


def test_looking_for_it_imports_no_mlflow(command: Command) -> None:
    (command.folder / "look.py").write_text(WITHOUT_MLFLOW)
    ended = command.python("look.py")
    assert ended.returncode == 0, ended.stderr


def train_in_active_run(folder: str) -> tuple[str, dict[str, str], bool]:
    """Trains in an active run; returns its id, the tags of the new run, and whether the run is still the active one."""
    import mlflow

    os.chdir(folder)
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    with mlflow.start_run() as outer:
        result = scaleflow.run("dataset.limit=100", "training.max_steps=1", "evaluation=none", "debug=inline")
        is_active = mlflow.active_run().info.run_id == outer.info.run_id
    run = mlflow.get_run(str(result.run_id))
    assert run.info.experiment_id == outer.info.experiment_id
    assert mlflow.get_run(outer.info.run_id).data.metrics == {}
    sys.stdout.flush()
    return outer.info.run_id, dict(run.data.tags), is_active


def test_a_script_that_trains_in_its_own_run(isolated: Any, tmp_path: Path) -> None:
    outer, tags, is_active = isolated(train_in_active_run, str(tmp_path))
    assert tags[PARENT] == outer
    assert is_active
