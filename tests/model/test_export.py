from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ExportError
from scaleflow.interfaces import Inputs, Outputs
from tests.conftest import Command
from tests.training.fake_engine import ignore
from tests.versions.marks import needs


def trained(plan: Any, folder: Path) -> np.ndarray[Any, Any]:
    """Trains a few steps and exports; gives the live model's outputs for the sample."""
    from scaleflow.worker.build import build_training

    built = build_training(plan, ignore)
    built.engine.start_epoch()
    built.engine.train(built.feeds.train, built.feeds.train.open(0, 0), 0, 0, 3, 0)
    built.export(folder)
    return np.asarray(built.engine.model(np.load(folder / "input_example.npy"), training=False))


def reloaded(folder: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """What both forms give for the example, and for how many digits the saved one gives something."""
    import keras
    import tensorflow as tf

    batch = np.load(folder / "input_example.npy")
    saved = tf.saved_model.load(str(folder / "saved_model"))
    larger = saved.serve(tf.constant(np.concatenate([batch] * 5)))
    return saved.serve(tf.constant(batch)).numpy(), keras.models.load_model(folder / "model.keras")(batch), len(larger)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("mixed_bfloat16", 5e-2)])
def test_both_forms_do_what_the_trained_model_does(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path, precision: str, tolerance: float
) -> None:
    chosen = plan(
        "hardware=cpu", "strategy=mirrored", "hardware.logical_devices=2", f"precision={precision}", "model=cnn",
        "model.filters=[4]", "model.dropout=0.5", "tracking=none",
    )  # fmt: skip
    live = isolated(trained, chosen, tmp_path / "model")
    saved, kept, count = isolated(reloaded, tmp_path / "model")
    assert saved.dtype == np.float32
    assert count == 10
    np.testing.assert_allclose(saved, live[:2], atol=tolerance)
    np.testing.assert_allclose(kept, live[:2], atol=tolerance)
    signature = json.loads((tmp_path / "model" / "signature.json").read_text())
    assert signature["inputs"] == {"dtype": "float32", "shape": [-1, 8, 8, 1]}
    assert signature["outputs"] == {"dtype": "float32", "shape": [-1, 10]}
    assert {"tensorflow", "keras"} < set(signature)


