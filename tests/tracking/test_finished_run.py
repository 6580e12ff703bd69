"""One run of the default job, looked at from every side. The run is made once for the module."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scaleflow import __version__
from scaleflow.errors import ConfigError
from scaleflow.interfaces.formatting import format_number
from tests.conftest import Command, make_once
from tests.tracking.servers import serve_model

EPOCHS = 3


#: Secrets of every kind, each with the word `planted` in it.
OWN_YAML = """
_target_: own_model.build
_partial_: true
units: 16
fails: false
api_key: hunter2-planted
auth: ${oc.env:OWN_TOKEN}
dsn: ${secret:OWN_DSN}
endpoint: https://me:planted-in-a-uri@host/path?api_key=planted-in-a-query
logins: [{user: me, password: planted-in-a-list}]
"""

#: It tells all of them to its log, as code that is looked into does.
OWN_MODEL = """
import logging
import os
import sys

from scaleflow.model import mlp


def build(inputs, outputs, units, fails, **secrets):
    print("with", secrets, *secrets.values())
    print(os.environ["CLOUD_SECRET_ACCESS_KEY"], file=sys.stderr)
    logging.warning("password=planted-nowhere-else %s", secrets["dsn"])
    if fails:
        raise ValueError(f"no login with {secrets['auth']} at {secrets['endpoint']}")
    return mlp.build(inputs, outputs, units)
"""

OWN_ENVIRONMENT = {
    "OWN_TOKEN": "planted-in-the-environment",
    "OWN_DSN": "planted and marked, with a 'quote'",
    "CLOUD_SECRET_ACCESS_KEY": "planted-in-nothing-but-the-environment",
}

OWN_WORDS = ("--config-dir", "own", "model=mine", "+model.hub_token=planted-as-it-was-typed")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Any]:
    """A model of the user's own, with arguments that are secrets."""
    folder, ended = make_once(tmp_path_factory, "finished_run", train_own_model)
    command = Command(folder)
    command.environment |= OWN_ENVIRONMENT
    return command, ended


def train_own_model(folder: Path) -> Any:
    command = Command(folder)
    command.environment |= OWN_ENVIRONMENT
    own = folder / "own"
    (own / "model").mkdir(parents=True)
    (own / "model" / "mine.yaml").write_text(OWN_YAML)
    (own / "own_model.py").write_text(OWN_MODEL)
    tags = "tracking.tags={team: vision, deploy_token: planted-in-a-tag}"
    ended = command(*OWN_WORDS, f"training.epochs={EPOCHS}", tags)
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.fixture(scope="module")
def client(finished: tuple[Command, Any]) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{finished[0].folder}/mlflow.db")


@pytest.fixture(scope="module")
def run(client: Any) -> Any:
    experiment = client.get_experiment_by_name("scaleflow")
    (found,) = client.search_runs([experiment.experiment_id])
    return client.get_run(found.info.run_id)  # with its outputs, which older versions do not search


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
    written = {
        (key, event["step"], event["time"], value)
        for event in finished[0].events()
        if event["event"] in ("metrics", "system")
        for key, value in event["values"].items()
    }
    kept = {
        (key, m.step, m.timestamp, m.value)
        for key in run.data.metrics
        for m in client.get_metric_history(run.info.run_id, key)
    }
    assert written == kept


def test_artifacts_hold_the_config_the_overrides_and_the_environment(client: Any, run: Any) -> None:
    config = yaml.safe_load(artifact(client, run, "config.yaml").read_text())
    assert config["training"]["epochs"] == EPOCHS
    assert config["model"]["_target_"] == "own_model.build"
    assert f"training.epochs={EPOCHS}" in yaml.safe_load(artifact(client, run, "overrides.yaml").read_text())
    assert "tensorflow==" in artifact(client, run, "environment.txt").read_text()


def test_each_split_is_an_input_of_the_run(run: Any) -> None:
    import mlflow

    found = {input.tags[0].value: input.dataset for input in run.inputs.dataset_inputs}
    assert {tag.key for input in run.inputs.dataset_inputs for tag in input.tags} == {"mlflow.data.context"}
    profiles = {split: json.loads(dataset.profile) for split, dataset in found.items()}
    assert {split: profile["num_rows"] for split, profile in profiles.items()} == {
        "train": 1294,
        "validation": 144,
        "test": 359,
    }
    assert {dataset.name for dataset in found.values()} == {"digits"}
    assert len({dataset.digest for dataset in found.values()}) == 3
    assert {(profile["digest_covers"], profile["digest_version"]) for profile in profiles.values()} == {("all", 3)}
    schema = json.loads(found["train"].schema)["mlflow_tensorspec"]
    assert json.loads(schema["features"])[0]["tensor-spec"] == {"dtype": "float32", "shape": [-1, 8, 8, 1]}
    assert json.loads(schema["targets"])[0]["tensor-spec"] == {"dtype": "int32", "shape": [-1]}
    source = mlflow.data.get_source(run.inputs.dataset_inputs[0])
    assert source.to_dict() == {"tags": {"_target_": "scaleflow.dataset.digits.Digits"}}


