"""The signatures of a SavedModel: functions from logits to what a user wants to know, in TensorFlow's operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from scaleflow.interfaces import Outputs, OutputStructure, name_leaves
from scaleflow.serving.answers import is_one_of_several

Signature = Callable[[Any], dict[str, tf.Tensor]]


def make_signatures(outputs: OutputStructure) -> Mapping[str, Signature]:
    """Returns the functions from outputs [batch, ...] to tensors by name, by the name of the signature.

    `serving_default`: `prediction` (the name of a class, or its number if classes have no names; the label's truth; the
    value) and `probability`. `probabilities`: `probabilities` [batch, ..., classes], in the order of the record
    `learned_state.json`; it is left out if no output has probabilities. `logits`: the outputs as they are. With several
    outputs, names begin with that of the output, except those of `logits`, which are the names of the outputs.
    """
    described = name_leaves(outputs)

    def answer(make: Callable[[Outputs, tf.Tensor], dict[str, tf.Tensor]], values: Any) -> dict[str, tf.Tensor]:
        return {
            f"{name}_{key}" if name else key: tensor
            for name, each in name_leaves(values).items()
            for key, tensor in make(described[name], each).items()
        }

    signatures: dict[str, Signature] = {"serving_default": lambda values: answer(make_predictions, values)}
    if any(each.kind != "regression" for each in described.values()):
        signatures["probabilities"] = lambda values: answer(make_probabilities, values)
    signatures["logits"] = lambda values: {name or "logits": each for name, each in name_leaves(values).items()}
    return signatures


def make_predictions(described: Outputs, values: tf.Tensor) -> dict[str, tf.Tensor]:
    chances = make_probabilities(described, values).get("probabilities")
    if chances is None:
        return {"prediction": tf.squeeze(values, -1) if values.shape[1:] == (1,) else values}
    if not is_one_of_several(described):
        return {"prediction": chances >= 0.5, "probability": chances}
    best = tf.argmax(chances, axis=-1)
    prediction = best if described.names is None else tf.gather(tf.constant(described.names), best)
    return {"prediction": prediction, "probability": tf.reduce_max(chances, axis=-1)}


def make_probabilities(described: Outputs, values: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns `probabilities` [batch, ..., classes], or [batch, labels]; nothing for values."""
    if described.kind == "regression":
        return {}
    if described.kind == "classification":
        return {"probabilities": tf.nn.softmax(values)}
    chances = tf.sigmoid(values)
    if not is_one_of_several(described):
        return {"probabilities": chances}
    chance = tf.reshape(chances, [-1])
    return {"probabilities": tf.stack([1 - chance, chance], axis=-1)}
