"""The training examples of an epoch and their order, as a pure function of (seed, epoch)."""

from __future__ import annotations

import tensorflow as tf


def shuffle_position(
    place: tf.Tensor, seed: int, epoch: tf.Tensor | int, count: int | tf.Tensor, part: int = 0
) -> tf.Tensor:
    """Returns the index of the example at a position of an epoch's order. Arrays and records in memory share it.

    `count` may be one for each place. `part` distinguishes orders of the same seed and epoch.
    """
    seeds = tf.stack([tf.constant(seed, tf.int64), tf.cast(epoch, tf.int64) + (part << 40)])
    most = count - 1 if tf.is_tensor(count) else tf.constant(count - 1, tf.int64)
    return tf.random.experimental.index_shuffle(place, seeds, most)


class Permutation:
    """The examples of an epoch: all examples of a split, each once. Subclasses choose other examples.

    Args:
        count: the number of examples in an epoch.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def find(self, places: tf.Tensor, seed: int, epoch: tf.Tensor) -> tf.Tensor:
        """Traced: returns the indices in the split of the examples at places of an epoch's order, int64."""
        return shuffle_position(places, seed, epoch, count=self._count)
