"""A run is named by its id, by its folder, or by the URI of a model; what does not exist is refused in words."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Tracking
from scaleflow.launcher.prepare import find_folder_to_resume
from scaleflow.launcher.recording.recovery import repair
from scaleflow.runs.run import Run, locate_run
from scaleflow.tracking.model_uris import locate_weights
from tests.tracking.example_runs import MadeRun

pytestmark = pytest.mark.filterwarnings("ignore:.*Any type hint is inferred")


def test_each_form_names_the_run_and_its_model(
    empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Callable[..., Any]
) -> None:
    """The run's result is its second model, of an earlier step than the first."""
    from mlflow import MlflowClient

    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    made = MadeRun(tmp_path / "run", uri=uri, register_as="net").ready().files(step=30)
    (made.folder / "model" / "model.keras").write_bytes(b"first")
    repair(made.folder)
    first = made.state["model_uri"]
    shutil.rmtree(made.folder / "model")
    made.end("KILLED").ready(resumed=30).files(step=20).end()
    repair(made.folder)
    run_id, result = made.state["run_id"], made.state["model_uri"]
    assert first != result
    client = MlflowClient(uri)
    client.set_registered_model_alias("net", "champion", "1")
    here = Tracking(uri=uri)

    models = {run_id: result, f"runs:/{run_id}/model": result, str(made.folder): result, "models:/net@newest": result}
    models |= {"models:/net@champion": first, "models:/net/1": first, "models:/net/latest": result, first: first}
    for named, expected in models.items():
        run = Run.find(named, Tracking() if named == str(made.folder) else here)
        assert (run.store.uri, run.run_id) == (uri, run_id)
        assert (run.model_uri, run.model.step) == (expected, 30 if expected == first else 20), named
        assert find_folder_to_resume(named, {"tracking": {"uri": uri}}) == made.folder
    for named, expected in ((run_id, result), (f"runs:/{run_id}/model", result), ("models:/net@champion", first)):
        with locate_weights(plan(f"model.init_from='{named}'")) as located:
            assert (Path(str(located.weights)).read_bytes() == b"first") == (expected == first), named

    other = client.create_logged_model("0", name="theirs").model_id
    client.delete_run(run_id)
    refused = {
        "models:/net@champoin": "has no alias champoin; there is champion, newest; did you mean champion?",
        "models:/net/7": "the model net has no version 7; there is 1, 2",
        "models:/net": "expected a version, such as models:/net/1; there is 1, 2",
        "models:/nest/1": "there is no registered model nest; there is net; did you mean net?",
        f"models:/m-{'0' * 32}": f"has no logged model m-{'0' * 32}",
        f"models:/{other}": "was not logged by scaleflow; load it with mlflow.pyfunc",
        "0" * 32: f"has no run {'0' * 32}",
        run_id: "is in MLflow's trash",
        str(made.folder): f"python -m scaleflow sync {made.folder} --again records it again",
    }
    for named, message in refused.items():
        with pytest.raises(ConfigError) as error:
            Run.find(named, here)
        assert str(error.value).startswith(named if "/" not in named or ":" in named else run_id), named
        assert message in str(error.value)
    with (
        pytest.raises(ConfigError, match="did you mean champion"),
        locate_weights(plan("model.init_from=models:/net@champoin")),
    ):
        pass


def test_a_folder_that_names_no_recorded_run_is_refused(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run", name="none").ready().end()
    sweep = MadeRun(tmp_path / "sweep").ready().end()
    (sweep.folder / "sweep.json").write_text("{}")
    for named, message in (
        ("abc", "expected the id of a run"),
        (str(tmp_path), "this is not the folder of a run"),
        (str(made.folder), f"not recorded in a store; python -m scaleflow sync {made.folder} records it"),
        (str(sweep.folder), "this is the folder of a sweep"),
    ):
        with pytest.raises(ConfigError, match=message):
            locate_run(named, Tracking())
