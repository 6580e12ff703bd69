"""Gradients of embedding tables by rows: a step then costs as much as its batch has rows, not as the table has.

TensorFlow gives the gradient of a lookup as `tf.IndexedSlices`: row numbers, and a gradient for each of them. A row
that occurs twice must be summed before its norm or its square is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

#: The gradient of a variable; None if the loss does not depend on it.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None

#: A gradient is kept by rows if the table has at least this many times as many rows. Measured on a CPU: at a third the
#: search for equal rows takes as long as a dense update of the table.
ROWS_PER_ID = 3


def make_dense(gradient: Gradient) -> tf.Tensor | None:
    """Converts a gradient to a dense tensor. Rows that occur several times are summed."""
    return None if gradient is None else tf.convert_to_tensor(gradient)


def keep_rows(gradient: Gradient, variable: Any) -> Gradient:
    """Keeps a gradient by rows if it has few rows compared to its variable, else makes it dense."""
    if not isinstance(gradient, tf.IndexedSlices) or not isinstance(gradient.values, tf.Tensor):
        return make_dense(gradient)
    count = gradient.indices.shape[0]  # None if it is known only in the step: a table in shards
    return gradient if count is None or ROWS_PER_ID * count <= variable.shape[0] else make_dense(gradient)


def sum_rows(gradient: Gradient) -> Gradient:
    """Sums rows that occur several times, so that each row occurs once. Leaves a dense gradient unchanged."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


class RowStore:
    """Collects the rows of one variable's gradients over the micro-batches of a loop in the graph.

    Args:
        like: the gradient of a micro-batch, of which only the dtypes and static shapes are used.
        variable: the variable.
        count: the number of micro-batches.

    Attributes:
        start: the arrays before the first micro-batch.
    """

    def __init__(self, like: tf.IndexedSlices, variable: Any, count: int) -> None:
        self._shape = tuple(variable.shape)
        self.start = tuple(
            tf.TensorArray(part.dtype, count, element_shape=part.shape, infer_shape=False)
            for part in (like.values, like.indices)
        )

    @staticmethod
    def add(arrays: Sequence[Any], index: tf.Tensor, gradient: tf.IndexedSlices) -> tuple[Any, Any]:
        """Returns the arrays with the gradient of micro-batch `index`."""
        values, rows = arrays
        index = tf.cast(index, tf.int32)
        return values.write(index, gradient.values), rows.write(index, gradient.indices)

    def finish(self, arrays: Sequence[Any]) -> tf.IndexedSlices:
        """Returns the rows of all micro-batches as one gradient."""
        values, rows = (array.concat() for array in arrays)
        return tf.IndexedSlices(values, rows, tf.constant(self._shape))
