"""A source whose examples take their time."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from scaleflow.interfaces import Inputs, Outputs, Stream

SECONDS = 0.01


class Slow:
    """Each example is slept for, in Python."""

    inputs = Inputs((4,))
    outputs = Outputs("classification", (3,))
    splits = ("train",)

    def load(self, split: str) -> Stream:
        return Stream(tf.data.Dataset.range(160), 160, decode=decode)


def decode(number: tf.Tensor) -> Any:
    def sleep(value: Any) -> Any:
        time.sleep(SECONDS)
        return value

    same = tf.ensure_shape(tf.numpy_function(sleep, [number], tf.int64), ())
    return tf.fill([4], tf.cast(same % 7, tf.float32)), tf.cast(same % 3, tf.int32)
