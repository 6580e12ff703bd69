"""A variant of Adam that changes only the rows of embedding tables that a batch uses."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from scaleflow.compat.keras import find_index, find_slots


@keras.saving.register_keras_serializable("scaleflow")
class LazyAdam(keras.optimizers.Adam):  # type: ignore[misc]  # keras has no types
    """Adam (Kingma and Ba 2014, https://arxiv.org/abs/1412.6980) that updates only the rows with a gradient.

    Adam decays the averages of each row in each step and moves the row, even without a gradient. Here, a row of an
    embedding table keeps its weights and averages if its gradient is zero. So the cost of a step depends on the rows of
    its batch, not on the size of the table. The correction of the averages' bias counts the steps of the run, not of
    the row. All other variables are updated as by Adam. TensorFlow Addons' LazyAdam and PyTorch's SparseAdam do the
    same.

    Args:
        learning_rate, beta_1, beta_2, epsilon: as for Adam.
        options: other arguments of Adam, except `amsgrad`.

    Attributes:
        tables: the positions of embedding tables among the variables that the optimizer is built for.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon=epsilon, **options)
        if self.amsgrad:
            raise ValueError("the maxima of amsgrad are not kept by rows; leave it out")
        self.tables: frozenset[int] = frozenset()

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable from its whole gradient."""
        if find_index(self, variable) not in self.tables:
            super().update_step(gradient, variable, learning_rate)
            return
        mean, square = find_slots(self, variable)
        gradient = tf.cast(gradient, variable.dtype)
        rate = tf.cast(learning_rate, variable.dtype)
        values = tf.convert_to_tensor(mean), tf.convert_to_tensor(square)
        new_mean, new_square, change = self._move(gradient, values, rate)
        self.assign(mean, new_mean)
        self.assign(square, new_square)
        self.assign_sub(variable, change)

    def update_rows(self, gradient: tf.IndexedSlices, variable: Any, rate: tf.Tensor) -> None:
        """Updates the table's rows that are in a gradient. Each row occurs once in it."""
        rows = gradient.indices
        mean, square = (slot.value for slot in find_slots(self, variable))
        values = tf.gather(mean, rows), tf.gather(square, rows)
        new_mean, new_square, change = self._move(tf.cast(gradient.values, variable.dtype), values, rate)
        mean.scatter_update(tf.IndexedSlices(new_mean, rows))
        square.scatter_update(tf.IndexedSlices(new_square, rows))
        variable.scatter_sub(tf.IndexedSlices(change, rows))

    def _move(
        self, gradient: tf.Tensor, averages: tuple[tf.Tensor, tf.Tensor], rate: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the new averages of rows [n, ...], and what to subtract from the rows; 0 without a gradient."""
        mean, square = averages
        step = tf.cast(self.iterations + 1, gradient.dtype)
        rate = rate * tf.sqrt(1 - tf.pow(tf.cast(self.beta_2, step.dtype), step))
        rate = rate / (1 - tf.pow(tf.cast(self.beta_1, step.dtype), step))
        new_mean = mean + (gradient - mean) * (1 - self.beta_1)
        new_square = square + (tf.square(gradient) - square) * (1 - self.beta_2)
        change = new_mean * rate / (tf.sqrt(new_square) + self.epsilon)
        axes = list(range(1, gradient.shape.rank))
        is_used = tf.reduce_any(tf.not_equal(gradient, 0), axis=axes, keepdims=True)
        return (
            tf.where(is_used, new_mean, mean),
            tf.where(is_used, new_square, square),
            tf.where(is_used, change, tf.zeros_like(change)),
        )
