"""The forward and backward pass of a whole model over a micro-batch, and the phases of `model.freeze`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from scaleflow.compat.keras import set_trainable, to_tf_variable
from scaleflow.interfaces import FreezePhase, LossStep, Objective

#: The gradient of a variable; None if the loss does not depend on it.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None

#: A gradient is kept by rows if the table has at least this many times the rows of the gradient. Measured on a CPU: if
#: a third of the rows are used, the search for equal rows takes as long as a dense update of the table.
ROWS_PER_ID = 3


def make_dense(gradient: Gradient) -> tf.Tensor | None:
    """Converts a gradient to a dense tensor. Rows that occur several times are summed."""
    return None if gradient is None else tf.convert_to_tensor(gradient)


def keep_rows(gradient: Gradient, variable: Any) -> Gradient:
    """Keeps a gradient by rows if it has few rows compared to its variable, else makes it dense."""
    if not isinstance(gradient, tf.IndexedSlices) or not isinstance(gradient.values, tf.Tensor):
        return make_dense(gradient)
    count = gradient.indices.shape[0]  # None if it is known only in the step: a table in shards
    if count is None or ROWS_PER_ID * count <= variable.shape[0]:
        return gradient
    return make_dense(gradient)


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
        like: the gradient of a micro-batch. Only its dtypes and static shapes are used.
        variable: the variable.
        count: the number of micro-batches.

    Attributes:
        start: the arrays before the first micro-batch.
    """

    def __init__(self, like: tf.IndexedSlices, variable: Any, count: int) -> None:
        self._shape = tuple(variable.shape)
        self.start = (make_array(like.values, count), make_array(like.indices, count))

    @staticmethod
    def add(arrays: Sequence[Any], index: tf.Tensor, gradient: tf.IndexedSlices) -> tuple[Any, Any]:
        """Returns the arrays with the gradient of micro-batch `index`."""
        values, rows = arrays
        index = tf.cast(index, tf.int32)
        return values.write(index, gradient.values), rows.write(index, gradient.indices)

    def finish(self, arrays: Sequence[Any]) -> tf.IndexedSlices:
        """Returns the rows of all micro-batches as one gradient."""
        values, rows = arrays
        return tf.IndexedSlices(values.concat(), rows.concat(), tf.constant(self._shape))


def make_array(like: tf.Tensor, count: int) -> tf.TensorArray:
    """Makes an array for `count` tensors with the dtype and the static shape of `like`."""
    return tf.TensorArray(like.dtype, count, element_shape=like.shape, infer_shape=False)


class TapeForwardBackward:
    """Implements `ForwardBackward` for a model that is not split into stages.

    Args:
        model: built; returns float32.
        loss: computes the loss and the outputs of a batch.
        variables: the trained variables; None for `model.trainable_variables`.
        keeps_rows: return gradients of embedding tables as `tf.IndexedSlices`, which may hold a row several times.
    """

    def __init__(
        self, model: keras.Model, loss: LossStep, variables: Sequence[Any] | None = None, keeps_rows: bool = False
    ) -> None:
        self._model = model
        self._loss = loss
        self.keeps_rows = keeps_rows
        self.set_variables(model.trainable_variables if variables is None else variables)

    def set_variables(self, variables: Sequence[Any]) -> None:
        """Sets the trained variables."""
        self.variables = list(variables)
        self.devices = [""] * len(self.variables)

    def forward(self, inputs: Any) -> Any:
        return self._model(inputs, training=False)

    def backward(
        self, batch: tuple[Any, Any], weights: tf.Tensor, parts: int, scale: Callable[[Any], Any]
    ) -> tuple[tf.Tensor, tf.Tensor | None, Any, list[Gradient]]:
        with tf.GradientTape() as tape:
            loss, outputs = self._loss(self._model, batch, weights)
            extra = sum_own_losses(self._model.losses, parts)
            total = scale(loss if extra is None else loss + extra)
        gradients = tape.gradient(total, [to_tf_variable(variable) for variable in self.variables])
        if self.keeps_rows:
            gradients = list(map(keep_rows, gradients, self.variables))
        else:
            gradients = list(map(make_dense, gradients))
        return loss, extra, outputs, gradients


