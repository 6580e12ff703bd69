"""The training examples of an epoch and their order: all examples once, or classes balanced by `dataset.balance`.

Both are a pure function of (seed, epoch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Array = np.ndarray[Any, Any]


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
    """All examples of a split, each once."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def find(self, places: tf.Tensor, seed: int, epoch: tf.Tensor) -> tf.Tensor:
        """Returns the indices of the examples at places of an epoch's order, int64."""
        return shuffle_position(places, seed, epoch, count=self._count)


class ClassOrder(Permutation):
    """A number of examples of each class.

    The examples of a class have their own order, which each epoch shuffles. If an epoch has only some examples of a
    class, the next epoch has others. If it has more examples than the class, all occur nearly equally often.

    Args:
        classes: the class of each example, [n].
        drawn: how many examples of each class an epoch has.
    """

    def __init__(self, classes: Array, drawn: Array) -> None:
        super().__init__(int(drawn.sum()))
        self._examples = np.argsort(classes, kind="stable").astype(np.int32)
        self._counts = np.bincount(classes, minlength=len(drawn))
        self._drawn = drawn

    def find(self, places: tf.Tensor, seed: int, epoch: tf.Tensor) -> tf.Tensor:
        places = super().find(places, seed, epoch)
        ends = tf.constant(np.cumsum(self._drawn), tf.int64)
        number = tf.searchsorted(ends, tf.reshape(places, [-1]), side="right")
        counts = tf.constant(self._counts, tf.int64)
        count = tf.gather(counts, number)
        within = tf.reshape(places, [-1]) - tf.gather(ends - tf.constant(self._drawn, tf.int64), number)
        own = shuffle_position(within % count, seed, epoch, count=count, part=1)
        found = tf.gather(tf.constant(self._examples), tf.gather(tf.cumsum(counts, exclusive=True), number) + own)
        return tf.reshape(tf.cast(found, tf.int64), tf.shape(places))


def count_drawn(counts: Array, balance: str | Mapping[int, float]) -> Array:
    """Returns how many examples of each class an epoch has.

    Args:
        counts: the examples of each class in the split.
        balance: `oversample`: as many of each class as the largest has; `undersample`: as the smallest; or shares of
            classes by their number, at most 1 together. Other classes divide the rest as in the split.
    """
    occurs = counts > 0
    if isinstance(balance, str):
        return np.where(occurs, counts.max() if balance == "oversample" else counts[occurs].min(), 0)
    named = list(balance)
    others = counts.astype(np.float64)
    others[named] = 0
    exact = others * ((1 - sum(balance.values())) / max(others.sum(), 1)) * counts.sum()
    exact[named] = np.array(list(balance.values())) * counts.sum()
    drawn: Array = np.floor(exact + 1e-9).astype(np.int64)
    rest = int(counts.sum() - drawn.sum())
    drawn[np.argsort(drawn - exact, kind="stable")[:rest]] += 1
    drawn[occurs & (drawn == 0)] = 1
    return drawn


def find_shifts(counts: Array, drawn: Array) -> Sequence[float]:
    """Returns log(share in the split / share in an epoch) of each class; 0 for a class without examples."""
    shares, of_drawn = (np.where(each > 0, each / each.sum(), 1.0) for each in (counts, drawn))
    return [float(each) for each in np.log(shares) - np.log(of_drawn)]
