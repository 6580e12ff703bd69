"""Preprocessing: the chief learns it from the training split, and the input pipeline applies it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.dataset.cache import Transform, refuse_unreadable
from scaleflow.dataset.records import decode_records
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Examples, Inputs, Preprocessing, Workers

BATCH = 256


def learn_on_chief(preprocessing: Preprocessing, train: Examples, workers: Workers) -> Any:
    """Learns the preprocessing on the chief, and returns the result on every worker.

    Raises:
        ConfigError: if an example cannot be read.
    """

    def learn() -> str:
        with refuse_unreadable("train", train):
            return json.dumps(preprocessing.learn(raw_batches(train)))

    return json.loads(workers.from_chief(learn))


def raw_batches(examples: Examples) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the raw inputs in their order, [b, *Source.inputs.shape]."""
    if isinstance(examples, Arrays):
        for first in range(0, len(examples), BATCH):
            yield examples.inputs[first : first + BATCH]
        return
    batches = decode_records(examples, examples.dataset.take(len(examples))).batch(BATCH)
    yield from batches.map(lambda x, _: x).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()


def make_layer(preprocessing: Preprocessing, learned: Any) -> keras.Layer:
    """Returns the layer, in float32 whatever the model's dtype policy is."""
    with use_float32():
        return preprocessing.layer(learned)


@contextlib.contextmanager
def use_float32() -> Iterator[None]:
    """Sets the dtype policy float32 for layers that are made in this context."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy)


def make_transform(
    preprocessing: Preprocessing, learned: Any, sample: np.ndarray[Any, Any], features: Inputs
) -> Transform:
    """Returns the preprocessing function of the input pipeline, on the CPU.

    Raises:
        ConfigError: if the layer turns `sample` (raw inputs) into another shape or dtype than `features`.
    """
    with tf.device("CPU:0"), use_float32():
        layer = preprocessing.layer(learned)
        output = layer(tf.constant(sample))
    if (tuple(output.shape[1:]), output.dtype.name) != (tuple(features.shape), features.dtype):
        name = type(preprocessing).__name__
        raise ConfigError(
            f"dataset: {name}.layer gives {output.dtype.name} of shape {tuple(output.shape[1:])}, and its features say "
            f"{features.dtype} of shape {tuple(features.shape)}"
        )

    def transform(inputs: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(layer(inputs), [inputs.shape[0], *features.shape])

    return transform
