"""Values of each position and of each example, and the targets that count nowhere (`Outputs.ignore`)."""

from __future__ import annotations

import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Outputs


def is_shares(targets: tf.Tensor, outputs: tf.Tensor) -> bool:
    """Returns whether targets are mixup's shares of the classes [b, ..., classes], and not integer classes [b, ...]."""
    return bool(targets.shape.rank == outputs.shape.rank)


def find_counted(described: Outputs, targets: tf.Tensor) -> tf.Tensor | None:
    """Returns 1 for each target that counts and 0 for `Outputs.ignore`, float32; None if all of them count.

    Raises:
        ConfigError: if the targets are mixup's shares, in which ignored targets are no longer visible.
    """
    if described.ignore is None:
        return None
    if described.kind == "classification" and targets.shape.rank != len(described.shape):
        raise ConfigError(
            f"dataset.augment.mixup with targets of which {described.ignore} is ignored (Outputs.ignore): a mixture "
            "of an ignored target and another one has no meaning; remove mixup"
        )
    return tf.cast(tf.not_equal(targets, tf.cast(described.ignore, targets.dtype)), tf.float32)


def replace_ignored(targets: tf.Tensor, counted: tf.Tensor | None) -> tf.Tensor:
    """Replaces ignored targets by 0, which is valid for each kind, so that no loss of them is NaN."""
    return targets if counted is None else tf.where(counted > 0, targets, tf.zeros_like(targets))


def average_positions(values: tf.Tensor, counted: tf.Tensor | None = None) -> tf.Tensor:
    """Averages [b, ...] over the positions of each example that count, to [b]. 0 if none of an example's counts."""
    if values.shape.rank == 1 and counted is None:
        return values
    values = flatten_examples(values)
    if counted is None:
        return tf.reduce_mean(values, axis=1)
    counted = flatten_examples(counted)
    return tf.reduce_sum(values * counted, axis=1) / tf.maximum(tf.reduce_sum(counted, axis=1), 1.0)


def flatten_examples(values: tf.Tensor) -> tf.Tensor:
    """Reshapes [b, ...] to [b, n]."""
    return tf.reshape(values, [tf.shape(values)[0], -1])


def spread_weights(weights: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Repeats the examples' weights [b] for each value of `like` [b, ...]."""
    return tf.reshape(weights, [-1] + [1] * (like.shape.rank - 1)) * tf.ones_like(like, tf.float32)
