"""`optimizer.ema`: an exponential moving average of the weights, for evaluations and the export.

Polyak and Juditsky 1992 (https://doi.org/10.1137/0330046) average all weights; this average forgets old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

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
