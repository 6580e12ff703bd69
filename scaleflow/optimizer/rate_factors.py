"""Learning rates for parts of a model: each variable's rate is the schedule's times the variable's factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from scaleflow.optimizer.variables import to_tf_variable


def scale_rates(optimizer: keras.optimizers.Optimizer, factors: Sequence[float]) -> None:
    """Makes an optimizer use a factor of the learning rate for each variable, also in its weight decay.

    Args:
        optimizer: not built yet.
        factors: one for each variable that the optimizer will be built for, in their order.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    update = inner.update_step

    def factor_of(variable: Any) -> float:
        return float(factors[inner._get_variable_index(variable)])

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        update(gradient, variable, learning_rate * factor_of(variable))

    def decay(distribution: tf.distribute.Strategy, variables: Sequence[Any]) -> None:
        for variable in variables:
            distribution.extended.update(variable, decay_one, args=(factor_of(variable),), group=False)

    def decay_one(variable: Any, factor: float) -> None:
        rate = tf.cast(inner.learning_rate, variable.dtype) * factor
        variable.assign_sub(variable * tf.cast(inner.weight_decay, variable.dtype) * rate)

    def apply_weight_decay(variables: Sequence[Any]) -> None:
        if inner.weight_decay is None:
            return
        decayed = [to_tf_variable(variable) for variable in variables if inner._use_weight_decay(variable)]
        tf.__internal__.distribute.interim.maybe_merge_call(decay, inner._distribution_strategy, decayed)

    inner.update_step = update_step
    inner._apply_weight_decay = apply_weight_decay
