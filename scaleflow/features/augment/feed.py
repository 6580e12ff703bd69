"""The training feed with augmented examples: changed images, masks and texts, mixup and cutmix.

Random numbers depend only on (seed, epoch, step). They are drawn for the whole global batch, and each replica takes its
rows. So the number of replicas, the training engine and a resume do not change the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.records import prefetch
from scaleflow.features.augment.changes import Changes, batch_length
from scaleflow.features.augment.draws import Draws
from scaleflow.features.augment.feature import Augment
from scaleflow.features.augment.fitting import IMAGE_OPTIONS, MIXTURES, find_changes
from scaleflow.features.augment.image_changes import scale_to_integers
from scaleflow.interfaces import Arrays, Batching, Feed, InputStructure, OutputStructure

#: Number of mixture shares drawn in advance. Each example uses one of them.
MIX_WEIGHTS = 1 << 16

#: Second numbers of the seeds, for the order of partners and for the shares of each kind of mixture.
PARTNER_SEED = 4
SHARE_SEEDS = {"mixup": 3, "cutmix": 6}


def augment_feed(
    feed: Any, options: Augment | None, seed: int, inputs: InputStructure, outputs: OutputStructure
) -> Feed:
    """Wraps the training feed as `dataset.augment` says. Without options, returns it unchanged.

    `inputs` and `outputs` describe the feed's inputs and targets. Raises ConfigError if an option does not apply to
    them.
    """
    if options is None or options == Augment():
        return feed  # type: ignore[no-any-return]
    changes = find_changes(options, inputs, outputs)
    if any(getattr(options, key) for key in MIXTURES):
        return MixedFeed(feed, changes, seed, outputs=outputs)
    return AugmentedFeed(changes, seed, feed)


class AugmentedFeed:
    """Changes the examples of another feed.

    Args:
        changes: changes to images, texts and targets for pixels.
        seed: the run's seed.
        feeds: the other feed; for mixtures also the partners' feed.
    """

    def __init__(self, changes: Changes, seed: int, *feeds: Any) -> None:
        self.examples: int = feeds[0].examples
        self.batching: Batching = feeds[0].batching
        self.ahead: bool = feeds[0].ahead
        self.continues: bool = feeds[0].continues
        self.is_indexed = False
        self._changes = changes
        self._seed = seed
        self._feeds = feeds

    def open(self, epoch: int, step: int) -> Any:
        return tuple(feed.open(epoch, step) for feed in self._feeds)

    def fetch(self, opened: Any) -> Any:
        return tuple(feed.fetch(part) for feed, part in zip(self._feeds, opened, strict=True))

    def worker_argument(self, opened: Any, first: int, steps: int) -> Any:
        parts = zip(self._feeds, opened, strict=True)
        return tuple(feed.worker_argument(part, first, steps) for feed, part in parts)

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[Any, ...]:
        parts = zip(self._feeds, fetched, strict=True)
        batches = [feed.micro_batch(part, epoch, step, replica=replica, index=index) for feed, part in parts]
        first = tf.cast(replica, tf.int64) * self.batching.share + index * self.batching.batch_size
        return self._change(batches, Draws(self._seed, epoch, step, size=self.batching.global_size, first=first))

    def batches(self, epochs: int, steps_per_epoch: int) -> tf.data.Dataset:
        def change(number: tf.Tensor, batches: Any) -> Any:
            epoch = number // steps_per_epoch
            step = number % steps_per_epoch
            first = tf.constant(0, tf.int64)
            return self._change(batches, Draws(self._seed, epoch, step, size=self.batching.global_size, first=first))

        batches = tf.data.Dataset.zip(tuple(feed.batches(epochs, steps_per_epoch) for feed in self._feeds))
        return prefetch(batches.enumerate().map(change, num_parallel_calls=tf.data.AUTOTUNE))

    @property
    def changed_image(self) -> str | None:
        """Name of the image input that changes, or None."""
        options = self._changes.options
        changes_images = any(getattr(options, key) for key in (*IMAGE_OPTIONS, *MIXTURES))
        return self._changes.image if changes_images else None

    @property
    def changed_text(self) -> str | None:
        """Name of the text input that changes, or None."""
        return self._changes.text if self._changes.options.word_dropout else None

    def change_examples(self, halves: Sequence[Arrays], epoch: int) -> Any:
        """Returns the inputs of the first half as an epoch may change them.

        The second half has partners for mixtures.
        """
        batches = []
        for half in halves[: len(self._feeds)]:
            parts = [tf.nest.map_structure(tf.constant, part) for part in half.parts]
            batches.append((*parts, tf.ones([len(half)])))
        zero = tf.constant(0, tf.int64)
        draws = Draws(self._seed, tf.constant(epoch, tf.int64), zero, size=len(halves[0]), first=zero)
        inputs, *_ = self._change(batches, draws)
        return inputs

    def _change(self, batches: Any, draws: Draws) -> tuple[Any, ...]:
        """Augments one batch (inputs, ...) from each feed."""
        ((inputs, targets, *rest),) = batches
        return *self._changes.change(inputs, targets, draws), *rest


class MixedFeed(AugmentedFeed):
    """Mixes each example with a partner.

    Mixup (Zhang et al. 2017, arXiv:1710.09412) averages the two. Cutmix (Yun et al. 2019, arXiv:1905.04899) pastes a
    rectangle of the partner's image. With both options, each example is mixed by one of them.

    The partner is the example at the same position in a second shuffled order of the epoch. So pairs do not depend on
    how a batch is divided. Targets are mixed as well; class targets become one-hot [b, classes] float32.

    If examples have weights, the loss is the mixture of the two weighted losses. So a target counts by its weight, and
    a target with weight 0 does not count (`weigh_share`).
    """

    def __init__(self, feed: Any, changes: Changes, seed: int, outputs: Any) -> None:
        partner_seed = int(np.random.default_rng([seed, PARTNER_SEED]).integers(2**31))
        super().__init__(changes, seed, feed, feed.reorder(partner_seed))
        self._classes = outputs.shape[-1] if outputs.kind == "classification" else None
        self._shares = {}
        for key, number in SHARE_SEEDS.items():
            alpha = getattr(changes.options, key)
            if alpha:
                random = np.random.default_rng([seed, number])
                self._shares[key] = random.beta(alpha, alpha, MIX_WEIGHTS).astype(np.float32)

    def _change(self, batches: Any, draws: Draws) -> tuple[Any, ...]:
        own, partner = batches
        inputs, targets, mask, *weights = own
        partner_inputs, partner_targets, _, *partner_weights = partner
        inputs, targets = self._changes.change(inputs, targets, draws)
        partner_inputs, partner_targets = self._changes.change(partner_inputs, partner_targets, draws.of_partner())
        pixels, share = self._find_shares(inputs, draws)
        mixed = mix_examples(inputs, partner_inputs, pixels)
        mixed_weights = []
        if weights:
            share, total = weigh_share(share, weights[0], partner_weights[0])
            mixed_weights = [total]
        mixed_targets = mix_examples(self._soft(targets), self._soft(partner_targets), share)
        return mixed, mixed_targets, mask, *mixed_weights

    def _find_shares(self, inputs: tf.Tensor, draws: Draws) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the share of each example in its mixture: in the pixels, [b] or [b, h, w, 1], and in the
        target, [b].
        """
        length = batch_length(inputs)
        if "cutmix" not in self._shares:
            share = self._choose_share("mixup", draws.of("mixup", length))
            return share, share
        drawn = draws.of("cutmix", length)
        kept = keep_outside(inputs.shape[1:3], self._choose_share("cutmix", drawn), drawn[1:3])
        kept_share = tf.reduce_mean(kept, axis=[1, 2, 3])
        if "mixup" not in self._shares:
            return kept, kept_share
        share = self._choose_share("mixup", draws.of("mixup", length))
        is_cut = drawn[3] < 0.5
        pixels = tf.where(is_cut[:, None, None, None], kept, share[:, None, None, None])
        return pixels, tf.where(is_cut, kept_share, share)

    def _choose_share(self, key: str, drawn: tf.Tensor) -> tf.Tensor:
        """Returns a share of a kind of mixture for each example, [b]."""
        return tf.gather(tf.constant(self._shares[key]), scale_to_integers(drawn[0], MIX_WEIGHTS))

    def _soft(self, targets: tf.Tensor) -> tf.Tensor:
        """Returns classes as one-hot vectors, and other targets unchanged."""
        if self._classes is None:
            return targets
        return tf.one_hot(targets, self._classes)


