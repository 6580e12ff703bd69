"""Datasets and models with several inputs and outputs, targets for each position, and weights, for `test_structures`.

Each dataset is in memory, or with `streams=true` a stream whose records are decoded to dicts.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from scaleflow.interfaces import Arrays, Examples, Inputs, Outputs, Stream

#: 100 examples make 3 steps of 48 an epoch, the last one partial.
EXAMPLES = {"train": 100, "validation": 40, "test": 30}


class Structured:
    """Base: a subclass gives `inputs`, `outputs` and `arrays`."""

    splits = tuple(EXAMPLES)
    inputs: Any = Inputs((6,))
    outputs: Any = Outputs("classification", (3,))

    def __init__(self, streams: bool = False) -> None:
        self._streams = streams

    def load(self, split: str) -> Examples:
        random = np.random.default_rng(list(EXAMPLES).index(split))
        arrays = self.arrays(random, EXAMPLES[split])
        return to_stream(arrays) if self._streams else arrays

    def arrays(self, random: np.random.Generator, count: int) -> Arrays:
        raise NotImplementedError


def to_stream(arrays: Arrays) -> Stream:
    """The same examples by their number."""
    import tensorflow as tf

    parts = tf.nest.map_structure(tf.constant, arrays.parts)

    def decode(number: Any) -> Any:
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, number), parts)

    return Stream(tf.data.Dataset.range(len(arrays)), len(arrays), decode)


def classes_of(values: Any, count: int) -> Any:
    """Which of `count` equally large groups the sums are in."""
    ranks = np.argsort(np.argsort(values.reshape(len(values), -1).sum(axis=1)))
    return (ranks * count // len(values)).astype(np.int32)


class DictIn(Structured):
    """A picture, a word and two readings, one of them nested; one class."""

    inputs = {  # noqa: RUF012
        "picture": Inputs((4, 4, 1), "uint8", scale=1 / 255),
        "word": Inputs((), "int32", vocabulary=5),
        "readings": {"hot": Inputs((2,)), "cold": Inputs(())},
    }

    def arrays(self, random: np.random.Generator, count: int) -> Arrays:
        hot = random.normal(size=(count, 2)).astype(np.float32)
        inputs = {
            "picture": random.integers(0, 256, (count, 4, 4, 1)).astype(np.uint8),
            "word": random.integers(0, 5, count).astype(np.int32),
            "readings": {"hot": hot, "cold": random.normal(size=count).astype(np.float32)},
        }
        return Arrays(inputs, classes_of(hot, 3))


class DictOut(DictIn):
    """The same inputs; a class, two numbers, and labels."""

    outputs = {  # noqa: RUF012
        "kind": Outputs("classification", (3,), names=("a", "b", "c")),
        "amounts": Outputs("regression", (2,)),
        "labels": Outputs("multi_label", (2,)),
    }

    def arrays(self, random: np.random.Generator, count: int) -> Arrays:
        arrays = super().arrays(random, count)
        hot = arrays.inputs["readings"]["hot"]
        targets = {"kind": arrays.targets, "amounts": hot * 2 + 1, "labels": (hot > 0).astype(np.float32)}
        return Arrays(arrays.inputs, targets)


class Positions(Structured):
    """A class for each of 6 positions; a tenth of the positions counts nowhere."""

    outputs = Outputs("classification", (6, 3), ignore=-1)

    def arrays(self, random: np.random.Generator, count: int) -> Arrays:
        x = random.normal(size=(count, 6)).astype(np.float32)
        targets = np.digitize(x, [-0.5, 0.5]).astype(np.int32)
        return Arrays(x, np.where(random.random(x.shape) < 0.1, np.int32(-1), targets))


class Weighted(Structured):
    """Examples with weights, some of them 0."""

    def arrays(self, random: np.random.Generator, count: int) -> Arrays:
        x = random.normal(size=(count, 6)).astype(np.float32)
        return Arrays(x, classes_of(x, 3), np.maximum(0, random.normal(1, 1, count)).astype(np.float64))


class Everything(DictOut):
    """The same with a class for each of two positions, some of which count nowhere, and weights."""

    outputs = DictOut.outputs | {"each": Outputs("classification", (2, 3), ignore=-1)}

    def arrays(self, random: np.random.Generator, count: int) -> Arrays:
        arrays = super().arrays(random, count)
        each = np.digitize(arrays.inputs["readings"]["hot"], [-0.5, 0.5]).astype(np.int32)
        each = np.where(random.random(each.shape) < 0.1, np.int32(-1), each)
        weights = np.maximum(0, random.normal(1, 1, count)).astype(np.float64)
        return Arrays(arrays.inputs, arrays.targets | {"each": each}, weights)


def two_towers(inputs: Any, outputs: Any, **unused: Any) -> keras.Model:
    """Inputs that enter, and outputs that leave, at several depths."""
    raw = {
        "picture": keras.Input((4, 4, 1), dtype="uint8"),
        "word": keras.Input((), dtype="int32"),
        "readings": {"hot": keras.Input((2,)), "cold": keras.Input(())},
    }
    picture = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(raw["picture"]))
    x = keras.layers.Dense(8, activation="tanh", name="first")(picture)
    word = keras.layers.Embedding(inputs["word"].vocabulary, 4, name="words")(raw["word"])
    cold = keras.layers.Reshape((1,))(raw["readings"]["cold"])
    early = keras.layers.Concatenate()([x, raw["readings"]["hot"], cold])
    early = keras.layers.Dense(8, activation="tanh", name="second")(early)
    late = keras.layers.Dense(8, activation="tanh", name="third")(keras.layers.Concatenate()([early, word]))
    if isinstance(outputs, Outputs):
        return keras.Model(raw, keras.layers.Dense(3, dtype="float32", name="outputs")(late))
    amounts = keras.layers.Dense(2, dtype="float32", name="amounts")(early)
    kind = keras.layers.Dense(3, dtype="float32", name="kind")(keras.layers.Concatenate()([late, amounts]))
    labels = keras.layers.Dense(2, dtype="float32", name="labels")(late)
    made = {"kind": kind, "amounts": amounts, "labels": labels}
    if "each" in outputs:
        made["each"] = keras.layers.Reshape((2, 3), dtype="float32")(keras.layers.Dense(6, name="each")(late))
    return keras.Model(raw, made)


def tied_towers(inputs: Any, outputs: Any, **unused: Any) -> keras.Model:
    """For `DictOut`: a layer that is called twice and has losses of its own, and a skip over it."""
    raw = {
        "picture": keras.Input((4, 4, 1), dtype="uint8"),
        "word": keras.Input((), dtype="int32"),
        "readings": {"hot": keras.Input((2,)), "cold": keras.Input(())},
    }
    picture = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(raw["picture"]))
    first = keras.layers.Dense(8, activation="tanh", name="first")(picture)
    twice = keras.layers.Dense(8, "tanh", kernel_regularizer="l2", activity_regularizer="l2", name="twice")
    amounts = keras.layers.Dense(2, dtype="float32", name="amounts")(twice(first))
    word = keras.layers.Embedding(inputs["word"].vocabulary, 8, name="words")(raw["word"])
    parts = [twice(twice(first)), first, word, raw["readings"]["hot"]]
    late = keras.layers.Dense(8, activation="tanh", name="late")(keras.layers.Concatenate(name="joined")(parts))
    kind = keras.layers.Dense(3, dtype="float32", name="kind")(keras.layers.Concatenate()([late, amounts]))
    labels = keras.layers.Dense(2, dtype="float32", name="labels")(late)
    return keras.Model(raw, {"kind": kind, "amounts": amounts, "labels": labels})


def mean_loss(model: Any, batch: Any, weights: Any) -> Any:
    """A training step: the squared error of the amounts alone."""
    import tensorflow as tf

    inputs, targets = batch
    outputs = model(inputs, training=True)
    losses = tf.reduce_mean(tf.square(targets["amounts"] - outputs["amounts"]), axis=-1)
    return tf.reduce_sum(losses * weights), outputs


class OwnUpdates:
    """The same, with an optimizer of its own."""

    def build(self, model: Any, make_optimizer: Any) -> None:
        self.variables = model.trainable_variables
        self.optimizer = make_optimizer(self.variables)

    def update(self, model: Any, batch: Any, weights: Any) -> Any:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss, outputs = mean_loss(model, batch, weights)
        gradients = tape.gradient(loss, self.variables)
        pairs = [(g, v) for g, v in zip(gradients, self.variables, strict=True) if g is not None]
        self.optimizer.apply_gradients(pairs)
        return loss, outputs
