"""What MLflow would refuse of an experiment and of its metrics: it is refused before the run, or recorded otherwise."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Tracking
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.launcher.recording.recorder import CommandRun
from scaleflow.launcher.recording.recovery import repair
from scaleflow.launcher.recording.store_transfer import EventTransfer
from scaleflow.runs.run import find_tracking_options
from scaleflow.tracking import make_tracker
from scaleflow.tracking.uri import check_model_name, resolve_store, translate_address
from tests.tracking.example_runs import MadeRun, assert_has_one_model, only_run

pytestmark = pytest.mark.filterwarnings("ignore:.*Any type hint is inferred")


@pytest.fixture
def uri(empty_store: Path, tmp_path: Path) -> str:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def test_names_that_mlflow_rejects_are_refused_before_the_run(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x" * 501, "", "  "):
        with pytest.raises(ConfigError, match=r"^tracking\.experiment=.*1 to 500 characters, and it has"):
            resolve_store(Tracking(uri=uri, experiment=name))
    with pytest.raises(ConfigError, match=r"^tracking\.register_as=m+\.\.\.: has 257 characters"):
        resolve_store(Tracking(uri=uri, register_as="m" * 257))
    check_model_name("--model ", "m" * 256)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "y" * 600)
    with pytest.raises(ConfigError, match=r"^MLFLOW_EXPERIMENT_NAME=y+\.\.\.:"):
        resolve_store(Tracking(uri=uri))
    resolve_store(Tracking(uri=uri, experiment="of my own"))


@pytest.mark.parametrize("name", ["x" * 500, "Ж" * 200, "..", "a/../b"])
def test_any_other_name_is_recorded_with_its_files_below_the_artifacts(uri: str, tmp_path: Path, name: str) -> None:
    made = MadeRun(tmp_path / "run", uri=uri, experiment=name).ready().train(1, 3).files().end()
    assert repair(made.folder).result == "recorded"
    place = Path(unquote(only_run(uri, name).info.artifact_uri).removeprefix("file://"))
    assert place.resolve().is_relative_to(tmp_path / "mlartifacts")
    assert len(place.resolve().relative_to(tmp_path / "mlartifacts").parts) == 3
    assert (place / "plot.txt").exists()


def test_nan_is_no_metric_of_a_model(uri: str, tmp_path: Path) -> None:
    """MLflow would keep it as 0.0, the best loss of all. The run itself has it as NaN."""
    from mlflow import MlflowClient

    made = MadeRun(tmp_path / "run", uri=uri).ready()
    made.write("metrics", step=9, values={"test/loss": math.nan, "test/accuracy": 0.5, "val/loss": math.inf})
    made.files().end()
    assert repair(made.folder).result == "recorded"
    run = only_run(uri, "run")
    assert math.isnan(run.data.metrics["test/loss"])
    model = MlflowClient(uri).get_logged_model(assert_has_one_model(uri, run).model_id)
    assert {each.key: each.value for each in model.metrics if each.key != "val/loss"} == {"test/accuracy": 0.5}


def test_a_run_of_a_deleted_experiment_is_not_forgotten(uri: str, tmp_path: Path) -> None:
    """It was killed while it ran. Sent again in vain, it stays known, so that after a restore it gets its end."""
    from mlflow import MlflowClient

    client, made = MlflowClient(uri), MadeRun(tmp_path / "run", uri=uri).ready().train(1, 3)
    transfer = EventTransfer(make_tracker(find_tracking_options(made.folder, uri)), made.events)
    transfer.open()
    transfer.send()
    experiment = client.get_experiment_by_name("run").experiment_id
    client.delete_experiment(experiment)
    again = repair(made.folder, again=True)
    assert (again.result, again.run_id) == ("not recorded", transfer.record.run_id)
    assert "tracking.experiment=run: was deleted; restore it with `mlflow experiments restore" in again.reason
    client.restore_experiment(experiment)
    assert repair(made.folder).result == "recorded"
    assert only_run(uri, "run").info.status == "KILLED"


def test_a_deleted_experiment_is_refused_when_the_store_is_opened(uri: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    client.delete_experiment(client.create_experiment("gone"))
    tracker = make_tracker(replace(Tracking(uri=uri), experiment="gone"))
    with pytest.raises(ConfigError, match=r"^tracking\.experiment=gone: was deleted; restore it"):
        EventTransfer(tracker, tmp_path / "events.jsonl").open()


def test_an_address_without_a_scheme_is_completed() -> None:
    addresses = ("http://a:1", "sqlite:///a.db", "databricks", "databricks://a:1")
    assert not any(translate_address(uri) for uri in addresses)
    assert translate_address("localhost:5000") == "http://localhost:5000"
    assert translate_address("runs.db") == "sqlite:///runs.db"


def test_runs_of_a_renamed_experiment_stay_together(uri: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    sweep = MadeRun(tmp_path / "sweep", uri=uri, experiment="study").ready().end()
    assert repair(sweep.folder).result == "recorded"
    experiment = client.get_experiment_by_name("study").experiment_id
    client.rename_experiment(experiment, "published")

    def record(name: str, experiment: str = "study", **ready: str) -> Any:
        made = MadeRun(tmp_path / name, uri=uri, experiment=experiment).ready(**ready).end()
        status = repair(made.folder)
        assert status.result == "recorded", status
        return client.get_run(str(status.run_id))

    job = record("job", parent=str(sweep.folder))
    assert job.info.experiment_id == experiment
    other = record("other", experiment="elsewhere", parent=str(sweep.folder))  # a sweep over tracking.experiment
    assert other.info.experiment_id == client.get_experiment_by_name("elsewhere").experiment_id
    client.delete_run(job.info.run_id)
    again = repair(tmp_path / "job", again=True)
    assert client.get_run(str(again.run_id)).info.experiment_id == experiment
    assert client.get_experiment_by_name("study") is None

    following = CommandRun(tmp_path / "runs" / "2", "the pipeline's own run")
    tracking = resolve_store(Tracking(uri=uri, experiment="study"))
    following.open("made", tracking, tags={}, params={}, earlier=sweep.folder)
    following.end("FINISHED")
    assert following.finish(StopRequest())
    assert client.get_run(following.files.read_record()["run_id"]).info.experiment_id == experiment
    assert client.get_experiment_by_name("study") is None

    client.delete_experiment(experiment)
    late = MadeRun(tmp_path / "late", uri=uri, experiment="study").ready(parent=str(sweep.folder)).end()
    status = repair(late.folder)
    assert status.result == "not recorded"
    assert "tracking.experiment=published: was deleted" in status.reason or "--uri" in status.reason


def test_spaces_around_an_address_do_not_count(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_store(Tracking(uri=f" {uri}\n")).uri == uri
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{uri}\n")
    for typed in (None, "", "  "):
        assert resolve_store(Tracking(uri=typed)).uri == uri
