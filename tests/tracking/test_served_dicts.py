"""A model of several inputs and outputs is logged with their names, loaded, evaluated and fine-tuned by them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Command

#: Inputs that need care: text with a preprocessing, a nested one, a name that TensorFlow does not take in a signature.
INPUTS = ("my text", "table/age", "table/row")


def exported(folder: Path) -> None:
    """Exports a model with a preprocessing of its text, and the record of its outputs, without training."""
    import keras

    from scaleflow.interfaces import Inputs, LearnedState, Outputs
    from scaleflow.model import RawInputs, make_model, write_model
    from scaleflow.runs.learned_state import write_learned_state

    raw = {"my text": Inputs((), "string"), "table": {"age": Inputs((), "int32"), "row": Inputs((2,))}}
    features = {**raw, "my text": Inputs((), "float32")}
    outputs = {"a": Outputs("regression", (2,)), "b": Outputs("classification", (3, 4))}

    def factory(inputs: Any, outputs: Any) -> Any:
        given = {
            "my text": keras.Input(()),
            "table": {"age": keras.Input((), dtype="int32"), "row": keras.Input((2,))},
        }
        columns = [given["my text"], given["table"]["age"]]
        parts = [keras.ops.expand_dims(keras.ops.cast(column, "float32"), -1) for column in columns]
        x = keras.layers.Concatenate()([*parts, given["table"]["row"]])
        b = keras.layers.Reshape((3, 4), dtype="float32")(keras.layers.Dense(12)(x))
        return keras.Model(given, {"a": keras.layers.Dense(2)(x), "b": b})

    class Length(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            import tensorflow as tf

            return tf.cast(tf.strings.length(x), "float32")

    net = make_model(factory, features, outputs)
    batch = {
        "my text": np.array(["a", "bb", "ccc"]),
        "table": {"age": np.arange(3, dtype=np.int32), "row": np.ones((3, 2), np.float32)},
    }
    write_model(net, raw, outputs, batch, "float32", folder, raw=RawInputs({("my text",): Length}))
    write_learned_state(folder, LearnedState(raw, outputs))


def loaded(exported: Path, folder: Path) -> dict[str, Any]:
    """What MLflow's model gives for each form of the inputs, and its signature."""
    import mlflow
    import pandas as pd
    import tensorflow as tf

    from scaleflow.tracking.mlflow_model import write_mlflow_model

    folder.mkdir()
    write_mlflow_model(exported, folder, run_id="0" * 32, model_id="m-" + "0" * 32)
    model = mlflow.pyfunc.load_model(str(folder))
    text, age, row = ["a", "bb", ""], [0, 1, 2], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    arrays = {
        "my text": np.array(text, object),
        "table/age": np.array(age, np.int32),
        "table/row": np.array(row, np.float32),
    }
    frame = pd.DataFrame({"table/age": age, "unused": age, "my text": text, "table/row": row})
    saved = tf.saved_model.load(str(exported / "saved_model"))
    structured = {"my text": tf.constant(text), "table": {"age": arrays["table/age"], "row": arrays["table/row"]}}
    flat = {"my_text": tf.constant(text), "table_age": arrays["table/age"], "table_row": arrays["table/row"]}
    found = {
        "dict": model.predict(arrays, params={"output": "logits"}),
        "frame": model.predict(frame, params={"output": "logits"}),
        "serve": saved.serve(structured),
        "signature": saved.signatures["logits"](**{k: tf.constant(v) for k, v in flat.items()}),
    }
    answers = saved.signatures["serving_default"](**{k: tf.constant(v) for k, v in flat.items()})
    schema = model.metadata.signature
    return {
        "outputs": {form: {name: np.asarray(each) for name, each in values.items()} for form, values in found.items()},
        "names": (schema.inputs.input_names(), schema.outputs.input_names()),
        "example": model.predict(model.input_example, params={"output": "logits"})["b"].shape,
        "predictions": model.predict(frame),
        "answers": {name: np.asarray(each) for name, each in answers.items()},
    }


def test_each_form_of_the_inputs_gives_the_named_outputs(isolated: Callable[..., Any], tmp_path: Path) -> None:
    isolated(exported, tmp_path / "exported")
    assert json.loads((tmp_path / "exported" / "signature.json").read_text())["inputs"] == {
        "my text": {"dtype": "string", "shape": [-1]},
        "table": {"age": {"dtype": "int32", "shape": [-1]}, "row": {"dtype": "float32", "shape": [-1, 2]}},
    }
    found = isolated(loaded, tmp_path / "exported", tmp_path / "logged")
    columns = ["a_prediction_0", "a_prediction_1", "b_prediction", "b_probability"]
    assert (tuple(sorted(found["names"][0])), found["names"][1]) == (INPUTS, columns)
    assert found["example"] == (2, 3, 4)
    logits, frame = found["outputs"]["serve"]["b"], found["predictions"]
    assert list(frame) == columns
    np.testing.assert_array_equal(np.stack(frame["b_prediction"]), logits.argmax(axis=-1))
    answers = found["answers"]
    assert set(answers) == {"a_prediction", "b_prediction", "b_probability"}
    np.testing.assert_array_equal(answers["b_prediction"], logits.argmax(axis=-1))
    np.testing.assert_allclose(answers["b_probability"], np.stack(frame["b_probability"]), atol=1e-6)
    for form, values in found["outputs"].items():
        assert {name: each.shape for name, each in values.items()} == {"a": (3, 2), "b": (3, 3, 4)}, form
        for name, each in values.items():
            np.testing.assert_allclose(each, found["outputs"]["serve"][name], atol=1e-5, err_msg=form)


SOURCE = ("dataset._target_=tests.strategy.structured.DictOut", "model._target_=tests.strategy.structured.two_towers")


@pytest.mark.slow
def test_a_run_is_evaluated_and_fine_tuned(command: Command) -> None:
    words = (*SOURCE, "hardware=cpu", "checkpoint=none", "dataset.normalise=true", "dataset.validation=validation")
    ended = command(*words, "training.max_steps=5", "strategy=mirrored", "hardware.logical_devices=2")
    assert ended.returncode == 0, ended.stderr
    values = {name: value for event in command.events() for name, value in event.get("values", {}).items()}
    store = command.folder / "mlflow.db"
    assert store.is_file()
    (described,) = command.folder.glob("mlartifacts/*/models/*/artifacts/MLmodel")
    (run_id,) = [line.split()[-1] for line in described.read_text().splitlines() if line.startswith("run_id:")]
    run_id = run_id.strip("'\"")

    evaluated = command.python("-m", "scaleflow", "evaluate", run_id, "hardware=cpu", "--trust", "tests")
    assert evaluated.returncode == 0, evaluated.stderr
    for name in ("loss", "kind/accuracy", "amounts/mae", "labels/loss"):
        line = next(line for line in evaluated.stdout.splitlines() if line.split()[0].endswith(f"/{name}"))
        assert float(line.split()[1]) == pytest.approx(values[f"test/{name}"], abs=1e-3), name

    tuned = command(*words, f"model.init_from=runs:/{run_id}/model", "training.max_steps=1")
    assert tuned.returncode == 0, tuned.stderr
    assert "loaded the weights of 7 of 7 layers" in tuned.stdout
    refused = command("dataset=digits", "model=mlp", f"model.init_from=runs:/{run_id}/model")
    assert refused.returncode == 2
    other = command.python("-m", "scaleflow", "evaluate", run_id, "dataset=digits", "hardware=cpu", "--trust", "tests")
    assert other.returncode == 2
    assert "are one tensor, but those of the model of" in other.stderr
