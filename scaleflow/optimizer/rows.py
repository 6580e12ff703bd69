"""Updates only the rows of an embedding table that a step's batch uses, with the result of an update of all rows.

That is possible if a row without a gradient stays as it is: with SGD without momentum, Adagrad and LazyAdam. Adam and
momentum change every row in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from scaleflow.optimizer.lazy_adam import LazyAdam


def mark_tables(optimizer: keras.optimizers.Optimizer, are_tables: Sequence[bool]) -> None:
    """Tells an optimizer that treats embedding tables in another way which of its variables are such tables.

    Args:
        optimizer: not built yet.
        are_tables: for each variable that the optimizer will be built for, in their order.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, LazyAdam):
        inner.tables = frozenset(index for index, is_table in enumerate(are_tables) if is_table)


def find_dense_cause(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Returns what makes an update change rows without a gradient, for a message; None if it leaves them unchanged."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if type(inner) not in (keras.optimizers.Adagrad, keras.optimizers.SGD, LazyAdam):
        return type(inner).__name__
    momentum = getattr(inner, "momentum", 0)  # Adagrad has none
    causes = {"weight decay": inner.weight_decay, "momentum": momentum, "optimizer.ema": inner.use_ema}
    return next((f"{type(inner).__name__} with {cause}" for cause, value in causes.items() if value), None)


def update_by_rows(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer that keeps rows update only the rows of a gradient that is `tf.IndexedSlices`.

    Each row may occur once. Keras's own update of Adagrad reads the whole table and writes a root of all its values.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer.check_finite = are_finite
        optimizer = optimizer.inner_optimizer
    update_all = optimizer.update_step

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            update_rows(optimizer, gradient, variable, tf.cast(learning_rate, variable.dtype))
        else:
            update_all(gradient, variable, learning_rate)

    optimizer.update_step = update_step


def update_rows(optimizer: keras.optimizers.Optimizer, gradient: Any, variable: Any, rate: tf.Tensor) -> None:
    """Updates the rows of `gradient`, as LazyAdam, Keras's SGD (without momentum) or Adagrad updates a variable."""
    if isinstance(optimizer, LazyAdam):
        optimizer.update_rows(gradient, variable, rate)
        return
    values, rows = tf.cast(gradient.values, variable.dtype), gradient.indices
    if isinstance(optimizer, keras.optimizers.Adagrad):
        accumulator = optimizer._accumulators[optimizer._get_variable_index(variable)].value
        accumulator.scatter_add(tf.IndexedSlices(tf.square(values), rows))
        values = values / tf.sqrt(tf.gather(accumulator, rows) + optimizer.epsilon)
    variable.scatter_sub(tf.IndexedSlices(rate * values, rows))


def are_finite(gradients: Any) -> tf.Tensor:
    """Returns whether all gradients are finite; of a gradient by rows it reads the rows."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in values]))
