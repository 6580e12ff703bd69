"""Corrects `keras.ops.add` on TensorFlow, which adds some tensors along the wrong axis.

Keras (3.15) takes a second operand with one dimension larger than 1 for a bias if that size is the number of channels
of the first operand, wherever the dimension is. So x + mean(x, axis=-1, keepdims=True) is wrong, without an error, if x
has as many rows as columns: a batch of 8 examples of width 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def correct_keras_add() -> None:
    """Replaces `keras.ops.add` in this process by a function that broadcasts as NumPy does. It can be called again."""
    module = keras.src.backend.numpy
    keras_add = module.add
    if getattr(keras_add, "is_corrected", False):
        return

    def add(x1: Any, x2: Any) -> Any:
        if not is_misread_as_bias(to_static_shape(x1), to_static_shape(x2)):
            return keras_add(x1, x2)
        x1, x2 = keras.ops.convert_to_tensor(x1), keras.ops.convert_to_tensor(x2)
        dtype = keras.backend.result_type(x1.dtype, x2.dtype)
        return tf.add(tf.cast(x1, dtype), tf.cast(x2, dtype))

    add.is_corrected = True  # type: ignore[attr-defined]
    module.add = add


def to_static_shape(value: Any) -> Sequence[int | None] | None:
    """The shape of a dense tensor or array; None for a number, a sparse tensor, and if the rank is unknown."""
    shape = getattr(value, "shape", None)
    if shape is None or isinstance(value, tf.SparseTensor | tf.IndexedSlices):
        return None
    return None if isinstance(shape, tf.TensorShape) and shape.rank is None else tuple(shape)


def is_misread_as_bias(shape: Sequence[int | None] | None, other: Sequence[int | None] | None) -> bool:
    """Whether Keras takes the second operand for a bias although it is not aligned with the channels of the first.

    Args:
        shape: of the first operand.
        other: of the second operand.
    """
    if shape is None or other is None or len(shape) < 2 or len(other) < 2:
        return False
    large = [axis for axis, size in enumerate(other) if size is None or size > 1]
    if len(large) != 1 or other[large[0]] is None or other[large[0]] not in (shape[1], shape[-1]):
        return False
    channels = len(shape) - 1 if shape[-1] == other[large[0]] else 1
    aligned = large[0] + len(shape) - len(other)  # NumPy aligns shapes at their last dimensions
    return len(other) > len(shape) or aligned != channels
