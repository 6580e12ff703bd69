"""What users test their own parts with: it passes what works, and names what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.events import MetricsLogged, Note, RunEnded
from scaleflow.interfaces import Arrays, Inputs, Outputs
from scaleflow.testing import Events, Tiny, check_dataset, check_model, check_step, one_step

KINDS = {
    "classification": (Inputs((4,)), Outputs("classification", (3,))),
    "binary": (Inputs((6, 6, 1), "uint8"), Outputs("binary", (1,))),
    "multi_label": (Inputs((5,), "int32", vocabulary=9), Outputs("multi_label", (4,))),
    "regression": (Inputs((4,)), Outputs("regression", (2, 2))),
    "text": (Inputs((), "string"), Outputs("binary", (1,))),
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
    results["run"] = one_step("dataset=synthetic", "dataset.examples=100", "dataset.shape=[4]", "model=linear")
    results["no run"] = refused(lambda: one_step("model=cnn", "dataset=synthetic", "dataset.shape=[4]"))
    return results


@pytest.mark.slow
def test_what_works_passes_and_what_does_not_is_named(isolated: Callable[..., Any]) -> None:
    results = isolated(try_all, timeout=240)
    for kind, (inputs, outputs) in KINDS.items():
        assert results[kind].counts == {"train": 32, "test": 8}
        assert (results[kind].inputs, results[kind].outputs) == (inputs, outputs)
        assert results[kind].batch[0].shape == (4, *inputs.shape)
        assert len(set(np.ravel(results[kind].batch[1]))) > 1
    assert (
        results["restless"]
        == "dataset: load('train') gives other examples when it is called again; seed what is random"
    )
    assert results["holed"] == "dataset: inputs of 'train' hold NaN or Inf"
    assert "the source says (4,)" in results["misshapen"]
    assert results["model"] == 5 * 7 + 8 * 3
    assert "asleep/kernel" in results["idle"]
    assert "have no influence on what it returns" in results["idle"]
    assert "returns outputs of shape (batch, 4)" in results["wide"]
    assert "model.unist=3: net does not take it" in results["argument"]
    assert 0.1 < results["step"] < 10
    assert "with an example of weight 0, padding, the loss of of_means is" in results["means"]
    assert "the loss of of_nothing does not depend on the model's weights" in results["nothing"]
    assert "the loss of of_infinity is" in results["infinity"]
    assert "Updates is a class; try it by one_step" in results["class"]
    events = results["run"]
    assert events.status == "FINISHED"
    assert events.params["model"] == "linear"
    assert [step for step, _ in events.history("train/loss")] == [1]
    assert events.last("test/loss") > 0
    with pytest.raises(KeyError, match=r"train/los; there is .*train/loss"):
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
