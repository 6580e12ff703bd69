"""Makes `keras.ops.take`, and so `keras.layers.Embedding`, read only the rows of a variable that it returns.

Keras (3.15) reads the whole variable and gathers from that. A parameter server would send the whole table to each
worker in each step, and on one device TensorFlow copies a variable that is updated by rows whenever it is read whole.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

#: Updating all rows of a table of this size takes several times as long as the rest of a small model's step.
LARGE = 100_000


def read_rows_in_take() -> None:
    """Replaces `keras.ops.take` in this process by a function with the same results. It can be called again."""
    module = keras.src.backend.numpy
    keras_take = module.take
    if getattr(keras_take, "reads_rows", False):
        return

    def take(x: Any, indices: Any, axis: int | None = None) -> Any:
        if axis == 0 and can_read_rows(x) and isinstance(indices, tf.Tensor):
            return x._maybe_autocast(look_up_rows(x._value, indices))
        return keras_take(x, indices, axis)

    take.reads_rows = True  # type: ignore[attr-defined]
    module.take = take


def can_read_rows(x: Any) -> bool:
    """Whether `x` is a variable with a value: not in a symbolic call, in which Keras replaces values."""
    if not isinstance(x, keras.Variable) or x._value is None:
        return False
    return not keras.src.backend.common.stateless_scope.in_stateless_scope()


def look_up_rows(variable: Any, rows: tf.Tensor) -> tf.Tensor:
    """Reads rows of a TensorFlow variable, which may be in shards. Like Keras, it counts negative ones from the end."""
    rows = tf.where(rows < 0, rows + tf.cast(variable.shape[0], rows.dtype), rows)
    shards = getattr(variable, "variables", None)
    return tf.gather(variable, rows) if shards is None else tf.nn.embedding_lookup(list(shards), rows)


def list_tables(model: keras.Model) -> list[keras.layers.Embedding]:
    """Lists the layers, at any depth, that look up rows of a table that is trained."""
    layers = (layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding))
    return [layer for layer in layers if any(variable.trainable for variable in layer.variables)]


def list_table_variables(model: keras.Model) -> set[int]:
    """Returns the ids of the trained variables with a row for each number that a layer looks up."""
    return {
        id(variable)
        for layer in list_tables(model)
        for variable in layer.variables
        if variable.shape[0] == layer.input_dim
    }


def describe_large_table(model: keras.Model) -> str | None:
    """Describes the rows of the model's largest table for a message; None if it has fewer than `LARGE` rows."""
    largest = max(list_tables(model), key=lambda layer: layer.input_dim, default=None)
    if largest is None or largest.input_dim < LARGE:
        return None
    return f"all {largest.input_dim:,} rows of the embedding {largest.name}"
