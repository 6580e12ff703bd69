"""Steps and layers of a user's with state that Keras does not know."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

#: The state of `step`, by the id of its model, which it holds.
STATES: dict[int, tuple[Any, Any, Any]] = {}


def lose(model: Any, batch: Any, weights: Any, noise: Any, factor: Any = 1.0) -> tuple[Any, Any]:
    inputs, targets = batch
    outputs = model(tf.cast(inputs, tf.float32) + noise, training=True)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)
    return factor * tf.reduce_sum(losses * weights), outputs


def step(model: Any, batch: Any, weights: Any) -> tuple[Any, Any]:
    """Draws from a generator of its own, and counts its calls."""
    if id(model) not in STATES:
        with tf.init_scope():
            STATES[id(model)] = keras.random.SeedGenerator(5), tf.Variable(1.0, trainable=False), model
    seed, count, _ = STATES[id(model)]
    count.assign_add(0.1)
    return lose(model, batch, weights, keras.random.normal(tf.shape(batch[0]), seed=seed), count)


def step_of_tensorflow(model: Any, batch: Any, weights: Any) -> tuple[Any, Any]:
    return lose(model, batch, weights, tf.random.normal(tf.shape(batch[0])))


class Untracked(keras.layers.Layer):  # type: ignore[misc]  # keras has no types
    """Holds a variable in a list, in a generator, or in an object that nobody looks into."""

    def __init__(self, place: str) -> None:
        super().__init__(name="scale")
        if place == "list":
            self.factors = [tf.Variable(2.0)]
        elif place == "generator":
            self.random = tf.random.Generator.from_seed(1)
        else:
            self.hidden = type("Hidden", (), {"variable": tf.Variable(2.0, name="hidden")})()
        self.place = place

    def call(self, x: Any) -> Any:
        if self.place == "generator":
            return x + self.random.normal(tf.shape(x))
        return x * (self.factors[0] if self.place == "list" else self.hidden.variable)


def build(inputs: Any, outputs: Any, place: str) -> Any:
    raw = keras.Input(inputs.shape)
    x = Untracked(place)(keras.layers.Flatten()(raw))
    return keras.Model(raw, keras.layers.Dense(*outputs.shape)(x))