def sum_own_losses(losses: Sequence[Any], parts: int) -> tf.Tensor | None:
    """Sums the losses that layers add (regularizers, `add_loss`), in float32, and divides by `parts`; None without any.

    A half-precision layer adds a half-precision tensor. Like Keras, this sums tensors that are not scalars.
    """
    if not losses:
        return None
    scalars = [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses]
    return tf.add_n(scalars) / parts


def make_loss_step(objective: Objective) -> LossStep:
    """Makes the default training step, for a loss that is a function of targets and outputs."""

    def step(model: Any, batch: tuple[Any, Any], weights: Any) -> tuple[Any, Any]:
        inputs, targets = batch
        outputs = model(inputs, training=True)
        return tf.reduce_sum(objective.loss(targets, outputs) * weights), outputs

    return step


#: The name of `FreezePhases._starts` in a checkpoint.
STARTS = "training/starts"

#: The start of a variable that has not begun to train.
NOT_BEGUN = -1


class FreezePhases:
    """Makes other variables trainable in each phase of a run.

    Outside of training, the variables of all phases are trainable, because the optimizer has state for each of them.

    Args:
        model: trainable as after `model.list_freeze_phases`.
        phases: ordered by their first epoch. The first phase begins in epoch 0.

    Attributes:
        variables: the variables that train in any phase.
        parameters: the number of trained parameters by the first epoch of the phase.
    """

    def __init__(self, model: keras.Model, phases: Sequence[FreezePhase]) -> None:
        self._phases = phases
        self.variables = list(model.trainable_variables)
        self.parameters = {phase.epoch: self._count_parameters(phase) for phase in phases}
        self._outside = [(part, part.trainable) for part, _ in phases[0].trainable]
        # The number of updates before the first update of each variable.
        self._starts = np.full(len(self.variables), NOT_BEGUN, np.int64)
        self._places = {id(to_tf_variable(variable)): index for index, variable in enumerate(self.variables)}
        self._traced: tuple[int, ...] | None = None

    def count_steps(self, steps_per_epoch: int, total: int) -> list[tuple[FreezePhase, int]]:
        """Returns each phase with its number of updates. The run has `total` updates."""
        counts = []
        end = total
        for phase in reversed(self._phases):
            start = min(phase.epoch * steps_per_epoch, total)
            counts.append((phase, end - start))
            end = start
        return counts[::-1]

    @property
    def largest(self) -> int:
        """The first epoch of the phase with the largest number of trained parameters."""
        return max(self.parameters, key=lambda epoch: self.parameters[epoch])

    def begin(self, epoch: int, updates: int) -> bool:
        """Makes the variables of an epoch trainable. `updates` is the number of optimizer updates so far.

        Returns:
            Whether the training step must be traced again.
        """
        begun = [phase for phase in self._phases if phase.epoch <= epoch]
        phase = begun[-1]
        set_trainable(phase.trainable)
        trained = np.array([variable.trainable for variable in self.variables])
        self._starts[trained & (self._starts == NOT_BEGUN)] = updates
        before = self._traced
        self._traced = (phase.epoch, *self._starts[trained].tolist())
        return before != self._traced

    def end(self) -> None:
        """Makes the variables of all phases trainable."""
        set_trainable(self._outside)

    def find_start(self, variable: Any) -> int:
        """Returns the number of updates before the first update of a variable."""
        return int(self._starts[self._places[id(to_tf_variable(variable))]])

    def read_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Returns the state for a checkpoint."""
        return {STARTS: self._starts.copy()}

    def restore(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Restores what `read_state` returned."""
        self._starts[:] = values[STARTS]

    def _count_parameters(self, phase: FreezePhase) -> int:
        trained_ids = {id(part) for part, is_trained in phase.trainable if is_trained}
        count = 0
        for variable in self.variables:
            if id(variable) in trained_ids:
                count += math.prod(variable.shape)
        return count
