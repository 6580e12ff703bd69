"""One run of the default job, looked at from every side. The run is made once for the module."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Command

EPOCHS = 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Any]:
    """A model of the user's own, with an argument that is a secret."""
    command = Command(tmp_path_factory.mktemp("finished"))
    own = command.folder / "own"
    (own / "model").mkdir(parents=True)
    (own / "model" / "mine.yaml").write_text(
        "_target_: own_model.build\n_partial_: true\nunits: 16\napi_key: hunter2-planted\n"
    )
    (own / "own_model.py").write_text(
        "from scaleflow.model import mlp\n\n\ndef build(inputs, outputs, units, api_key):\n"
        "    return mlp.build(inputs, outputs, units)\n"
    )
    ended = command("--config-dir", "own", "model=mine", f"training.epochs={EPOCHS}", "tracking.tags={team: vision}")
    assert ended.returncode == 0, ended.stderr
    return command, ended


@pytest.fixture(scope="module")
def client(finished: tuple[Command, Any]) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{finished[0].folder}/mlflow.db")


@pytest.fixture(scope="module")
def run(client: Any) -> Any:
    experiment = client.get_experiment_by_name("scaleflow")
    (found,) = client.search_runs([experiment.experiment_id])
    return found


def artifact(client: Any, run: Any, name: str) -> Path:
    return Path(client.download_artifacts(run.info.run_id, name))


def test_status_name_and_tags_say_how_it_ended(run: Any) -> None:
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "digits-mine-one_device-float32"
    assert run.data.tags["scaleflow.status"] == "FINISHED"
    assert run.data.tags["team"] == "vision"


def test_params_are_the_choices_the_leaves_and_what_was_resolved(run: Any) -> None:
    params = run.data.params
    expected = {
        "strategy": "auto",
        "hardware": "auto",
        "precision": "float32",
        "dataset": "digits",
        "model": "mine",
        "training.epochs": str(EPOCHS),
        "training.clip_norm": "null",
        "optimizer.learning_rate": "0.001",
        "model.units": "16",
        "seed": "0",
        "resolved.strategy": "one_device",
        "resolved.precision": "float32",
        "resolved.replicas": "1",
        "resolved.global_batch_size": "32",
        "resolved.examples.train": "1294",
        "resolved.examples.validation": "144",
        "resolved.examples.test": "359",
    }
    assert {key: params.get(key) for key in expected} == expected


def test_metrics_have_the_promised_names_and_steps(client: Any, run: Any) -> None:
    steps = {
        key: [m.step for m in client.get_metric_history(run.info.run_id, key)]
        for key in ("val/loss", "val/accuracy", "test/loss", "test/accuracy", "perf/seconds_to_first_step")
    }
    epochs = [41 * n for n in range(1, EPOCHS + 1)]
    assert steps["val/loss"] == steps["val/accuracy"] == epochs
    assert steps["test/loss"] == steps["test/accuracy"] == epochs[-1:]
    assert steps["perf/seconds_to_first_step"] == [1]
    for key in ("train/loss", "train/accuracy", "perf/examples_per_second", "perf/step_ms"):
        seen = [m.step for m in client.get_metric_history(run.info.run_id, key)]
        assert set(epochs) <= set(seen), key
        assert seen == sorted(set(seen)), key


def test_every_point_that_the_worker_wrote_is_in_the_store(
    finished: tuple[Command, Any], client: Any, run: Any
) -> None:
    told = {
        (key, event["step"], event["time"], value)
        for event in finished[0].events()
        if event["event"] == "metrics"
        for key, value in event["values"].items()
    }
    kept = {
        (key, m.step, m.timestamp, m.value)
        for key in run.data.metrics
        for m in client.get_metric_history(run.info.run_id, key)
    }
    assert told == kept


def test_artifacts_hold_the_config_the_overrides_and_the_environment(client: Any, run: Any) -> None:
    config = yaml.safe_load(artifact(client, run, "config.yaml").read_text())
    assert config["training"]["epochs"] == EPOCHS
    assert config["model"]["_target_"] == "own_model.build"
    assert f"training.epochs={EPOCHS}" in yaml.safe_load(artifact(client, run, "overrides.yaml").read_text())
    assert "tensorflow==" in artifact(client, run, "environment.txt").read_text()


