"""Forward and backward over one micro-batch, by one tape around the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaleflow.interfaces import LossStep, Objective


class TapeForwardBackward:
    """The passes of a model that is in one piece.

    Args:
        model: built; returns float32.
        loss: the training step's way from a batch to its loss.
        variables: what is trained, where that is not the model's own list.
    """

    def __init__(self, model: keras.Model, loss: LossStep, variables: Sequence[Any] | None = None) -> None:
        self._model = model
        self._loss = loss
        self.variables = list(model.trainable_variables) if variables is None else list(variables)
        self.devices = [""] * len(self.variables)

    def forward(self, inputs: tf.Tensor) -> tf.Tensor:
        return self._model(inputs, training=False)

    def backward(
        self, batch: tuple[tf.Tensor, tf.Tensor], weights: tf.Tensor, parts: int, scale: Callable[[Any], Any]
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor | None]]:
        with tf.GradientTape() as tape:
            loss, outputs = self._loss(self._model, batch, weights)
            total = scale(loss + own_loss(self._model.losses) / parts)
        gradients = tape.gradient(total, [to_tf_variable(v) for v in self.variables])
        # Dense: of IndexedSlices with a row twice, neither the norm nor Adam's square is that of their sum.
        return loss, outputs, [None if g is None else tf.convert_to_tensor(g) for g in gradients]


def own_loss(losses: Sequence[Any]) -> tf.Tensor:
    """The sum of what layers add to the loss (regularizers, `add_loss`), in float32.

    A layer of half precision adds a tensor of its own dtype. Like Keras, this sums a tensor that is not a scalar.
    """
    return tf.add_n([tf.constant(0.0), *(tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses)])


def to_tf_variable(variable: Any) -> Any:
    """TensorFlow's variable of a Keras variable."""
    return getattr(variable, "value", variable) if isinstance(variable, keras.Variable) else variable


def make_loss_step(objective: Objective) -> LossStep:
    """The training step of a loss that is a function of targets and outputs."""

    def step(model: Any, batch: tuple[Any, Any], weights: Any) -> tuple[Any, Any]:
        inputs, targets = batch
        outputs = model(inputs, training=True)
        return tf.reduce_sum(objective.loss(targets, outputs) * weights), outputs

    return step
