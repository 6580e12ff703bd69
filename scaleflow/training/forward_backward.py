"""The forward and backward pass of a whole model over one micro-batch, with a gradient tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaleflow.interfaces import LossStep, Objective
from scaleflow.training.row_gradients import Gradient, keep_rows, make_dense


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
        gradients = tape.gradient(total, [to_tf_variable(v) for v in self.variables])
        if not self.keeps_rows:
            return loss, extra, outputs, [make_dense(g) for g in gradients]
        return loss, extra, outputs, [keep_rows(g, v) for g, v in zip(gradients, self.variables, strict=True)]


def sum_own_losses(losses: Sequence[Any], parts: int) -> tf.Tensor | None:
    """Sums the losses that layers add (regularizers, `add_loss`), in float32, and divides by `parts`; None without any.

    A half-precision layer adds a tensor of its own dtype. Like Keras, this sums tensors that are not scalars.
    """
    return tf.add_n([tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses]) / parts if losses else None


def to_tf_variable(variable: Any) -> Any:
    """Returns the TensorFlow variable of a Keras variable; anything else unchanged."""
    return getattr(variable, "value", variable) if isinstance(variable, keras.Variable) else variable


def make_loss_step(objective: Objective) -> LossStep:
    """Makes the default training step, for a loss that is a function of targets and outputs."""

    def step(model: Any, batch: tuple[Any, Any], weights: Any) -> tuple[Any, Any]:
        inputs, targets = batch
        outputs = model(inputs, training=True)
        return tf.reduce_sum(objective.loss(targets, outputs) * weights), outputs

    return step
