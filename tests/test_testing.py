"""What users test their own parts with: it passes what works, and names what does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Inputs, Outputs, map_leaves, name_leaves
from scaleflow.interfaces.events import MetricsLogged, Note, RunEnded
from scaleflow.testing import Events, Tiny, check_dataset, check_model, check_step, one_step

DICTS = (
    {"words": Inputs((), "string"), "more": {"row": Inputs((4,)), "one": Inputs(())}},
    {
        "class": Outputs("classification", (3,)),
        "positions": Outputs("classification", (2, 3)),
        "label": Outputs("binary", (1,)),
    },
)
KINDS: dict[str, tuple[Any, Any]] = {
    "classification": (Inputs((4,)), Outputs("classification", (3,))),
    "binary": (Inputs((6, 6, 1), "uint8"), Outputs("binary", (1,))),
    "multi_label": (Inputs((5,), "int32", vocabulary=9), Outputs("multi_label", (4,))),
    "regression": (Inputs((4,)), Outputs("regression", (2, 2))),
    "text": (Inputs((), "string"), Outputs("binary", (1,))),
    "dicts": DICTS,
}


class Restless(Tiny):
    def load(self, split: str) -> Arrays:
        found = super().load(split)
        return Arrays(found.inputs + np.random.normal(size=found.inputs.shape).astype("float32"), found.targets)


class Holed(Tiny):
    def load(self, split: str) -> Arrays:
        found = super().load(split)
        found.inputs[1] = np.nan
        return found


class Misshapen(Tiny):
    def load(self, split: str) -> Arrays:
        found = super().load(split)
        return Arrays(found.inputs[:, :2], found.targets)


def net(inputs: Inputs, outputs: Outputs, units: int = 4, idle: bool = False, wide: bool = False) -> Any:
    import keras

    given = keras.Input(inputs.shape)
    hidden = keras.layers.Dense(units, activation="relu")(given)
    returned = keras.layers.Dense(outputs.shape[-1] + wide)(hidden)
    if idle:
        returned = returned + keras.ops.stop_gradient(keras.layers.Dense(1, name="asleep")(hidden))
    return keras.Model(given, returned)


def named(inputs: Any, outputs: Any, missing: bool = False, listed: bool = False, as_list: bool = False) -> Any:
    """Takes the numbers of `DICTS`, and returns its outputs, but for one, or as a list."""
    import keras

    raw = {"row": keras.Input((4,), name="row"), "one": keras.Input((), name="one")}
    x = keras.layers.Concatenate()([raw["row"], keras.layers.Reshape((1,))(raw["one"])])
    returned = {name: head(x, each, name=name) for name, each in outputs.items() if not missing or name != "label"}
    return keras.Model([*raw.values()] if as_list else raw, list(returned.values()) if listed else returned)


def head(x: Any, outputs: Outputs, name: str) -> Any:
    import keras

    return keras.layers.Reshape(outputs.shape)(keras.layers.Dense(math.prod(outputs.shape), name=name)(x))


def of_dicts(model: Any, batch: Any, weights: Any) -> Any:
    import keras
    import tensorflow as tf

    inputs, targets = batch
    outputs = model({**inputs, "row": inputs["row"] * 2}, training=True)
    losses = keras.losses.sparse_categorical_crossentropy(targets["class"], outputs["class"], from_logits=True)
    return tf.reduce_sum(losses * weights), outputs


def of_a_part(model: Any, batch: Any, weights: Any) -> Any:
    loss, outputs = of_dicts(model, batch, weights)
    return loss, outputs["class"]


def of_means(model: Any, batch: Any, weights: Any) -> Any:
    import tensorflow as tf

    outputs = model(batch[0], training=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], outputs)), outputs


def of_nothing(model: Any, batch: Any, weights: Any) -> Any:
    import tensorflow as tf

    outputs = model(batch[0], training=True)
    return tf.reduce_sum(weights), outputs


def of_infinity(model: Any, batch: Any, weights: Any) -> Any:
    import tensorflow as tf

    outputs = model(batch[0], training=True)
    return tf.reduce_sum(outputs) * float("inf"), outputs


class Updates:
    """A step that applies its own optimizers."""


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as found:
        call()
    return str(found.value)


def try_all() -> dict[str, Any]:
    from scaleflow.training.examples import consistent

    results: dict[str, Any] = {}
    for kind, (inputs, outputs) in KINDS.items():
        results[kind] = check_dataset(Tiny(inputs, outputs))
    results["restless"] = refused(lambda: check_dataset(Restless()))
    results["holed"] = refused(lambda: check_dataset(Holed()))
    results["misshapen"] = refused(lambda: check_dataset(Misshapen()))
    results["model"] = check_model(net, units=7).count_params()
    results["idle"] = refused(lambda: check_model(net, idle=True))
    results["wide"] = refused(lambda: check_model(net, wide=True))
    results["argument"] = refused(lambda: check_model(net, unist=3))
    results["step"] = check_step(consistent, smoothing=0.2)
    results["means"] = refused(lambda: check_step(of_means))
    results["nothing"] = refused(lambda: check_step(of_nothing))
    results["infinity"] = refused(lambda: check_step(of_infinity, net))
    results["class"] = refused(lambda: check_step(Updates))
    numbers = DICTS[0]["more"], DICTS[1]
    results["named"] = check_model(named, *numbers).count_params()
    results["named step"] = check_step(of_dicts, named, *numbers)
    results["part"] = refused(lambda: check_step(of_a_part, named, *numbers))
    results["missing"] = refused(lambda: check_model(named, *numbers, missing=True))
    results["listed"] = refused(lambda: check_model(named, *numbers, listed=True))
    results["list"] = refused(lambda: check_model(named, *numbers, as_list=True))
    results["other inputs"] = refused(lambda: check_model(named, {"row": Inputs((4,)), "two": Inputs(())}, DICTS[1]))
    results["one input"] = refused(lambda: check_model(named, Inputs((4,)), DICTS[1]))
    results["for one tensor"] = refused(lambda: check_model(net, *numbers))
    results["run"] = one_step("dataset=synthetic", "dataset.examples=100", "dataset.shape=[4]", "model=linear")
    results["no run"] = refused(lambda: one_step("model=cnn", "dataset=synthetic", "dataset.shape=[4]"))
    return results


@pytest.mark.slow
def test_checks_pass_or_name_the_fault(isolated: Callable[..., Any]) -> None:
    results = isolated(try_all, timeout=240)
    for kind, (inputs, outputs) in KINDS.items():
        assert results[kind].counts == {"train": 32, "test": 8}
        assert (results[kind].inputs, results[kind].outputs) == (inputs, outputs)
        x, y = results[kind].batch
        assert map_leaves(lambda array: array.shape, x) == map_leaves(lambda each: (4, *each.shape), inputs)
        for name, targets in name_leaves(y).items():
            assert len(set(np.ravel(targets))) > 1, name
    assert (
        results["restless"]
        == "dataset: load('train') returns different examples on each call; seed its random operations"
    )
    assert results["holed"] == "dataset: inputs of 'train' contain NaN or Inf"
    assert "the source says (4,)" in results["misshapen"]
    assert results["model"] == 5 * 7 + 8 * 3
    assert "asleep/kernel" in results["idle"]
    assert "have no influence on its output" in results["idle"]
    assert "returns outputs of shape (batch, 4)" in results["wide"]
    assert "model.unist=3: net has no such argument" in results["argument"]
    assert 0.1 < results["step"] < 10
    assert "with an example of weight 0, padding, the loss of of_means is" in results["means"]
    assert "the loss of of_nothing does not depend on the model's weights" in results["nothing"]
    assert "the loss of of_infinity is" in results["infinity"]
    assert "Updates is a class; test it with one_step" in results["class"]
    assert results["named"] == 6 * (3 + 6 + 1)
    assert 0.1 < results["named step"] < 10
    assert results["part"] == (
        "training.step._target_=of_a_part: returned outputs that are one tensor, but the dataset's outputs have the "
        "keys class, label, positions"
    )
    assert results["missing"] == (
        "model: its outputs have the keys class, positions, but the dataset's outputs have the keys class, label, "
        "positions"
    )
    assert results["listed"] == (
        "model: returned a list of 3 tensors, expected a dict with the outputs' names; build it with "
        "keras.Model(inputs, {'class': ..., 'positions': ..., 'label': ...})"
    )
    assert results["list"] == (
        "model: its inputs are a list of 2, but the dataset's inputs have the keys one, row; build it with "
        "keras.Model({'row': ..., 'one': ...}, outputs)"
    )
    assert results["other inputs"] == (
        "model: its inputs have the keys one, row, but the dataset's inputs have the keys row, two; build it with "
        "keras.Model({'row': ..., 'two': ...}, outputs)"
    )
    assert results["one input"] == ("model: its inputs have the keys one, row, but the dataset's inputs are one tensor")
    assert results["for one tensor"].startswith(
        "model: its function fails for a dataset whose inputs have the keys one, row and whose outputs have the keys "
        "class, label, positions: AttributeError"
    )
    events = results["run"]
    assert events.status == "FINISHED"
    assert events.params["model"] == "linear"
    assert [step for step, _ in events.history("train/loss")] == [1]
    assert events.last("test/loss") > 0
    with pytest.raises(KeyError, match=r"train/los; the metrics are .*train/loss"):
        events.last("train/los")
    assert "model" in results["no run"]


def test_events_are_kept_as_they_come() -> None:
    emit = Events()
    emit(Note("something"))
    emit(MetricsLogged(1, {"a": 0.5}))
    emit(MetricsLogged(2, {"a": 0.25, "b": 1.0}))
    assert emit.notes == ["something"]
    assert emit.history("a") == [(1, 0.5), (2, 0.25)]
    assert emit.last("b") == 1.0
    assert (emit.status, emit.params) == (None, {})
    emit(RunEnded("FAILED", "x"))
    assert emit.status == "FAILED"