def test_the_baseline_is_told_at_step_0(client: Any, run: Any) -> None:
    (point,) = client.get_metric_history(run.info.run_id, "baseline/accuracy")
    assert point.step == 0
    assert 0.05 < point.value < 0.15
    assert 2.2 < run.data.metrics["baseline/loss"] < 2.4
    assert 0.05 < run.data.metrics["baseline/test/accuracy"] < 0.15


def test_the_models_layers_are_told_as_text(client: Any, run: Any) -> None:
    summary = artifact(client, run, "model_summary.txt").read_text()
    assert "outputs (Dense)" in summary
    assert "\x1b" not in summary


def test_which_digits_were_taken_for_which_is_a_table_and_a_picture(client: Any, run: Any) -> None:
    header, *rows = artifact(client, run, "plots/confusion_matrix.csv").read_text().splitlines()
    assert header.split(",")[1:] == [str(n) for n in range(10)]
    counts = [[int(cell) for cell in row.split(",")[1:]] for row in rows]
    assert sum(map(sum, counts)) == 359
    right = sum(row[i] for i, row in enumerate(counts))
    assert right / 359 == pytest.approx(run.data.metrics["test/accuracy"])
    assert artifact(client, run, "plots/confusion_matrix.svg").read_text().startswith("<svg ")


def test_a_run_can_begin_with_the_models_weights(
    finished: tuple[Command, Any], client: Any, logged: Any, run: Any, plan: Callable[..., Any]
) -> None:
    from scaleflow.tracking import locate_weights

    store = f"tracking.uri=sqlite:///{finished[0].folder}/mlflow.db"
    exported = finished[0].run_folder() / "model" / "model.keras"
    client.create_registered_model("digits")
    client.create_model_version("digits", logged.artifact_location, run.info.run_id, model_id=logged.model_id)
    uris = f"runs:/{run.info.run_id}/model", f"models:/{logged.model_id}", "models:/digits/1"
    for origin in (*uris, finished[0].run_folder()):
        with locate_weights(plan(store, f"model.init_from={origin}")) as found:
            file = Path(found.weights)
            assert file.read_bytes() == exported.read_bytes()
            assert file.with_name("learned_state.json").is_file()
            assert found.config["model"]["init_from"] == str(origin)
        assert file.exists() == (file == exported)


@pytest.mark.parametrize(
    ("origin", "reason"),
    [
        ("runs:/0123456789abcdef0123456789abcdef/model", "cannot be loaded from sqlite"),
        ("models:/nothing/1", "there is no registered model nothing; there is (digits|none)"),
    ],
)
def test_weights_that_the_store_has_not_are_refused(
    finished: tuple[Command, Any], plan: Callable[..., Any], origin: str, reason: str
) -> None:
    from scaleflow.tracking import locate_weights

    there = plan(f"tracking.uri=sqlite:///{finished[0].folder}/mlflow.db", f"model.init_from={origin}")
    with (
        pytest.raises(ConfigError, match=f"model.init_from={origin}: {reason}"),
        locate_weights(there),
    ):
        pass


def test_a_secret_is_nowhere(finished: tuple[Command, Any]) -> None:
    """Nor where the run is refused; what is masked, and where a secret comes from, is still told."""
    command, ended = finished
    folder = command.run_folder()
    refused = command(*OWN_WORDS, "model.fails=true", "hydra.run.dir=refused")
    assert refused.returncode == 2
    assert "ValueError: no login with **** at https://****@host" in refused.stderr
    own = command.folder / "own"
    files = [p for p in command.folder.rglob("*") if p.is_file() and own not in p.parents]
    files = [p for p in files if not p.name.startswith("mlflow.db-")]  # SQLite's journals of other tests come and go
    assert len(files) > 10
    assert (command.folder / "refused" / "worker-0.log") in files
    assert [str(p.relative_to(command.folder)) for p in files if b"planted" in p.read_bytes()] == []
    assert "planted" not in ended.stdout + ended.stderr + refused.stdout + refused.stderr
    log = (folder / "worker-0.log").read_text()
    assert "'api_key': ****" in log or "'api_key': '****'" in log
    assert "password=****" in log
    model = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    assert (model["auth"], model["dsn"]) == ("${oc.env:OWN_TOKEN}", "${secret:OWN_DSN}")
    assert (model["hub_token"], model["logins"]) == ("****", [{"user": "me", "password": "****"}])


def test_the_terminal_has_a_line_an_epoch_and_says_where_to_look(finished: tuple[Command, Any], run: Any) -> None:
    lines = finished[1].stdout.splitlines()
    assert sum(line.startswith("epoch ") for line in lines) == EPOCHS
    ends = {line.split("  ")[0].strip(): line for line in lines}
    assert lines[0] == f"scaleflow {__version__}"
    assert format_number(run.data.metrics["test/accuracy"]) in ends["test accuracy"]
    assert re.search(r" \(0\.\d+ to 0\.\d+; baseline 0\.\d+: always the most frequent class\)$", ends["test accuracy"])
    assert run.info.run_id in ends["run"]
    assert "mlflow ui" in ends["look at it"]
    assert "\x1b" not in finished[1].stdout
    assert finished[1].stderr == ""


