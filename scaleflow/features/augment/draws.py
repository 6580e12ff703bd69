"""The random numbers of augmentation. They depend only on the seed, the epoch and the step.

Numbers are drawn for the whole global batch, and each replica takes its rows. So the number of replicas, the training
engine and a resume do not change them.
"""

from __future__ import annotations

import copy

import tensorflow as tf

from scaleflow.features.augment.image_changes import CHOSEN

#: First random number of each option for an example, and how many it uses. Each number has its own seed, so a new
#: option does not change existing ones. Numbers for the partner in a mixture are offset by `PARTNER`.
NUMBERS = {
    "flip": (0, 1),
    "crop": (1, 2),
    "mixup": (3, 1),
    "resized_crop": (4, 4),
    "color_jitter": (8, 3),
    "erase": (11, 5),
    "vertical_flip": (32, 1),
    "rotation": (33, 1),
    "zoom": (34, 1),
    "translation": (35, 2),
    "contrast": (37, 1),
    "randaugment": (38, 2 * CHOSEN),
    "word_dropout": (42, 1),
    "cutmix": (64, 4),
}
PARTNER = 16


class Draws:
    """Random numbers for a part of a global batch.

    Args:
        seed: the run's seed.
        epoch, step: the position in training, integer scalars.
        size: number of examples in the global batch.
        first: index of the part's first example in the global batch, an int64 scalar.
    """

    _offset = 0

    def __init__(self, seed: int, epoch: tf.Tensor, step: tf.Tensor, size: int, first: tf.Tensor) -> None:
        start = tf.constant([seed, 2], tf.int64)  # other draws from the run's seed have another second number
        folded = tf.random.experimental.stateless_fold_in(start, tf.cast(epoch, tf.int64), alg="philox")
        self._seed = tf.random.experimental.stateless_fold_in(folded, tf.cast(step, tf.int64), alg="philox")
        self._size = size
        self._first = first

    def of_partner(self) -> Draws:
        """Returns the numbers for the partners in mixtures."""
        other = copy.copy(self)
        other._offset = PARTNER
        return other

    def of(self, option: str, *shape: int) -> tf.Tensor:
        """Returns an option's numbers for each example, [numbers, *shape] float32 in [0, 1).

        The first number of `shape` is the number of examples.
        """
        first, count = NUMBERS[option]
        return tf.stack([self._draw(first + self._offset + number, *shape) for number in range(count)])

    def _draw(self, kind: int, count: int, *shape: int) -> tf.Tensor:
        seed = tf.random.experimental.stateless_fold_in(self._seed, tf.constant(kind, tf.int64), alg="philox")
        numbers = tf.random.stateless_uniform([self._size, *shape], seed, alg="philox")
        return tf.slice(numbers, [self._first, *[0] * len(shape)], [count, *shape])
