"""An example of a training step for `training.step._target_`, to use or to copy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def consistent(
    model: Any, batch: tuple[Any, Any], weights: Any, smoothing: float = 0.1, shift: float = 0.5, weight: float = 0.5
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes a classification loss with label smoothing and a consistency term.

    The consistency term penalizes different logits for shifted inputs. Label smoothing: Szegedy et al. 2015
    (https://arxiv.org/abs/1512.00567). Consistency: Sajjadi et al. 2016 (https://arxiv.org/abs/1606.04586).

    Args:
        model: returns logits [b, classes].
        batch: (inputs [b, ...], classes [b]).
        weights: [b], the weights of the examples' losses.
        smoothing: the part of a label that is spread over all classes.
        shift: added to the inputs.
        weight: factor of the consistency term, the mean squared difference of the logits.

    Returns:
        (the weighted sum of the losses, the logits of the unshifted inputs).
    """
    inputs, classes = batch
    outputs = model(inputs, training=True)
    shifted = model(inputs + shift, training=True)
    count = outputs.shape[-1]
    smoothed = tf.one_hot(classes, count) * (1 - smoothing) + smoothing / count
    losses = tf.nn.softmax_cross_entropy_with_logits(smoothed, outputs)
    losses += weight * tf.reduce_mean(tf.square(outputs - shifted), axis=-1)
    return tf.reduce_sum(losses * weights), outputs
