"""Makes an optimizer update each variable on the variable's device, under the default strategy.

There Keras does not place an update, and TensorFlow uses the first device. The gradients, slots and weights of all
pipeline stages would be copied there and back in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from scaleflow.optimizer.variables import to_tf_variable


def update_in_place(optimizer: keras.optimizers.Optimizer) -> None:
    """Replaces the optimizer's methods by ones that compute each update on the variable's device."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        unscale_in_place(optimizer)
        optimizer = optimizer.inner_optimizer
    step, decay = optimizer.update_step, optimizer._apply_weight_decay
    average = optimizer._update_model_variables_moving_average

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        with tf.device(device_of(variable)):
            step(gradient, variable, learning_rate)

    def apply_weight_decay(variables: Sequence[Any]) -> None:
        for variable in variables:
            with tf.device(device_of(variable)):
                decay([variable])

    def update_averages(variables: Sequence[Any]) -> None:
        for variable in variables:
            with tf.device(device_of(variable)):
                average([variable])

    optimizer.update_step = update_step
    optimizer._apply_weight_decay = apply_weight_decay
    optimizer._update_model_variables_moving_average = update_averages


def unscale_in_place(optimizer: keras.optimizers.LossScaleOptimizer) -> None:
    """Does the same for loss scaling: the check for finite gradients and their division by the scale."""
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
    optimizer._overwrite_variable_with_gradient = lambda variable: True  # keeps Keras from unscaling a second time


def device_of(variable: Any) -> str:
    return str(to_tf_variable(variable).device)
