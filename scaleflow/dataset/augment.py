"""Data augmentation of the training split: flips, crops and mixup.

All random numbers are a pure function of (seed, epoch, step). They are drawn for the whole global batch, and each
replica takes its rows. So the number of replicas, the training engine and a resume do not change the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Augment,
    Batching,
    Feed,
    Inputs,
    InputStructure,
    Outputs,
    OutputStructure,
    describe_keys,
    map_named,
    name_leaves,
)

#: Number of mixup weights that are drawn in advance. Each example uses one of them.
MIX_WEIGHTS = 1 << 16

#: Kinds of random numbers, each with its own seed. Those of a mixup partner are offset by `KIND_COUNT`.
FLIP, DOWN, ACROSS, MIX_WEIGHT, KIND_COUNT = range(5)


def augment_feed(
    feed: Any, options: Augment | None, seed: int, inputs: InputStructure, outputs: OutputStructure
) -> Feed:
    """Wraps the training feed as `dataset.augment` asks for; without options it is returned unchanged.

    `inputs` and `outputs` describe the inputs and targets that the feed returns. Raises ConfigError if an option does
    not apply to such inputs.
    """
    if options is None or options == Augment():
        return feed  # type: ignore[no-any-return]
    if options.mixup:
        check_mixup(options, inputs, outputs)
    image = find_image(options, inputs, outputs)
    return MixedFeed(feed, options, seed, outputs) if options.mixup else AugmentedFeed(options, seed, image, feed)


def check_mixup(options: Augment, inputs: InputStructure, outputs: OutputStructure) -> None:
    """Rejects examples that cannot be mixed."""
    key = f"dataset.augment.mixup={options.mixup:g}"
    for what, structure in (("inputs", inputs), ("targets", outputs)):
        if isinstance(structure, Mapping):
            raise ConfigError(
                f"{key}: mixes only examples of one tensor, and the dataset's {what} {describe_keys(structure)}; "
                "remove it"
            )
    assert isinstance(inputs, Inputs)
    assert isinstance(outputs, Outputs)
    if is_text(inputs):
        raise ConfigError(f"{key}: mixes only numbers, and the dataset's inputs are text; remove it")
    if outputs.ignore is not None:
        raise ConfigError(f"{key}: cannot mix targets of which {outputs.ignore} is ignored (Outputs.ignore); remove it")


def find_image(options: Augment, inputs: InputStructure, outputs: OutputStructure) -> str:
    """Returns the name of the only input that is an image, "" if it is the only input.

    Raises:
        ConfigError: if images are to be changed, and there is none, there are several, or a target has a value for each
            pixel, which would not move with it.
    """
    leaves = name_leaves(inputs)
    images = [name for name, each in leaves.items() if len(each.shape) == 3 and not is_text(each)]
    for key, value, wanted in (("flip", "true", options.flip), ("crop", options.crop, options.crop > 0)):
        if not wanted:
            continue
        if len(images) != 1:
            shapes = [f"{name} {each.shape}" for name, each in leaves.items()]
            has = f"have shape {leaves[''].shape}" if "" in leaves else f"are {', '.join(shapes)}"
            raise ConfigError(
                f"dataset.augment.{key}={value}: needs images of shape (height, width, channels), "
                f"{'one in each example, ' if len(images) > 1 else ''}and the dataset's inputs {has}; remove it"
            )
        for each in name_leaves(outputs).values():
            if len(each.shape) > 2 or each.shape[:2] == leaves[images[0]].shape[:2]:
                raise ConfigError(
                    f"dataset.augment.{key}={value}: moves the pixels of images, but not the dataset's targets of "
                    f"shape {each.target_shape}; augment both in the dataset"
                )
    return images[0] if images else ""


def is_text(inputs: Inputs) -> bool:
    return inputs.dtype == "string" or inputs.vocabulary is not None


class AugmentedFeed:
    """Flips and crops the images of another feed, which are its input named `image`."""

    def __init__(self, options: Augment, seed: int, image: str, *feeds: Any) -> None:
        self.examples: int = feeds[0].examples
        self.batching: Batching = feeds[0].batching
        self.ahead: bool = feeds[0].ahead
        self.is_indexed = False
        self._options = options
        self._seed = seed
        self._image = image
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
        batches = [feed.micro_batch(part, epoch, step, replica, index) for feed, part in parts]
        first = tf.cast(replica, tf.int64) * self.batching.share + index * self.batching.batch_size
        return self._change(batches, Draws(self._seed, epoch, step, self.batching.global_size, first))

    def batches(self, epochs: int, steps_per_epoch: int) -> tf.data.Dataset:
        def change(number: tf.Tensor, batches: Any) -> Any:
            epoch, step = number // steps_per_epoch, number % steps_per_epoch
            first = tf.constant(0, tf.int64)
            return self._change(batches, Draws(self._seed, epoch, step, self.batching.global_size, first))

        batches = tf.data.Dataset.zip(tuple(feed.batches(epochs, steps_per_epoch) for feed in self._feeds))
        return batches.enumerate().map(change, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)

    def _change(self, batches: Any, draws: Draws) -> tuple[Any, ...]:
        """Augments one batch (inputs, ...) from each feed. Traced."""
        ((inputs, *rest),) = batches
        return map_named(lambda name, x: self._move(x, draws, 0) if name == self._image else x, inputs), *rest

    def _move(self, images: tf.Tensor, draws: Draws, kinds: int) -> tf.Tensor:
        """Flips and crops images. `kinds` offsets the kinds of random numbers, for a mixup partner."""
        length = batch_length(images)
        flips = draws.uniform(kinds + FLIP, length) < 0.5 if self._options.flip else None
        if not self._options.crop:
            return images if flips is None else flip(images, flips)
        offsets = 2 * self._options.crop + 1
        down, across = (draws.integers(kinds + kind, length, offsets) for kind in (DOWN, ACROSS))
        return crop(images, self._options.crop, down, across, flips)


class MixedFeed(AugmentedFeed):
    """Mixes each example with a partner: mixup (Zhang et al. 2017, arXiv:1710.09412).

    The partner is the example at the same position of a second shuffled order of the same epoch, so pairs do not
    depend on how a batch is divided. Targets are mixed, too; class targets become one-hot [b, classes] float32.
    """

    def __init__(self, feed: Any, options: Augment, seed: int, outputs: Any) -> None:
        partner_seed = int(np.random.default_rng([seed, 4]).integers(2**31))
        super().__init__(options, seed, "", feed, feed.reorder(partner_seed))
        self._classes = outputs.shape[-1] if outputs.kind == "classification" else None
        alpha = options.mixup
        self._shares = np.random.default_rng([seed, 3]).beta(alpha, alpha, MIX_WEIGHTS).astype(np.float32)

    def _change(self, batches: Any, draws: Draws) -> tuple[Any, ...]:
        (inputs, targets, mask, *weights), (partner_inputs, partner_targets, _, *partner_weights) = batches
        indices = draws.integers(MIX_WEIGHT, batch_length(inputs), MIX_WEIGHTS)
        share = tf.gather(tf.constant(self._shares), indices)
        mixed = mix_examples(self._move(inputs, draws, 0), self._move(partner_inputs, draws, KIND_COUNT), share)
        mixed_targets = mix_examples(self._soft(targets), self._soft(partner_targets), share)
        mixed_weights = [mix_examples(*each, share) for each in zip(weights, partner_weights, strict=True)]
        return mixed, mixed_targets, mask, *mixed_weights

    def _soft(self, targets: tf.Tensor) -> tf.Tensor:
        """Converts targets to float32; classes become one-hot."""
        if self._classes is None:
            return tf.cast(targets, tf.float32)
        return tf.one_hot(targets, self._classes)


class Draws:
    """Random numbers for one part of a global batch.

    Seed, epoch and step determine the numbers, which are drawn for the whole global batch of this `size`; `first` is
    the index in it of the part's first example.
    """

    def __init__(self, seed: int, epoch: tf.Tensor, step: tf.Tensor, size: int, first: tf.Tensor) -> None:
        start = tf.constant([seed, 2], tf.int64)  # other draws from the run's seed use other second numbers
        folded = tf.random.experimental.stateless_fold_in(start, tf.cast(epoch, tf.int64), alg="philox")
        self._seed = tf.random.experimental.stateless_fold_in(folded, tf.cast(step, tf.int64), alg="philox")
        self._size = size
        self._first = first

    def uniform(self, kind: int, count: int) -> tf.Tensor:
        """Returns [count] float32 in [0, 1)."""
        seed = tf.random.experimental.stateless_fold_in(self._seed, tf.constant(kind, tf.int64), alg="philox")
        numbers = tf.random.stateless_uniform([self._size], seed, alg="philox")
        return tf.slice(numbers, [self._first], [count])

    def integers(self, kind: int, count: int, most: int) -> tf.Tensor:
        """Returns [count] int32 in [0, most)."""
        return tf.minimum(tf.cast(self.uniform(kind, count) * most, tf.int32), most - 1)


def flip(images: tf.Tensor, chosen: tf.Tensor) -> tf.Tensor:
    """Mirrors the chosen images of [b, h, w, c] left to right."""
    columns = mirror(tf.range(images.shape[2])[None], images.shape[2], chosen)
    return tf.gather(images, columns, axis=2, batch_dims=1)


def mirror(columns: tf.Tensor, width: int, chosen: tf.Tensor) -> tf.Tensor:
    """Returns indices of columns [b, n] for images of this width, of which the chosen ones are read from the right.

    Other indices for the same gather cost nothing; mirroring all images, and taking some, costs more than the rest.
    """
    return tf.where(chosen[:, None], width - 1 - columns, columns)


def crop(
    images: tf.Tensor, padding: int, down: tf.Tensor, across: tf.Tensor, flips: tf.Tensor | None = None
) -> tf.Tensor:
    """Pads images [b, h, w, c] of one size with zeros, and cuts a window of the original size out of each.

    `padding` pixels are added at each side; `down` and `across` are the [b] offsets of each window, 0 to 2 * padding.
    The images of `flips` [b] are mirrored before.
    """
    height, width = images.shape[1:3]
    paddings = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
    rows = tf.gather(tf.pad(images, paddings), down[:, None] + tf.range(height), axis=1, batch_dims=1)
    columns = across[:, None] + tf.range(width)
    if flips is not None:
        columns = mirror(columns, width + 2 * padding, flips)
    return tf.gather(rows, columns, axis=2, batch_dims=1)


def mix_examples(values: tf.Tensor, others: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Returns share * values + (1 - share) * others, [b, ...] of the dtype of `values`; rounds integers."""
    shares = tf.reshape(share, [-1, *[1] * (values.shape.rank - 1)])
    mixed = shares * tf.cast(values, tf.float32) + (1 - shares) * tf.cast(others, tf.float32)
    return tf.cast(tf.round(mixed) if values.dtype.is_integer else mixed, values.dtype)


def batch_length(batch: tf.Tensor) -> int:
    return int(batch.shape[0])
