"""Preprocessing: learned once by the chief from the training split, and done by the input pipeline."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.dataset.kept import Transform, refusing_bad
from scaleflow.dataset.records import decoded
from scaleflow.errors import Refusal
from scaleflow.interfaces import Arrays, Examples, Inputs, Preprocessing, Workers

BATCH = 256


def learned_from(preprocessing: Preprocessing, train: Examples, workers: Workers) -> Any:
    """What the chief learns, on every worker.

    Raises:
        Refusal: for an example that cannot be read.
    """

    def learn() -> str:
        with refusing_bad("train", train):
            return json.dumps(preprocessing.learn(raw_batches(train)))

    return json.loads(workers.from_chief(learn))


def raw_batches(examples: Examples) -> Iterator[np.ndarray[Any, Any]]:
    """The raw inputs in their order, [b, *Source.inputs.shape]."""
    if isinstance(examples, Arrays):
        for first in range(0, len(examples), BATCH):
            yield examples.inputs[first : first + BATCH]
        return
    batches = decoded(examples, examples.dataset.take(len(examples))).batch(BATCH)
    yield from batches.map(lambda x, _: x).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()


def made(preprocessing: Preprocessing, learned: Any) -> keras.Layer:
    """The layer, in float32 whatever the model computes in."""
    with in_float32():
        return preprocessing.layer(learned)


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """Layers made here compute in float32."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy)


def transform_by(
    preprocessing: Preprocessing, learned: Any, sample: np.ndarray[Any, Any], features: Inputs
) -> Transform:
    """The preprocessing for the input pipeline, on the host.

    Raises:
        Refusal: if what comes out is not what it says.
    """
    with tf.device("CPU:0"), in_float32():
        layer = preprocessing.layer(learned)
        found = layer(tf.constant(sample))
    if (tuple(found.shape[1:]), found.dtype.name) != (tuple(features.shape), features.dtype):
        name = type(preprocessing).__name__
        raise Refusal(
            f"dataset: {name}.layer gives {found.dtype.name} of shape {tuple(found.shape[1:])}, and its features say "
            f"{features.dtype} of shape {tuple(features.shape)}"
        )

    def transform(inputs: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(layer(inputs), [inputs.shape[0], *features.shape])

    return transform
