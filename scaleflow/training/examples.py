"""A training step to name in `training.step._target_`, or to copy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def consistent(
    model: Any, batch: tuple[Any, Any], weights: Any, smoothing: float = 0.1, shift: float = 0.5, weight: float = 0.5
) -> tuple[tf.Tensor, tf.Tensor]:
    """Classification with smoothed labels, and the same answer asked for where the input is shifted.

    Label smoothing after Szegedy et al. 2015 (https://arxiv.org/abs/1512.00567), the second term after Sajjadi et al.
    2016 (https://arxiv.org/abs/1606.04586).

    Args:
        model: returns logits [b, classes].
        batch: (inputs [b, ...], classes [b]).
        weights: [b], of the examples' losses.
        smoothing: how much of a label is spread over all classes.
        shift: what is added to the inputs.
        weight: of the mean squared difference between the two answers.

    Returns:
        (the weighted sum of the losses, the logits of the inputs as they are).
    """
    inputs, classes = batch
    outputs = model(inputs, training=True)
    shifted = model(inputs + shift, training=True)
    count = outputs.shape[-1]
    wanted = tf.one_hot(classes, count) * (1 - smoothing) + smoothing / count
    losses = tf.nn.softmax_cross_entropy_with_logits(wanted, outputs)
    losses += weight * tf.reduce_mean(tf.square(outputs - shifted), axis=-1)
    return tf.reduce_sum(losses * weights), outputs
