"""Makes the optimizer, and takes over what Keras does at the wrong moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from scaleflow.errors import ConfigError

#: Keras clips each replica's gradient before they are summed, and its accumulation fails in a
#: strategy's scope; the loop does both rightly, under these names.
INSTEAD = {
    "clipnorm": "training.clip_norm",
    "global_clipnorm": "training.clip_norm",
    "clipvalue": "training.clip_norm",
    "gradient_accumulation_steps": "training.accumulate",
    "loss_scale_factor": "precision=mixed_float16",
}


def create_optimizer(
    factory: Callable[..., Any], rate: Any, loss_scaling: bool, takes_summed: bool = True
) -> keras.optimizers.Optimizer:
    """The optimizer, to be given gradients that are summed over the replicas already, unless told otherwise.

    Call it in the strategy's scope.

    Args:
        factory: a Keras optimizer's class, arguments but the rate bound.
        rate: a float or a schedule.
        loss_scaling: wrap it for float16 gradients (dynamic scale, Micikevicius et al. 2017).
        takes_summed: whether the gradients are summed already; else it sums them itself, as Keras's do.

    Raises:
        ConfigError: if it is no optimizer, does not take the values of its keys, or is asked to do what the loop does.
    """
    try:
        optimizer = factory(learning_rate=rate)
    except ValueError as error:  # as Keras checks the values of an optimizer's keys
        raise ConfigError(f"{keys_in(str(error), factory)}: {' '.join(str(error).split())}") from error
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"optimizer: the factory returned a {type(optimizer).__name__}, expected a keras.optimizers.Optimizer"
        )
    for name, instead in INSTEAD.items():
        if getattr(optimizer, name, None):
            raise ConfigError(
                f"optimizer.{name}={getattr(optimizer, name)}: use {instead}, which is right on every strategy"
            )
    if getattr(optimizer, "use_ema", False):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} has use_ema={optimizer.use_ema}, and Keras's moving average of the "
            "weights would be neither evaluated nor saved; leave it out"
        )
    (take_summed_gradients if takes_summed else sum_dense_gradients)(optimizer)
    return keras.optimizers.LossScaleOptimizer(optimizer) if loss_scaling else optimizer


def keys_in(message: str, factory: Callable[..., Any]) -> str:
    """The keys that an optimizer's message is about, with their values."""
    values: Mapping[str, Any] = getattr(factory, "keywords", {})
    return " with ".join(f"optimizer.{key}={value}" for key, value in values.items() if key in message) or "optimizer"


def take_summed_gradients(optimizer: keras.optimizers.Optimizer) -> None:
    """Keeps Keras from summing over the replicas a second time.

    The loop sums the gradients itself, before clipping and before the check for overflow: Keras's
    LossScaleOptimizer looks at the first replica's gradients only and takes them for the sum.
    """
    assert callable(getattr(optimizer, "_all_reduce_sum_gradients", None)), "Keras moved its all-reduce"
    optimizer._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars


def sum_dense_gradients(optimizer: keras.optimizers.Optimizer) -> None:
    """Has Keras sum over the replicas what is dense.

    Of an embedding's gradient, in which the same row comes many times, Adam would square the parts, not their sum.
    """
    summed = optimizer._all_reduce_sum_gradients
    optimizer._all_reduce_sum_gradients = lambda grads_and_vars: summed(
        [
            (None if gradient is None else tf.convert_to_tensor(gradient), variable)
            for gradient, variable in grads_and_vars
        ]
    )
