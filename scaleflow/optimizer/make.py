"""Creates the optimizer, and replaces Keras's summing of gradients over the replicas."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.optimizer.variables import to_tf_variable


def average_weights(optimizer: keras.optimizers.Optimizer, momentum: float) -> None:
    """Makes an optimizer keep an average of each variable. Call it before `build`.

    After the first update the average is the weights, later momentum x average + (1 - momentum) x weights, as with
    Keras's `use_ema`. Keras's own update does not work on several replicas.

    Args:
        optimizer: not built yet, and not wrapped for loss scaling.
        momentum: above 0, below 1.
    """
    optimizer.use_ema, optimizer.ema_momentum, optimizer.ema_overwrite_frequency = True, momentum, None

    def update_averages(variables: Sequence[Any]) -> None:
        pairs = [(v, optimizer._model_variables_moving_average[optimizer._get_variable_index(v)]) for v in variables]
        values = [tuple(to_tf_variable(v) for v in pair) for pair in pairs if pair[1] is not None]
        is_first = tf.equal(optimizer.iterations.value, 0)  # it is counted after the averages are updated
        share = tf.where(is_first, 1.0, 1.0 - momentum)
        tf.__internal__.distribute.interim.maybe_merge_call(
            move_averages, optimizer._distribution_strategy, values, share
        )

    optimizer._update_model_variables_moving_average = update_averages
    optimizer.finalize_variable_values = keep_values


def move_averages(distribution: tf.distribute.Strategy, pairs: Sequence[tuple[Any, Any]], share: Any) -> None:
    """Moves each average towards its variable, on the devices that hold them."""
    for variable, average in pairs:
        distribution.extended.update(average, move_average, args=(variable, share), group=False)


def move_average(average: tf.Variable, variable: tf.Variable, share: tf.Tensor) -> None:
    share = tf.cast(share, average.dtype)
    average.assign((1 - share) * average + share * variable)


def keep_values(variables: Sequence[Any]) -> None:
    """Replaces the end of Keras's `fit`, which would overwrite the weights although the run may continue."""


#: Keras's optimizer option -> scaleflow's. Keras clips each replica's gradient before the sum, and its accumulation
#: fails in a strategy's scope.
INSTEAD = {
    "clipnorm": "training.clip_norm",
    "global_clipnorm": "training.clip_norm",
    "clipvalue": "training.clip_norm",
    "gradient_accumulation_steps": "training.accumulate",
    "loss_scale_factor": "precision=mixed_float16",
}


def create_optimizer(
    factory: Callable[..., Any], rate: Any, loss_scaling: bool, takes_summed: bool = True, ema: float | None = None
) -> keras.optimizers.Optimizer:
    """Creates the optimizer. Call it in the strategy's scope.

    Args:
        factory: a Keras optimizer class with all arguments but `learning_rate` bound.
        rate: a float or a schedule.
        loss_scaling: wrap the optimizer for float16 gradients (dynamic scale, Micikevicius et al. 2017,
            https://arxiv.org/abs/1710.03740).
        takes_summed: whether the caller sums the gradients over the replicas; else the optimizer does.
        ema: the momentum of an average of the weights; None for no average.

    Raises:
        ConfigError: if the factory makes no optimizer or rejects a value, or if an option of `INSTEAD` or `use_ema` is
            set.
    """
    check_arguments_are_numbers(factory)
    try:
        optimizer = factory(learning_rate=rate)
    except ValueError as error:  # Keras rejects a value
        raise ConfigError(f"{keys_in(str(error), factory)}: {' '.join(str(error).split())}") from error
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"optimizer: the factory returned a {type(optimizer).__name__}, expected a keras.optimizers.Optimizer"
        )
    for name, instead in INSTEAD.items():
        if getattr(optimizer, name, None):
            raise ConfigError(
                f"optimizer.{name}={getattr(optimizer, name)}: use {instead}, which is correct on every strategy"
            )
    if getattr(optimizer, "use_ema", False):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} has use_ema={optimizer.use_ema}, and Keras's moving average of the "
            "weights would be neither evaluated nor saved; leave it out, and use optimizer.ema=0.99"
        )
    if ema is not None:
        average_weights(optimizer, ema)
    (take_summed_gradients if takes_summed else sum_dense_gradients)(optimizer)
    return keras.optimizers.LossScaleOptimizer(optimizer) if loss_scaling else optimizer


def check_arguments_are_numbers(factory: Callable[..., Any]) -> None:
    """Rejects text for an argument that is a number. Keras does not check all of them."""
    if not isinstance(factory, functools.partial):
        return
    is_keras = factory.func.__module__.startswith("keras.")  # there, null stands for a number that is not set
    numbers = (int, float, type(None)) if is_keras else (int, float)
    parameters = inspect.signature(factory.func).parameters
    for key, value in factory.keywords.items():
        if isinstance(value, str) and key in parameters and type(parameters[key].default) in numbers:
            raise ConfigError(f"optimizer.{key}={value}: expected a number")


def keys_in(message: str, factory: Callable[..., Any]) -> str:
    """Lists the config keys that an error message of an optimizer names, with their values."""
    values: Mapping[str, Any] = getattr(factory, "keywords", {})
    return " with ".join(f"optimizer.{key}={value}" for key, value in values.items() if key in message) or "optimizer"


def take_summed_gradients(optimizer: keras.optimizers.Optimizer) -> None:
    """Disables Keras's sum over the replicas, because the loop sums the gradients itself.

    The loop does so before clipping and before the check for overflow: Keras's LossScaleOptimizer checks only the
    first replica's gradients.
    """
    assert callable(getattr(optimizer, "_all_reduce_sum_gradients", None)), "Keras moved its all-reduce"
    optimizer._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars


def sum_dense_gradients(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes gradients dense before Keras sums them over the replicas.

    An embedding's sparse gradient may contain a row several times. Adam would square these parts instead of their sum.
    """
    summed = optimizer._all_reduce_sum_gradients
    optimizer._all_reduce_sum_gradients = lambda grads_and_vars: summed(
        [
            (None if gradient is None else tf.convert_to_tensor(gradient), variable)
            for gradient, variable in grads_and_vars
        ]
    )