def drawing_layer_from_two_replicas(folder: Path) -> tuple[bool, list[list[int]]]:
    """Whether a SavedModel of a layer that draws when it predicts draws others at the next call; the replicas' seeds.

    The layer counts its calls, too.
    """
    import keras
    import tensorflow as tf

    from scaleflow.model import write_model
    from tests.training.fake_engine import spread_over

    class Noise(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seed = keras.random.SeedGenerator(7)
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            self.calls.assign_add(1.0)
            return x + keras.random.normal((2,), seed=self.seed)

    strategy = spread_over(2)
    with strategy.scope():
        raw = keras.Input((3,))
        net = keras.Model(raw, Noise()(keras.layers.Dense(2)(raw)))
    batch = np.ones((4, 3), np.float32)
    write_model(net, Inputs((3,), "float32"), Outputs("regression", (2,)), batch, "float32", folder)
    loaded = tf.saved_model.load(str(folder / "saved_model"))
    draws = [loaded.serve(tf.constant(batch)).numpy() for _ in range(2)]
    seeds = strategy.experimental_local_results(net.layers[-1].seed.state.value)
    return bool(np.array_equal(*draws)), [seed.numpy().tolist() for seed in seeds]


def test_a_layer_that_draws_when_it_predicts_is_exported_from_replicas(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    assert isolated(drawing_layer_from_two_replicas, tmp_path) == (False, [[7, 0], [7, 0]])


def exported_unfaithfully(folder: Path, kind: str) -> str | None:
    """Exports a model whose SavedModel does something else; gives the error."""
    import keras
    import tensorflow as tf

    from scaleflow.model import write_model

    class Counts(keras.layers.Layer):  # type: ignore[misc]
        """Each tracing gives another function."""

        traced = 0

        def call(self, x: Any) -> Any:
            Counts.traced += 1
            return x + (float(Counts.traced) if kind == "differs" else tf.constant(float("nan")))

    raw = keras.Input((3,))
    net = keras.Model(raw, Counts()(keras.layers.Dense(2)(raw)))
    batch = np.ones((4, 3), np.float32)
    try:
        write_model(net, Inputs((3,)), Outputs("regression", (2,)), batch, "float32", folder)
    except ExportError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", ["differs", "nan"])
def test_a_saved_model_that_differs_is_an_error(isolated: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    message = isolated(exported_unfaithfully, tmp_path / "model", kind)
    assert message is not None
    assert message.startswith("the SavedModel's outputs differ from the trained model's by")
    assert str(tmp_path / "model") in message


def exported_with_random_layers(folder: Path) -> float:
    """How far the SavedModel of a model with Keras's random layers is from what it gives in an evaluation."""
    import keras
    import tensorflow as tf

    from scaleflow.model import write_model

    net = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.RandomRotation(0.5), keras.layers.Flatten()])
    batch = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype(np.float32)
    write_model(net, Inputs((8, 8, 1)), Outputs("regression", (64,)), batch, "float32", folder)
    saved = tf.saved_model.load(str(folder / "saved_model")).serve(tf.constant(batch))
    return float(np.max(np.abs(saved - net(batch, training=False))))


def test_random_layers_rest_in_a_saved_model(isolated: Callable[..., Any], tmp_path: Path) -> None:
    assert isolated(exported_with_random_layers, tmp_path / "model") == 0.0


#: A model whose class tells Keras nothing of its argument.
UNTOLD = """
import keras


class Untold(keras.Model):
    def __init__(self, outputs):
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.dense = keras.layers.Dense(*outputs.shape)

    def call(self, x):
        return self.dense(self.flatten(x))


def build(inputs, outputs):
    return Untold(outputs)
"""


def exported_without_a_keras_file(folder: Path) -> dict[str, Any]:
    """What is exported, and the outputs of the live model, a fresh one with its weights and MLflow's."""
    import mlflow.pyfunc

    from scaleflow.interfaces import LearnedState
    from scaleflow.model import keras_file_fault, make_model, write_model
    from scaleflow.runs.learned_state import write_learned_state
    from scaleflow.tracking.mlflow_model import write_mlflow_model

    (folder / "untold.py").write_text(UNTOLD)
    sys.path.insert(0, str(folder))
    import untold  # type: ignore[import-not-found]

    described = Inputs((4,)), Outputs("regression", (2,))
    net, fresh = (make_model(untold.build, *described) for _ in range(2))
    batch = np.ones((4, 4), np.float32)
    write_model(net, *described, batch, "float32", folder / "model")
    fresh.load_weights(folder / "model" / "model.weights.h5")
    write_learned_state(folder / "model", LearnedState(*described))
    write_mlflow_model(folder / "model", folder / "logged", run_id="run", model_id="m-1")
    return {
        "fault": keras_file_fault(net),
        "files": sorted(path.name for path in (folder / "model").iterdir()),
        "data": sorted(path.name for path in (folder / "logged" / "data").iterdir()),
        "outputs": [
            np.asarray(net(batch)),
            np.asarray(fresh(batch)),
            np.asarray(mlflow.pyfunc.load_model(str(folder / "logged")).predict(batch, params={"output": "logits"})),
        ],
    }


@needs("keras", "3.12")  # older versions write such a model
def test_model_that_keras_cannot_write_is_exported_as_weights_and_saved_model(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    found = isolated(exported_without_a_keras_file, tmp_path)
    assert found["fault"].startswith("NotImplementedError: Object Untold was created by passing non-serializable")
    assert found["files"] == [
        "example_outputs.npz",
        "input_example.npy",
        "learned_state.json",
        "model.weights.h5",
        "saved_model",
        "signature.json",
    ]
    assert found["data"] == ["example_outputs.npz", "learned_state.json", "model.weights.h5", "saved_model"]
    live, *others = found["outputs"]
    for other in others:
        np.testing.assert_allclose(other, live, atol=1e-6)


@pytest.mark.slow
@needs("keras", "3.12")
def test_a_run_of_what_keras_cannot_write_says_so_first_and_finishes(command: Command, empty_store: Path) -> None:
    shutil.copy(empty_store, command.folder / "mlflow.db")
    (command.folder / "untold.py").write_text(UNTOLD)
    option = command.folder / "own" / "model" / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("_target_: untold.build\n_partial_: true\n")
    words = (
        "--config-dir",
        "own",
        "model=mine",
        "training.max_steps=3",
        "hardware=cpu",
        "tracking.system_metrics=false",
    )
    ended = command(*words)
    assert ended.returncode == 0, ended.stderr
    events = command.events()
    (note,) = (event for event in events if "model.weights.h5" in event.get("text", ""))
    assert events.index(note) < next(at for at, event in enumerate(events) if event["event"] == "ready")

    (run_id,) = {json.loads((command.run_folder() / "record.json").read_text())["run_id"]}
    refused = command(*words, f"model.init_from=runs:/{run_id}/model", "hydra.run.dir=again")
    assert refused.returncode == 2
    assert "contains a model that Keras could not write as a .keras file" in refused.stderr
    refused = command.python("-m", "scaleflow", "evaluate", run_id)
    assert refused.returncode == 2
    assert "Keras could not write it as a .keras file" in refused.stderr


#: Names of columns as people have them: symbols, other scripts, equal in lower case, words of Python and Keras.
NAMES = (
    *("_id", "__index_level_0__", "__len__", " age", "age ", "age", "% of total", "$price", "(Intercept)", "-1", "1"),
    *("цена", "Цена", "面积", "価格", "T", "t", "x_1", "X 1", "x.1", "x-1", "class", "from", "self", "None", "True"),
    *("lambda", "inputs", "outputs", "name", "training", "mask", "serve", "file", "args", "kwargs", "Size (m²)", "a:b"),
    *("a;b", 'a"b', "it's", "a,b", "a=b", "{x}", "${y}", "[v2]", "#1", "a\\b", "émile", "e\u0301mile", "Straße", "I"),
    *("i", "İ", "😀", "@home", "~", "*", "column_3", ".", "--help", "null", "x" * 300),
)


def export_named(folder: Path) -> None:
    """Exports a model whose inputs have these names, and compares what a signature answers with NumPy's sum."""
    import keras
    import tensorflow as tf

    from scaleflow.model import write_model

    inputs = {name: Inputs((1,)) for name in NAMES}
    raw = {name: keras.Input((1,)) for name in NAMES}
    model = keras.Model(raw, keras.layers.Add()([raw[name] * float(n) for n, name in enumerate(NAMES)]))
    batch = {name: np.full((2, 1), 1.5 + n % 3, np.float32) for n, name in enumerate(NAMES)}
    write_model(model, inputs, Outputs("regression", (1,)), batch, "float32", folder)
    labels = json.loads((folder / "signature.json").read_text())["arguments"]
    serve = tf.saved_model.load(str(folder / "saved_model")).signatures["serving_default"]
    found = serve(**{labels[name]: tf.constant(values) for name, values in batch.items()})["prediction"].numpy()
    assert found == pytest.approx([sum(n * (1.5 + n % 3) for n in range(len(NAMES)))] * 2)


def test_names_of_inputs_do_not_matter(isolated: Callable[..., Any], tmp_path: Path) -> None:
    assert len(set(NAMES)) >= 60
    isolated(export_named, tmp_path)
