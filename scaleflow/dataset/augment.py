"""Changes what is trained on, and nothing else: flips, crops, mixtures of two examples.

What is drawn is a pure function of (seed, epoch, place in the epoch): it is drawn for the whole global batch, and each
replica takes its rows. So it is the same on any number of replicas, in both engines and behind a resume.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Augment, Batching, Feed, Inputs, Outputs

#: A share of mixup's partner is one of so many that were drawn from its distribution.
SHARES = 1 << 16

#: What is drawn, each from numbers of its own; a partner's are counted on.
FLIP, DOWN, ACROSS, SHARE, KINDS = range(5)


def augment_feed(feed: Any, options: Augment | None, seed: int, inputs: Inputs, outputs: Outputs) -> Feed:
    """The training feed as `dataset.augment` says.

    Args:
        feed: of the training split.
        options: what is done; None for nothing.
        seed: of what is drawn.
        inputs: what the feed gives.
        outputs: what its targets mean.

    Raises:
        ConfigError: for what the inputs are no such thing as.
    """
    if options is None or options == Augment():
        return feed  # type: ignore[no-any-return]
    check_augment(options, inputs)
    if options.mixup:
        return MixedFeed(feed, options, seed, inputs, outputs)
    return AugmentedFeed(feed, options, seed)


def check_augment(options: Augment, inputs: Inputs) -> None:
    is_text = inputs.dtype == "string" or inputs.vocabulary is not None
    if options.mixup and is_text:
        raise ConfigError(f"dataset.augment.mixup={options.mixup:g}: mixes numbers, and the dataset's inputs are text")
    for key, value, wanted in (("flip", "true", options.flip), ("crop", options.crop, options.crop > 0)):
        if wanted and (is_text or len(inputs.shape) != 3):
            raise ConfigError(
                f"dataset.augment.{key}={value}: takes images of shape (height, width, channels), and the dataset's "
                f"inputs have shape {inputs.shape}"
            )


class AugmentedFeed:
    """A feed whose images are flipped and cropped as they come."""

    def __init__(self, feed: Any, options: Augment, seed: int) -> None:
        self._feed = feed
        self._options = options
        self._seed = seed

    @property
    def examples(self) -> int:
        return int(self._feed.examples)

    @property
    def batching(self) -> Batching:
        return self._feed.batching  # type: ignore[no-any-return]

    @property
    def ahead(self) -> bool:
        return bool(self._feed.ahead)

    def open(self, epoch: int, step: int) -> Any:
        return self._feed.open(epoch, step)

    def fetch(self, opened: Any) -> Any:
        return self._feed.fetch(opened)

    def worker_argument(self, opened: Any, first: int, steps: int) -> Any:
        return self._feed.worker_argument(opened, first, steps)

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        batch = self._feed.micro_batch(fetched, epoch, step, replica, index)
        first = tf.cast(replica, tf.int64) * self.batching.share + index * self.batching.batch_size
        return self._change(batch, Draws(self._seed, epoch, step, self.batching.global_size, first))

    def batches(self, epochs: int, steps_per_epoch: int) -> tf.data.Dataset:
        def change(place: tf.Tensor, batch: Any) -> Any:
            epoch, step = place // steps_per_epoch, place % steps_per_epoch
            nothing = tf.constant(0, tf.int64)
            return self._change(batch, Draws(self._seed, epoch, step, self.batching.global_size, nothing))

        numbered = self._batches(epochs, steps_per_epoch).enumerate()
        return numbered.map(change, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)

    def _batches(self, epochs: int, steps_per_epoch: int) -> tf.data.Dataset:
        return self._feed.batches(epochs, steps_per_epoch)

    def _change(self, batch: Any, draws: Draws) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        inputs, targets, mask = batch
        return self._move(inputs, draws, 0), targets, mask

    def _move(self, images: tf.Tensor, draws: Draws, kinds: int) -> tf.Tensor:
        """The inputs, flipped and cropped; `kinds` counts on from what is drawn for others."""
        if self._options.flip:
            images = flip(images, draws.uniform(kinds + FLIP, batch_length(images)) < 0.5)
        if self._options.crop:
            most = 2 * self._options.crop + 1
            down, across = (draws.integers(kinds + kind, batch_length(images), most) for kind in (DOWN, ACROSS))
            images = crop(images, self._options.crop, down, across)
        return images


class MixedFeed(AugmentedFeed):
    """A feed whose examples are each mixed with another one: mixup (Zhang et al. 2017).

    The partner of an example is that which stands at the same place of another order of the same epoch: so it does not
    depend on how a batch is divided. Targets become those of both, class targets as one-hot [b, classes] float32.
    """

    def __init__(self, feed: Any, options: Augment, seed: int, inputs: Inputs, outputs: Outputs) -> None:
        super().__init__(feed, options, seed)
        self._partner = feed.reorder(partner_seed(seed))
        self._classes = outputs.shape[-1] if outputs.kind == "classification" else None
        alpha = options.mixup
        self._shares = np.random.default_rng([seed, 3]).beta(alpha, alpha, SHARES).astype(np.float32)

    def open(self, epoch: int, step: int) -> Any:
        return self._feed.open(epoch, step), self._partner.open(epoch, step)

    def fetch(self, opened: Any) -> Any:
        return self._feed.fetch(opened[0]), self._partner.fetch(opened[1])

    def worker_argument(self, opened: Any, first: int, steps: int) -> Any:
        return self._feed.worker_argument(opened[0], first, steps), self._partner.worker_argument(
            opened[1], first, steps
        )

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        place = (epoch, step, replica, index)
        both = self._feed.micro_batch(fetched[0], *place), self._partner.micro_batch(fetched[1], *place)
        first = tf.cast(replica, tf.int64) * self.batching.share + index * self.batching.batch_size
        return self._change(both, Draws(self._seed, epoch, step, self.batching.global_size, first))

    def _batches(self, epochs: int, steps_per_epoch: int) -> tf.data.Dataset:
        both = self._feed.batches(epochs, steps_per_epoch), self._partner.batches(epochs, steps_per_epoch)
        return tf.data.Dataset.zip(both)

    def _change(self, batch: Any, draws: Draws) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        (inputs, targets, mask), (others, their_targets, _) = batch
        place = draws.integers(SHARE, batch_length(inputs), SHARES)
        share = tf.gather(tf.constant(self._shares), place)
        mixed = mix_examples(self._move(inputs, draws, 0), self._move(others, draws, KINDS), share)
        return mixed, mix_examples(self._soft(targets), self._soft(their_targets), share), mask

    def _soft(self, targets: tf.Tensor) -> tf.Tensor:
        if self._classes is None:
            return tf.cast(targets, tf.float32)
        return tf.one_hot(targets, self._classes)


class Draws:
    """The random numbers of a part of a global batch.

    Args:
        seed, epoch, step: what they are a function of.
        size: of the global batch, for which they are drawn.
        first: the part's first place in it.
    """

    def __init__(self, seed: int, epoch: tf.Tensor, step: tf.Tensor, size: int, first: tf.Tensor) -> None:
        start = tf.constant([seed, 2], tf.int64)  # the orders of examples are drawn with other second numbers
        folded = tf.random.experimental.stateless_fold_in(start, tf.cast(epoch, tf.int64), alg="philox")
        self._seed = tf.random.experimental.stateless_fold_in(folded, tf.cast(step, tf.int64), alg="philox")
        self._size = size
        self._first = first

    def uniform(self, kind: int, count: int) -> tf.Tensor:
        """[count] float32 in [0, 1)."""
        seed = tf.random.experimental.stateless_fold_in(self._seed, tf.constant(kind, tf.int64), alg="philox")
        every = tf.random.stateless_uniform([self._size], seed, alg="philox")
        return tf.slice(every, [self._first], [count])

    def integers(self, kind: int, count: int, most: int) -> tf.Tensor:
        """[count] int32 in [0, most)."""
        return tf.minimum(tf.cast(self.uniform(kind, count) * most, tf.int32), most - 1)


def flip(images: tf.Tensor, chosen: tf.Tensor) -> tf.Tensor:
    """[b, h, w, c], the chosen ones left to right."""
    return tf.where(chosen[:, None, None, None], tf.reverse(images, axis=[2]), images)


def crop(images: tf.Tensor, padding: int, down: tf.Tensor, across: tf.Tensor) -> tf.Tensor:
    """[b, h, w, c] of the same size, cut out of itself with zeros around.

    Args:
        images: what is cropped.
        padding: pixels at each side.
        down, across: [b], from 0 to 2 x padding, where each is cut out.
    """
    height, width = images.shape[1:3]
    around = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
    padded = tf.pad(images, around)
    rows = tf.gather(padded, down[:, None] + tf.range(height), axis=1, batch_dims=1)
    return tf.gather(rows, across[:, None] + tf.range(width), axis=2, batch_dims=1)


def mix_examples(values: tf.Tensor, others: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """[b, ...] of the same type: so much of the first, the rest of the second; integers are rounded."""
    shares = tf.reshape(share, [-1, *[1] * (values.shape.rank - 1)])
    mixed = shares * tf.cast(values, tf.float32) + (1 - shares) * tf.cast(others, tf.float32)
    return tf.cast(tf.round(mixed) if values.dtype.is_integer else mixed, values.dtype)


def batch_length(batch: tf.Tensor) -> int:
    return int(batch.shape[0])


def partner_seed(seed: int) -> int:
    """The seed of the partners' order."""
    return int(np.random.default_rng([seed, 4]).integers(2**31))
