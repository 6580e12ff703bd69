"""A run that somebody else has opened: `mlflow run`, or whoever sets MLFLOW_RUN_ID."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import IDENTITY, Plan, Tracking
from scaleflow.launcher.launch import describe_part
from scaleflow.runs import RunSpec
from scaleflow.tracking import make_tracker
from scaleflow.worker.tasks import TrainModel
from tests.conftest import Command

BEGAN = 1_700_000_000_000


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="module")
def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(uri)


def opened(client: Any, name: str | None = None, **tags: str) -> str:
    found = client.get_experiment_by_name("theirs")
    experiment = found.experiment_id if found else client.create_experiment("theirs")
    return str(client.create_run(experiment, run_name=name, tags=tags).info.run_id)


def started(uri: str, run_id: str | None, monkeypatch: pytest.MonkeyPatch, **options: str) -> Any:
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    if run_id is not None:
        monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    tracker: Any = make_tracker(Tracking(uri=uri, **options), adopts=True)
    tracker.connect()
    own = {"team": "vision", "mlflow.source.git.commit": "ours", "scaleflow.folder": "/a", IDENTITY: uuid.uuid4().hex}
    for _ in range(2):  # again, as after a fault
        tracker.start("ours", own, BEGAN)
    return tracker


def test_it_is_taken_with_what_it_has(uri: str, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"mlflow.source.name": "file:///project", "mlflow.source.git.commit": "theirs"}
    run_id = opened(client, **theirs)
    client.log_param(run_id, "strategy", "auto")
    client.log_param(run_id, "precision", "mixed")
    tracker = started(uri, run_id, monkeypatch)
    params = {"strategy": "mirrored", "precision": "mixed", "seed": "3"}
    for _ in range(2):  # sent again, as after a fault
        tracker.log_params(params)
    run = client.get_run(run_id)
    assert tracker.run_id == run_id
    assert run.info.run_name == "ours"
    assert {k: run.data.tags[k] for k in theirs} == theirs
    assert run.data.tags["team"] == "vision"
    assert run.data.params == {"strategy": "auto", "scaleflow.strategy": "mirrored", "precision": "mixed", "seed": "3"}


def test_the_name_that_a_person_gave_stays(uri: str, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = opened(client, "the third try")
    started(uri, run_id, monkeypatch)
    assert client.get_run(run_id).info.run_name == "the third try"
    run_id = opened(client, "the fourth try")
    started(uri, run_id, monkeypatch, run_name="ours")
    assert client.get_run(run_id).info.run_name == "ours"


def test_a_run_that_is_another_commands_is_refused(uri: str, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = opened(client, **{"scaleflow.folder": "/some/run"})
    with pytest.raises(
        ConfigError, match=rf"MLFLOW_RUN_ID={run_id}: this run already belongs to /some/run; use resume=/some/run"
    ):
        started(uri, run_id, monkeypatch)
    client.delete_run(run_id)
    with pytest.raises(ConfigError, match=f"MLFLOW_RUN_ID={run_id}: .* was deleted"):
        started(uri, run_id, monkeypatch)


@pytest.mark.parametrize("variable", ["MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"])
def test_the_environment_names_the_experiment_where_the_config_names_none(
    uri: str, client: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    name = f"of {variable}"
    monkeypatch.setenv(variable, client.create_experiment(name) if variable.endswith("ID") else name)
    run = client.get_run(started(uri, None, monkeypatch).run_id)
    assert client.get_experiment(run.info.experiment_id).name == name
    run = client.get_run(started(uri, None, monkeypatch, experiment="mine").run_id)
    assert client.get_experiment(run.info.experiment_id).name == "mine"


def test_an_experiment_that_is_not_there_is_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "4711")
    with pytest.raises(ConfigError, match=r"MLFLOW_EXPERIMENT_ID=4711: the store .* has no such experiment"):
        started(uri, None, monkeypatch)


def test_a_run_that_goes_on_says_that_it_is_another(
    plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RunSpec(plan(), tmp_path, 0.0, TrainModel())
    (tmp_path / "record.json").write_text('{"run_id": "abc", "offset": 1}')
    monkeypatch.setenv("MLFLOW_RUN_ID", "def")
    assert describe_part(spec, True) == ["note: MLFLOW_RUN_ID=def is not used: the resumed run is abc"]
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    assert describe_part(spec, True) == []


@pytest.mark.slow
def test_an_unknown_run_is_refused_before_anything_is_trained(uri: str, command: Command) -> None:
    unknown = "0123456789abcdef0123456789abcdef"
    ended = command(f"tracking.uri={uri}", MLFLOW_RUN_ID=unknown)
    assert ended.returncode == 2
    assert f"scaleflow: MLFLOW_RUN_ID={unknown}: the store {uri} has no run {unknown}" in ended.stderr
    assert not list(command.folder.glob("outputs/*/*"))
