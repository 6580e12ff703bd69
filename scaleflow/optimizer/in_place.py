"""An optimizer that works where the variables are, under the default strategy.

There Keras leaves it open where an update is computed, and TensorFlow takes the first device: the
gradients, the slots and the weights of all stages would travel there and back at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def update_in_place(optimizer: keras.optimizers.Optimizer) -> None:
    """Has everything that concerns one variable computed on that variable's device."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        unscale_in_place(optimizer)
        optimizer = optimizer.inner_optimizer
    step, decay = optimizer.update_step, optimizer._apply_weight_decay

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        with tf.device(device_of(variable)):
            step(gradient, variable, learning_rate)

    def apply_weight_decay(variables: Sequence[Any]) -> None:
        for variable in variables:
            with tf.device(device_of(variable)):
                decay([variable])

    optimizer.update_step = update_step
    optimizer._apply_weight_decay = apply_weight_decay


def unscale_in_place(optimizer: keras.optimizers.LossScaleOptimizer) -> None:
    """The same for loss scaling: whether a gradient is finite, and its division by the scale."""
    finish = optimizer._stateful_handle_finite_grads

    def check_finite(gradients: Sequence[Any]) -> tf.Tensor:
        finite = []
        for gradient, variable in zip(gradients, optimizer._trainable_variables, strict=True):
            if gradient is not None:
                with tf.device(device_of(variable)):
                    finite.append(tf.reduce_all(tf.math.is_finite(gradient)))
        return tf.reduce_all(tf.stack(finite))

    def handle_finite(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        unscaled = []
        for gradient, variable in zip(gradients, variables, strict=True):
            with tf.device(device_of(variable)):
                unscaled.append(None if gradient is None else gradient / optimizer.dynamic_scale)
        finish(unscaled, variables)

    optimizer.check_finite = check_finite
    optimizer._stateful_handle_finite_grads = handle_finite
    optimizer._overwrite_variable_with_gradient = lambda variable: True  # "is not scaled": it has been divided above


def device_of(variable: Any) -> str:
    raw = variable.value if isinstance(variable, keras.Variable) else variable
    return str(raw.device)
