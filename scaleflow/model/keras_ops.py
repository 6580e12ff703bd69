"""Corrects two of Keras's operations on TensorFlow: `keras.ops.add` and `keras.ops.take`.

`add` in Keras (3.15) mistakes some second operands for a bias: those with one dimension larger than 1 whose size is the
number of channels of the first operand, no matter which dimension it is. So x + mean(x, axis=-1, keepdims=True) is
silently wrong if x has as many rows as columns, such as a batch of 8 examples of width 8.

`take`, which `keras.layers.Embedding` uses, reads the whole variable and gathers from it. A parameter server would send
the whole table to each worker in each step. On one device, TensorFlow copies a table with row updates for each such
read. The replacement reads only the rows that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaleflow.compat import keras as private

#: From this number of rows on, updating a whole table takes several times as long as the rest of a small model's step.
LARGE = 100_000


def read_rows_in_take() -> None:
    """Replaces `keras.ops.take` in this process by a function with equal results. Calling it twice is harmless."""

    def take(keras_take: Callable[..., Any], x: Any, indices: Any, axis: int | None = None) -> Any:
        if axis == 0 and can_read_rows(x) and isinstance(indices, tf.Tensor):
            return private.cast_like(x, look_up_rows(private.read_stored(x), indices))
        return keras_take(x, indices, axis)

    private.wrap_once(private.OPERATIONS, "take", take)


def can_read_rows(x: Any) -> bool:
    """Returns whether `x` is a variable with a value. False in stateless calls, where Keras replaces values."""
    is_variable = isinstance(x, keras.Variable) and private.read_stored(x) is not None
    return is_variable and private.find_stateless_scope() is None


def look_up_rows(variable: Any, rows: tf.Tensor) -> tf.Tensor:
    """Reads rows of a TensorFlow variable or its shards. As in Keras, negative row numbers count from the end."""
    rows = tf.where(rows < 0, rows + tf.cast(variable.shape[0], rows.dtype), rows)
    shards = getattr(variable, "variables", None)
    if shards is None:
        return tf.gather(variable, rows)
    return tf.nn.embedding_lookup(list(shards), rows)


def list_tables(model: keras.Model) -> list[keras.layers.Embedding]:
    """Lists the embedding layers, at any depth, that train."""
    tables = []
    for layer in private.flatten_layers(model):
        is_table = isinstance(layer, keras.layers.Embedding)
        if is_table and any(variable.trainable for variable in layer.variables):
            tables.append(layer)
    return tables


def find_table_ids(model: keras.Model) -> set[int]:
    """Returns the `id()` of the tables of all embedding layers that train."""
    ids = set()
    for layer in list_tables(model):
        ids |= {id(variable) for variable in layer.variables if variable.shape[0] == layer.input_dim}
    return ids


def describe_large_table(model: keras.Model) -> str | None:
    """Describes the rows of the model's largest embedding for a message; None if it has fewer than `LARGE` rows."""
    largest = max(list_tables(model), key=lambda layer: layer.input_dim, default=None)
    if largest is None or largest.input_dim < LARGE:
        return None
    return f"all {largest.input_dim:,} rows of the embedding {largest.name}"


def correct_keras_add() -> None:
    """Replaces `keras.ops.add` in this process by one that broadcasts like NumPy. Calling it twice is harmless."""

    def add(keras_add: Callable[[Any, Any], Any], x1: Any, x2: Any) -> Any:
        if not is_misread_as_bias(to_static_shape(x1), to_static_shape(x2)):
            return keras_add(x1, x2)
        x1 = keras.ops.convert_to_tensor(x1)
        x2 = keras.ops.convert_to_tensor(x2)
        dtype = keras.backend.result_type(x1.dtype, x2.dtype)
        return tf.add(tf.cast(x1, dtype), tf.cast(x2, dtype))

    private.wrap_once(private.OPERATIONS, "add", add)


def to_static_shape(value: Any) -> Sequence[int | None] | None:
    """Returns the shape of a dense tensor or array; None for a number, a sparse tensor, or an unknown rank."""
    shape = getattr(value, "shape", None)
    if shape is None or isinstance(value, tf.SparseTensor | tf.IndexedSlices):
        return None
    return None if isinstance(shape, tf.TensorShape) and shape.rank is None else tuple(shape)


def is_misread_as_bias(shape: Sequence[int | None] | None, other: Sequence[int | None] | None) -> bool:
    """Returns whether Keras mistakes the second operand for a bias: it does not line up with the first one's channels.

    Args:
        shape: the shape of the first operand.
        other: the shape of the second operand.
    """
    if shape is None or other is None or len(shape) < 2 or len(other) < 2:
        return False
    large = [axis for axis, size in enumerate(other) if size is None or size > 1]
    if len(large) != 1 or other[large[0]] is None or other[large[0]] not in (shape[1], shape[-1]):
        return False
    channels = len(shape) - 1 if shape[-1] == other[large[0]] else 1
    aligned = large[0] + len(shape) - len(other)  # NumPy aligns shapes at their last dimensions
    return len(other) > len(shape) or aligned != channels