def test_a_secret_is_nowhere(finished: tuple[Command, Any]) -> None:
    command, ended = finished
    planted = b"hunter2-planted"
    own = command.folder / "own"
    files = [p for p in command.folder.rglob("*") if p.is_file() and own not in p.parents]
    assert len(files) > 10
    assert [p for p in files if planted in p.read_bytes()] == []
    assert planted.decode() not in ended.stdout + ended.stderr


def test_the_terminal_has_a_line_an_epoch_and_says_where_to_look(finished: tuple[Command, Any], run: Any) -> None:
    lines = finished[1].stdout.splitlines()
    assert sum(line.startswith("epoch ") for line in lines) == EPOCHS
    ends = {line.split("  ")[0].strip(): line for line in lines}
    assert f"{run.data.metrics['test/accuracy']:.4f}" in ends["test accuracy"]
    assert run.info.run_id in ends["run"]
    assert "mlflow ui" in ends["look at it"]
    assert "\x1b" not in finished[1].stdout
    assert finished[1].stderr == ""


def test_tensorflow_noise_is_in_the_log(finished: tuple[Command, Any]) -> None:
    assert "oneDNN" in (finished[0].run_folder() / "worker-0.log").read_text()


def load_in_three_ways(model: str, uri: str) -> dict[str, Any]:
    import keras
    import mlflow
    import numpy as np
    import tensorflow as tf

    mlflow.set_tracking_uri(uri)
    folder = Path(mlflow.artifacts.download_artifacts(model))
    batch = np.random.default_rng(0).uniform(0, 16, (5, 8, 8, 1)).astype(np.float32)
    pyfunc = mlflow.pyfunc.load_model(model)
    saved = tf.saved_model.load(str(folder / "data" / "saved_model"))
    outputs = {
        "pyfunc": pyfunc.predict(batch),
        "keras": keras.models.load_model(folder / "data" / "model.keras")(batch).numpy(),
        "saved_model": saved.serve(tf.constant(batch)).numpy(),
        "one": pyfunc.predict(batch[:1]),
    }
    signature = pyfunc.metadata.signature
    return {
        **outputs,
        "signature": (signature.inputs.to_dict(), signature.outputs.to_dict()),
        "example": pyfunc.input_example.shape,
        "files": sorted(p.name for p in folder.iterdir()),
    }


@pytest.fixture(scope="module")
def logged(client: Any, run: Any) -> Any:
    (output,) = run.outputs.model_outputs
    return client.get_logged_model(output.model_id)


def test_the_logged_model_loads_in_three_ways_where_nothing_was_trained(
    isolated: Callable[..., Any], finished: tuple[Command, Any], logged: Any, run: Any
) -> None:
    uri = f"sqlite:///{finished[0].folder}/mlflow.db"
    found = isolated(load_in_three_ways, f"models:/{logged.model_id}", uri)
    assert found["pyfunc"].shape == (5, 10)
    for way in ("keras", "saved_model"):
        assert found[way] == pytest.approx(found["pyfunc"], abs=1e-5)
    assert found["one"] == pytest.approx(found["pyfunc"][:1], abs=1e-5)
    inputs, outputs = found["signature"]
    assert inputs[0]["tensor-spec"] == {"dtype": "float32", "shape": (-1, 8, 8, 1)}
    assert outputs[0]["tensor-spec"] == {"dtype": "float32", "shape": (-1, 10)}
    assert found["example"] == (2, 8, 8, 1)
    assert {"MLmodel", "requirements.txt", "python_env.yaml", "conda.yaml", "code", "data"} <= set(found["files"])


def test_the_logged_model_belongs_to_the_run(logged: Any, run: Any) -> None:
    assert logged.name == "model"
    assert logged.source_run_id == run.info.run_id
    assert str(logged.status) in ("READY", "LoggedModelStatus.READY")


def test_the_recorder_left_how_far_it_came(finished: tuple[Command, Any], run: Any) -> None:
    folder = finished[0].run_folder()
    state = json.loads((folder / "record.json").read_text())
    assert state == {"offset": (folder / "events.jsonl").stat().st_size, "run_id": run.info.run_id, "done": True}
