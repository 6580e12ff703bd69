"""The order of examples in a balanced epoch, and how often each class occurs. Depends only on (seed, epoch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.orders import Permutation, shuffle_position

Array = np.ndarray[Any, Any]


class ClassOrder(Permutation):
    """The order of an epoch with a given number of examples per class.

    The examples of a class have their own order, which each epoch shuffles. If an epoch has only some examples of a
    class, the next epoch has others. If it has more examples than the class, all occur nearly equally often.

    Args:
        classes: class of each example, [n].
        drawn: number of examples of each class in an epoch.
    """

    def __init__(self, classes: Array, drawn: Array) -> None:
        super().__init__(int(drawn.sum()))
        self._examples = np.argsort(classes, kind="stable").astype(np.int32)  # sorted by class
        self._counts = np.bincount(classes, minlength=len(drawn))
        self._drawn = drawn

    def find(self, places: tf.Tensor, seed: int, epoch: tf.Tensor) -> tf.Tensor:
        shuffled = tf.reshape(super().find(places, seed, epoch), [-1])
        # Places 0 to drawn[0] - 1 belong to class 0, the next drawn[1] to class 1, and so on.
        ends = tf.constant(np.cumsum(self._drawn), tf.int64)
        starts = ends - tf.constant(self._drawn, tf.int64)
        classes = tf.searchsorted(ends, shuffled, side="right")
        place_in_class = shuffled - tf.gather(starts, classes)

        counts = tf.constant(self._counts, tf.int64)
        count = tf.gather(counts, classes)
        own = shuffle_position(place_in_class % count, seed, epoch, count=count, part=1)
        first_of_class = tf.gather(tf.cumsum(counts, exclusive=True), classes)
        examples = tf.gather(tf.constant(self._examples), first_of_class + own)
        return tf.reshape(tf.cast(examples, tf.int64), tf.shape(places))


def count_drawn(counts: Array, balance: str | Mapping[int, float]) -> Array:
    """Returns how many examples of each class an epoch has.

    Args:
        counts: number of examples of each class in the split.
        balance: `oversample`: as many of each class as the largest has; `undersample`: as the smallest has; or shares
            of classes by number, at most 1 in total. The other classes divide the rest as in the split.
    """
    occurs = counts > 0
    if isinstance(balance, str):
        same = counts.max() if balance == "oversample" else counts[occurs].min()
        return np.where(occurs, same, 0)

    total = counts.sum()
    named = list(balance)
    others = counts.astype(np.float64)
    others[named] = 0
    exact = others * ((1 - sum(balance.values())) / max(others.sum(), 1)) * total
    exact[named] = np.array(list(balance.values())) * total

    # Rounds down, then rounds up the largest remainders, so that the epoch is as long as the split.
    drawn: Array = np.floor(exact + 1e-9).astype(np.int64)
    rest = int(total - drawn.sum())
    drawn[np.argsort(drawn - exact, kind="stable")[:rest]] += 1
    drawn[occurs & (drawn == 0)] = 1
    return drawn


def find_shifts(counts: Array, drawn: Array) -> Sequence[float]:
    """Returns log(share in the split / share in an epoch) of each class; 0 for a class without examples."""
    shifts = np.log(find_shares(counts)) - np.log(find_shares(drawn))
    return [float(shift) for shift in shifts]


def find_shares(counts: Array) -> Array:
    """Returns the share of each class in all examples; 1 for a class without examples."""
    return np.where(counts > 0, counts / counts.sum(), 1.0)
