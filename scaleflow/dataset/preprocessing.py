"""Preprocessing: learned once by the chief from the training split, and done by the input pipeline."""

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
    """What the chief learns, on every worker.

    Raises:
        ConfigError: for an example that cannot be read.
    """

    def learn() -> str:
        with refuse_unreadable("train", train):
            return json.dumps(preprocessing.learn(raw_batches(train)))

    return json.loads(workers.from_chief(learn))


def raw_batches(examples: Examples) -> Iterator[np.ndarray[Any, Any]]:
    """The raw inputs in their order, [b, *Source.inputs.shape]."""
    if isinstance(examples, Arrays):
        for first in range(0, len(examples), BATCH):
            yield examples.inputs[first : first + BATCH]
        return
    batches = decode_records(examples, examples.dataset.take(len(examples))).batch(BATCH)
    yield from batches.map(lambda x, _: x).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()


def make_layer(preprocessing: Preprocessing, learned: Any) -> keras.Layer:
    """The layer, in float32 whatever the model computes in."""
    with use_float32():
        return preprocessing.layer(learned)


@contextlib.contextmanager
def use_float32() -> Iterator[None]:
    """Layers made here compute in float32."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy)


def make_transform(
    preprocessing: Preprocessing, learned: Any, sample: np.ndarray[Any, Any], features: Inputs
) -> Transform:
    """The preprocessing for the input pipeline, on the host.

    Raises:
        ConfigError: if what comes out is not what it says.
    """
    with tf.device("CPU:0"), use_float32():
        layer = preprocessing.layer(learned)
        found = layer(tf.constant(sample))
    if (tuple(found.shape[1:]), found.dtype.name) != (tuple(features.shape), features.dtype):
        name = type(preprocessing).__name__
        raise ConfigError(
            f"dataset: {name}.layer gives {found.dtype.name} of shape {tuple(found.shape[1:])}, and its features say "
            f"{features.dtype} of shape {tuple(features.shape)}"
        )

    def transform(inputs: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(layer(inputs), [inputs.shape[0], *features.shape])

    return transform
