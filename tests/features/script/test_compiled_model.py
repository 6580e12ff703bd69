"""`scaleflow.run(model=compiled, data=...)`: Keras trains in a worker, as compiled; what cannot travel is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import scaleflow
from scaleflow.errors import ConfigError
from tests.features.script.runs import join_histories

SHORT = ("tracking=none", "hardware=cpu", "fit.epochs=2", "fit.batch_size=16")


def make_data() -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    inputs = [random.random((64, 3)).astype("float32"), random.random((64, 2)).astype("float32")]
    outputs = {"a": inputs[0].sum(1, keepdims=True), "b": (inputs[1].sum(1) > 1).astype("int32")}
    return inputs, outputs, random.random(64).astype("float32")


def make_model() -> Any:
    import keras

    first = keras.Input((3,), name="first")
    second = keras.Input((2,), name="second")
    joined = keras.layers.Dropout(0.3)(keras.layers.Concatenate()([first, second]))
    a = keras.layers.Dense(1, name="a")(joined)
    b = keras.layers.Dense(2, activation="softmax", name="b")(joined)
    model = keras.Model([first, second], {"a": a, "b": b})
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)
    model.compile(
        keras.optimizers.SGD(rate, momentum=0.5, clipnorm=1.0),
        loss={"a": keras.losses.LogCosh(), "b": keras.losses.SparseCategoricalCrossentropy()},
        loss_weights={"a": 2.0, "b": 0.3},
        metrics={"a": ["mape"], "b": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(1)]},
        weighted_metrics={"a": ["mae"]},
    )
    return model


def train_both_ways(folder: str) -> Any:
    import keras

    os.chdir(folder)
    x, y, weights = make_data()
    keras.utils.set_random_seed(1)
    model = make_model()
    model.fit(x, y, epochs=1, batch_size=16, verbose=0)  # its optimizer has a state
    before = [weight.copy() for weight in model.get_weights()]
    parts = {"x_train": x, "y_train": y, "w_train": weights, "x_val": x, "y_val": y, "w_val": 2 * weights}
    result = scaleflow.run(*SHORT, "seed=5", model=model, data=parts, folder="run")
    unchanged = all(map(np.array_equal, before, model.get_weights()))
    keras.utils.set_random_seed(5)
    plain = model.fit(
        x, y, epochs=2, batch_size=16, sample_weight=weights, validation_data=(x, y, 2 * weights), verbose=0
    )
    trained = keras.models.load_model("run/model/model.keras")
    weights_differ = max(
        float(np.abs(one - other).max()) for one, other in zip(model.get_weights(), trained.get_weights(), strict=True)
    )
    recorded = {name: list(points.values()) for name, points in result.history.items()}
    return recorded, plain.history, unchanged, weights_differ


def test_keras_trains_a_compiled_model_with_the_bits_of_its_own_fit(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    recorded, plain, unchanged, weights_differ = isolated(train_both_ways, str(tmp_path))
    assert len(plain) == 14
    for name, values in join_histories([plain]).items():
        assert recorded[name] == values, name
    assert unchanged
    assert weights_differ == 0


def refuse_many(folder: str) -> list[str]:
    import keras

    os.chdir(folder)

    class Own(keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return inputs

    class OwnModel(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            return {}

    def own_loss(true: Any, predicted: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(true - predicted))

    raw = keras.Input((2,))
    dense = keras.layers.Dense(1)(raw)

    def compile_model(output: Any = dense, kind: Any = keras.Model, **options: Any) -> Any:
        model = kind(raw, output)
        model.compile(**{"loss": "mse", **options})
        return model

    x, y = np.ones((4, 2)), np.ones((4, 1))
    changed = compile_model()
    changed.train_step = lambda data: {}
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    cases: list[tuple[Any, Any, tuple[str, ...]]] = [
        (compile_model(loss=own_loss), (x, y), ()),
        (compile_model(loss=lambda a, b: a - b), (x, y), ()),
        (compile_model(metrics=[own_loss]), (x, y), ()),
        (compile_model(Own()(dense)), (x, y), ()),
        (compile_model(kind=OwnModel), (x, y), ()),
        (changed, (x, y), ()),
        (unbuilt, (x, y), ()),
        (compile_model(), (x,), ()),
        (compile_model(), (x, [1, 2]), ()),
        (compile_model(), {"x_train": x, "y_train": y, "x_val": x}, ()),
        (compile_model(), {"x": x, "y": y, "z": y}, ()),
        (compile_model(), None, ()),
        (compile_model(), (x, y), ("precision=mixed",)),
        (compile_model(), (x, y), ("optimizer=adam",)),
        (compile_model(), (x, y), ("objective.loss=mse",)),
        (compile_model(), (x, y), ("fit.callbacks=x",)),
        (compile_model(), (x, y), ("strategy=pipeline",)),
    ]
    messages: list[str] = []
    for model, data, words in cases:
        try:
            scaleflow.run(*words, model=model, data=data)
            messages.append("accepted")
        except ConfigError as refusal:
            messages.append(str(refusal))
    try:
        scaleflow.run(scaleflow.compose("tracking=none"), model=compile_model(), data=(x, y))
    except ConfigError as refusal:
        messages.append(str(refusal))
    return [*messages, f"{len(list(Path(folder).iterdir()))} files"]


def test_what_cannot_train_as_compiled_is_refused_before_a_process_starts(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    messages = isolated(refuse_many, str(tmp_path))
    expected = [
        "cannot load own_loss, which is your own code; scaleflow.fit(model, x, y) trains it in this process",
        "cannot load a lambda",
        "cannot load own_loss",
        "cannot load Own",
        "run(model=OwnModel): another process cannot load your own class of a model",
        "the model has its own train_step",
        "the model has no weights yet",
        "run(data=tuple) with a compiled model: give (x, y), (x, y, sample_weight)",
        "y[0] is a int; a compiled model needs NumPy arrays",
        "parts are missing",
        "'z' is no argument of a compiled model's fit",
        "run(data=NoneType) with a compiled model",
        "precision=mixed: the model is compiled, so Keras trains it",
        "optimizer=adam: the model is compiled",
        "objective.loss=mse: the model is compiled",
        "fit.callbacks",
        "cannot divide a model into stages",
        "write words in place of the config",
        "0 files",
    ]
    assert len(messages) == len(expected)
    for message, part in zip(messages, expected, strict=True):
        assert part in message


def find_lost(folder: str) -> tuple[list[Any], bool, list[Any]]:
    import keras

    from scaleflow.features.script.compiled_model import find_lost_values

    loss = keras.losses.Huber(0.5)
    loaded = keras.losses.Huber.from_config(loss.get_config())
    is_equal = float(loss(np.zeros(1), np.full(1, 9.0))) == float(loaded(np.zeros(1), np.full(1, 9.0)))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    metrics = [keras.metrics.AUC(num_thresholds=50), keras.metrics.MeanSquaredError(name="own")]
    model.compile("sgd", [loss], metrics=metrics)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    lost = list(find_lost_values(model))
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1), metrics=metrics)
    return lost, is_equal, list(find_lost_values(model))


def test_a_value_that_keras_does_not_load_again_is_found(isolated: Callable[..., Any], tmp_path: Path) -> None:
    lost, is_equal, others = isolated(find_lost, str(tmp_path))
    assert bool(lost) is not is_equal
    assert all(part == "Huber" and "delta" in value and "0.5" in value for part, value in lost)
    assert others == []