def keep_outside(size: Sequence[int], share: tf.Tensor, drawn: tf.Tensor) -> tf.Tensor:
    """Returns 0 in a rectangle of whole pixels of each image and 1 elsewhere, [b, h, w, 1].

    The rectangle's area is nearly 1 - share [b], with the image's aspect ratio. `drawn` [2, b] sets its place.
    """
    inside = []
    for length, place in zip(size, tf.unstack(drawn), strict=True):
        extent = tf.round(tf.sqrt(1 - share) * length)
        first = tf.floor(place * (length - extent + 1))[:, None]
        places = tf.range(length, dtype=tf.float32)
        inside.append((places >= first) & (places < first + extent[:, None]))
    rows, columns = inside
    return tf.cast(~(rows[:, :, None] & columns[:, None, :]), tf.float32)[..., None]


def mix_examples(values: tf.Tensor, others: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Returns share * values + (1 - share) * others, [b, ...] in the dtype of `values`; rounds integers.

    `share` is [b], or has a number for each pixel.
    """
    dtype = tf.float64 if values.dtype == tf.float64 else tf.float32
    missing_axes = values.shape.rank - share.shape.rank
    shares = tf.cast(tf.reshape(share, [*share.shape, *[1] * missing_axes]), dtype)
    mixed = shares * tf.cast(values, dtype) + (1 - shares) * tf.cast(others, dtype)
    if values.dtype.is_integer:
        mixed = tf.round(mixed)
    return tf.cast(mixed, values.dtype)


def weigh_share(share: tf.Tensor, weights: tf.Tensor, others: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the share of the first target in a mixture of two weighted targets, and the mixture's weight, both [b].

    For a loss L that is linear in the target, such as the cross-entropy, and total = share * w + (1 - share) * v:

        share * w * L(y) + (1 - share) * v * L(z) = total * L((share * w * y + (1 - share) * v * z) / total)

    The squared error has the same gradient.

    Args:
        share: share of the first target, [b].
        weights, others: weights of the first and the second target, [b].
    """
    own = share * weights
    total = own + (1 - share) * others
    return tf.where(total > 0, tf.math.divide_no_nan(own, total), share), total