def test_the_worker_reports_what_it_does_before_and_after_the_training(finished: tuple[Command, Any]) -> None:
    names = [event["text"] for event in finished[0].events() if event["event"] == "stage"]
    assert names == [
        "setting up the devices",
        "reading digits",
        "building the model",
        "compiling the training step",
        "saving the last checkpoint",
        "evaluating the test split",
        "exporting the model",
        "making the report",
    ]


def test_tensorflow_noise_is_in_the_log(finished: tuple[Command, Any]) -> None:
    log = (finished[0].run_folder() / "worker-0.log").read_text()
    assert re.search(r"^[IWE]\d{4} |^\d{4}-\d\d-\d\d .*: [IWE] ", log, re.M), log


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
        "pyfunc": pyfunc.predict(batch, params={"output": "logits"}),
        "predictions": pyfunc.predict(batch),
        "keras": keras.models.load_model(folder / "data" / "model.keras")(batch).numpy(),
        "saved_model": saved.serve(tf.constant(batch)).numpy(),
        "one": pyfunc.predict(batch[:1], params={"output": "logits"}),
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


def test_the_logged_model_has_what_was_measured_of_it(client: Any, run: Any, logged: Any) -> None:
    measured = {metric.key: metric.value for metric in logged.metrics}
    names = ("loss", "accuracy", "balanced_accuracy")
    limits = {f"test/{name}_{limit}" for name in names[1:] for limit in ("low", "high")}
    assert set(measured) == {f"{split}/{name}" for split in ("val", "test") for name in names} | limits
    assert measured.items() <= run.data.metrics.items()
    assert len(client.get_metric_history(run.info.run_id, "test/loss")) == 1
    assert len(client.get_metric_history(run.info.run_id, "val/loss")) == EPOCHS
    assert logged.tags["mlflow.user"] == run.data.tags["mlflow.user"]


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
    columns = ["prediction", "probability", *(f"probability_{n}" for n in range(10))]
    assert [each["name"] for each in outputs] == list(found["predictions"]) == columns
    assert found["predictions"]["prediction"].tolist() == found["pyfunc"].argmax(axis=1).tolist()
    assert found["example"] == (2, 8, 8, 1)
    assert {"MLmodel", "requirements.txt", "python_env.yaml", "conda.yaml", "code", "data"} <= set(found["files"])


@pytest.fixture
def served(finished: tuple[Command, Any], logged: Any) -> Iterator[str]:
    """`mlflow models serve` of the logged model; its address."""
    with serve_model(finished[0], f"models:/{logged.model_id}") as uri:
        yield uri


def outputs_of_the_keras_file(path: str, batch: Any) -> Any:
    import keras

    return keras.models.load_model(path)(batch).numpy()


@pytest.mark.slow
def test_the_logged_model_answers_over_http(
    isolated: Callable[..., Any], finished: tuple[Command, Any], served: str
) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    batch = digits.images[:40, :, :, None].astype("float32")
    body = json.dumps({"inputs": batch.tolist()}).encode()
    is_json = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{served}/invocations", body, is_json)
    answered = json.loads(urllib.request.urlopen(request, timeout=240).read())["predictions"]
    classes = [row["prediction"] for row in answered]
    body = json.dumps({"inputs": batch.tolist(), "params": {"output": "logits"}}).encode()
    request = urllib.request.Request(f"{served}/invocations", body, is_json)
    answered = json.loads(urllib.request.urlopen(request, timeout=240).read())["predictions"]
    keras_file = finished[0].run_folder() / "model" / "model.keras"
    expected = isolated(outputs_of_the_keras_file, str(keras_file), batch)
    assert [pytest.approx(row, abs=1e-4) for row in expected.tolist()] == answered
    taken_for = [row.index(max(row)) for row in answered]
    assert classes == taken_for
    assert sum(a == b for a, b in zip(taken_for, digits.target.tolist(), strict=False)) > 20
    request = urllib.request.Request(f"{served}/invocations", b'{"inputs": [[1.0]]}', is_json)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=240)
    assert refused.value.code == 400
    refused.value.close()


def test_the_logged_model_belongs_to_the_run(logged: Any, run: Any) -> None:
    assert logged.name == "model"
    assert logged.source_run_id == run.info.run_id
    assert str(logged.status) in ("READY", "LoggedModelStatus.READY")


def test_the_recorder_left_how_far_it_came(finished: tuple[Command, Any], run: Any) -> None:
    folder = finished[0].run_folder()
    state = json.loads((folder / "record.json").read_text())
    store = f"sqlite:///{finished[0].folder}/mlflow.db"
    offset = (folder / "events.jsonl").stat().st_size
    known = {"offset": offset, "file_offset": offset, "run_id": run.info.run_id, "uri": store, "done": True, "left": {}}
    known["model_uri"] = f"models:/{run.outputs.model_outputs[0].model_id}"
    known |= {"folder": str(folder), "uri_from": str(folder), "experiment": "scaleflow"}
    assert state == {**known, "id": run.data.tags["scaleflow.id"]}
