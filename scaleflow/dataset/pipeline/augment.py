"""Data augmentation of the training split: changes of images and of the masks that belong to them, and mixup.

All random numbers are a pure function of (seed, epoch, step). They are drawn for the whole global batch, and each
replica takes its rows. So the number of replicas, the training engine and a resume do not change the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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

#: The shares of each colour in the brightness of a pixel (ITU-R BT.601).
BRIGHTNESS = (0.299, 0.587, 0.114)

#: Bounds of the logarithm of the aspect ratio of the part that `resized_crop` cuts out.
CROP_ASPECT = math.log(4 / 3)

#: Bounds of the area of an erased rectangle, as fractions of the image, and of the logarithm of its aspect ratio.
ERASED_AREA, ERASED_ASPECT = (0.02, 0.33), math.log(10 / 3)


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
    images: tf.Tensor, padding: int, down: tf.Tensor, across: tf.Tensor, flips: tf.Tensor | None = None, fill: int = 0
) -> tf.Tensor:
    """Pads images [b, h, w, c] of one size with `fill`, and cuts a window of the original size out of each.

    `padding` pixels are added at each side; `down` and `across` are the [b] offsets of each window, 0 to 2 * padding.
    The images of `flips` [b] are mirrored before.
    """
    height, width = images.shape[1:3]
    paddings = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
    padded = tf.pad(images, paddings, constant_values=tf.constant(fill, images.dtype))
    rows = tf.gather(padded, down[:, None] + tf.range(height), axis=1, batch_dims=1)
    columns = across[:, None] + tf.range(width)
    if flips is not None:
        columns = mirror(columns, width + 2 * padding, flips)
    return tf.gather(rows, columns, axis=2, batch_dims=1)


def crop_and_resize(images: tf.Tensor, least: float, drawn: tf.Tensor, is_mask: bool) -> tf.Tensor:
    """Cuts a part out of each image of [b, h, w, c], and resizes it to [h, w].

    Args:
        images: of any number dtype.
        least: the least fraction of the area.
        drawn: [4, b] float32 in [0, 1): area, aspect ratio, place down and across.
        is_mask: take the nearest pixel, in place of bilinear values.
    """
    area = least + (1 - least) * drawn[0]
    height, width = rectangle(area, CROP_ASPECT, drawn[1])
    top, left = drawn[2] * (1 - height), drawn[3] * (1 - width)
    # A little smaller: a pixel that rounding places beyond the last one would be black.
    boxes = tf.stack([top, left, top + height * (1 - 1e-5), left + width * (1 - 1e-5)], axis=1)
    method = "nearest" if is_mask else "bilinear"
    parts = tf.image.crop_and_resize(images, boxes, tf.range(images.shape[0]), images.shape[1:3], method)
    return to_dtype(parts, images.dtype)


def rectangle(area: tf.Tensor, log_aspect: float, drawn: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns [b] heights and widths, as fractions of the image, at most 1; `drawn` [b] chooses the aspect ratios."""
    aspect = tf.exp(log_aspect * (2 * drawn - 1))
    return tf.minimum(tf.sqrt(area / aspect), 1.0), tf.minimum(tf.sqrt(area * aspect), 1.0)


def jitter(images: tf.Tensor, strength: float, drawn: tf.Tensor) -> tf.Tensor:
    """Changes brightness, contrast and saturation of [b, h, w, c] images, in this order; integers stay in their range.

    `drawn` is [3, b] float32 in [0, 1). An image that has not three channels has no saturation.
    """
    b, c, s = (factor[:, None, None, None] for factor in tf.unstack(1 + strength * (2 * drawn - 1)))
    values = tf.cast(images, tf.float32)
    if images.shape[-1] == 3:
        grey = tf.tensordot(values, tf.constant(BRIGHTNESS), 1)[..., None]
    else:
        grey, s = tf.reduce_mean(values, axis=-1, keepdims=True), tf.ones_like(s)
    mean = tf.reduce_mean(grey, axis=[1, 2, 3], keepdims=True)
    # All three are linear: v = b x; v = mean(v) + c (v - mean(v)); v = grey(v) + s (v - grey(v)).
    return to_dtype(values * (b * c * s) + grey * (b * c * (1 - s)) + mean * (b * (1 - c)), images.dtype)


def erase(images: tf.Tensor, probability: float, drawn: tf.Tensor, fill: int = 0) -> tf.Tensor:
    """Fills a rectangle of some of the images [b, h, w, c].

    `drawn` is [5, b] float32 in [0, 1): whether, area, aspect ratio, place down and across.
    """
    least, most = ERASED_AREA
    height, width = rectangle(least + (most - least) * drawn[1], ERASED_ASPECT, drawn[2])
    inside = []
    for size, start, extent in zip(images.shape[1:3], tf.unstack(drawn[3:]), (height, width), strict=True):
        first = start * (1 - extent)
        places = (tf.range(size, dtype=tf.float32) + 0.5) / size
        inside.append((places >= first[:, None]) & (places < (first + extent)[:, None]))
    is_erased = (
        inside[0][:, :, None, None] & inside[1][:, None, :, None] & (drawn[0] < probability)[:, None, None, None]
    )
    return tf.where(is_erased, tf.constant(fill, images.dtype), images)


def to_dtype(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Converts float32 to the dtype; for an integer one it rounds, and keeps the range."""
    return tf.saturate_cast(tf.round(values), dtype) if dtype.is_integer else tf.cast(values, dtype)


#: Number of mixup weights that are drawn in advance. Each example uses one of them.
MIX_WEIGHTS = 1 << 16

#: Kinds of random numbers, each with its own seed. Those of a mixup partner are offset by `KIND_COUNT`.
FLIP, DOWN, ACROSS, MIX_WEIGHT, PART, COLOR, ERASE, KIND_COUNT = 0, 1, 2, 3, 4, 8, 11, 16

#: The options that move pixels, and those that change their values.
MOVES, CHANGES = ("flip", "crop", "resized_crop"), ("color_jitter", "erase")


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
    changes = ImageChanges(options, image, find_masks(options, image, inputs, outputs))
    return MixedFeed(feed, changes, seed, outputs) if options.mixup else AugmentedFeed(changes, seed, feed)


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
        ConfigError: if images are to be changed, and there is none, or there are several.
    """
    leaves = name_leaves(inputs)
    images = [name for name, each in leaves.items() if len(each.shape) == 3 and not is_text(each)]
    for key in (*MOVES, *CHANGES):
        if getattr(options, key) and len(images) != 1:
            shapes = [f"{name} {each.shape}" for name, each in leaves.items()]
            has = f"have shape {leaves[''].shape}" if "" in leaves else f"are {', '.join(shapes)}"
            raise ConfigError(
                f"{label_option(options, key)}: needs images of shape (height, width, channels), "
                f"{'one in each example, ' if len(images) > 1 else ''}and the dataset's inputs {has}; remove it"
            )
    return images[0] if images else ""


def find_masks(options: Augment, image: str, inputs: InputStructure, outputs: OutputStructure) -> Mapping[str, Outputs]:
    """Returns the outputs whose targets have a value for each pixel of the image named `image`, by their names.

    Raises:
        ConfigError: if pixels are to be moved, and targets for places that are not those pixels would not move with
            them, or a border would need targets that mean nothing.
    """
    moves = [key for key in MOVES if getattr(options, key)]
    if not moves and not options.erase:
        return {}
    size = tuple(name_leaves(inputs)[image].shape[:2])
    masks = {name: each for name, each in name_leaves(outputs).items() if tuple(each.target_shape[:2]) == size}
    for name, each in name_leaves(outputs).items():
        if moves and name not in masks and len(each.shape) > 2:
            raise ConfigError(
                f"{label_option(options, moves[0])}: moves the pixels of images, but not the dataset's targets of "
                f"shape {each.target_shape}; augment both in the dataset"
            )
        if options.crop and name in masks and each.ignore is None:
            raise ConfigError(
                f"{label_option(options, 'crop')}: adds a border, and the dataset has no target for it "
                "(Outputs.ignore); use dataset.augment.resized_crop"
            )
    return masks


def label_option(options: Augment, key: str) -> str:
    value = getattr(options, key)
    return f"dataset.augment.{key}={'true' if value is True else value}"


def is_text(inputs: Inputs) -> bool:
    return inputs.dtype == "string" or inputs.vocabulary is not None


@dataclass(frozen=True)
class ImageChanges:
    """What is changed: the input named `image`, and the targets for its pixels."""

    options: Augment
    image: str
    masks: Mapping[str, Outputs]

    def change(self, inputs: Any, targets: Any, draws: Draws, kinds: int = 0) -> tuple[Any, Any]:
        """Returns a batch's inputs and targets, changed. `kinds` offsets the random numbers, for a mixup partner."""
        changed = map_named(lambda name, x: self._change_image(x, draws, kinds) if name == self.image else x, inputs)
        if not self.masks:
            return changed, targets
        return changed, map_named(lambda name, y: self._change_mask(name, y, draws, kinds), targets)

    def _change_image(self, images: tf.Tensor, draws: Draws, kinds: int) -> tf.Tensor:
        images, length = self._move(images, draws, kinds), batch_length(images)
        if self.options.color_jitter:
            images = jitter(images, self.options.color_jitter, draws.several(kinds + COLOR, 3, length))
        if self.options.erase:
            images = erase(images, self.options.erase, draws.several(kinds + ERASE, 5, length))
        return images

    def _change_mask(self, name: str, targets: tf.Tensor, draws: Draws, kinds: int) -> tf.Tensor:
        """Moves the targets of pixels with them. Those of erased pixels are ignored, if `Outputs.ignore` is set."""
        if name not in self.masks:
            return targets
        ignore = self.masks[name].ignore
        masks = targets[..., None] if targets.shape.rank == 3 else targets
        masks = self._move(masks, draws, kinds, ignore or 0, is_mask=self.masks[name].kind != "regression")
        if self.options.erase and ignore is not None:
            masks = erase(masks, self.options.erase, draws.several(kinds + ERASE, 5, batch_length(masks)), ignore)
        return masks[..., 0] if targets.shape.rank == 3 else masks

    def _move(self, images: tf.Tensor, draws: Draws, kinds: int, fill: int = 0, is_mask: bool = False) -> tf.Tensor:
        """Moves the pixels of [b, h, w, c]; the same draws move an image and its mask alike."""
        options, length = self.options, batch_length(images)
        if options.resized_crop:
            part = draws.several(kinds + PART, 4, length)
            images = crop_and_resize(images, options.resized_crop, part, is_mask)
        flips = draws.uniform(kinds + FLIP, length) < 0.5 if options.flip else None
        if not options.crop:
            return images if flips is None else flip(images, flips)
        offsets = 2 * options.crop + 1
        down, across = (draws.integers(kinds + kind, length, offsets) for kind in (DOWN, ACROSS))
        return crop(images, options.crop, down, across, flips, fill)


class AugmentedFeed:
    """Changes the images of another feed, and the targets for their pixels."""

    def __init__(self, changes: ImageChanges, seed: int, *feeds: Any) -> None:
        self.examples: int = feeds[0].examples
        self.batching: Batching = feeds[0].batching
        self.ahead: bool = feeds[0].ahead
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
        ((inputs, targets, *rest),) = batches
        return *self._changes.change(inputs, targets, draws), *rest


class MixedFeed(AugmentedFeed):
    """Mixes each example with a partner: mixup (Zhang et al. 2017, arXiv:1710.09412).

    The partner is the example at the same position of a second shuffled order of the same epoch, so pairs do not
    depend on how a batch is divided. Targets are mixed, too; class targets become one-hot [b, classes] float32.
    """

    def __init__(self, feed: Any, changes: ImageChanges, seed: int, outputs: Any) -> None:
        partner_seed = int(np.random.default_rng([seed, 4]).integers(2**31))
        super().__init__(changes, seed, feed, feed.reorder(partner_seed))
        self._classes = outputs.shape[-1] if outputs.kind == "classification" else None
        alpha = changes.options.mixup
        self._shares = np.random.default_rng([seed, 3]).beta(alpha, alpha, MIX_WEIGHTS).astype(np.float32)

    def _change(self, batches: Any, draws: Draws) -> tuple[Any, ...]:
        (inputs, targets, mask, *weights), (partner_inputs, partner_targets, _, *partner_weights) = batches
        indices = draws.integers(MIX_WEIGHT, batch_length(inputs), MIX_WEIGHTS)
        share = tf.gather(tf.constant(self._shares), indices)
        inputs, targets = self._changes.change(inputs, targets, draws)
        partner_inputs, partner_targets = self._changes.change(partner_inputs, partner_targets, draws, KIND_COUNT)
        mixed = mix_examples(inputs, partner_inputs, share)
        mixed_targets = mix_examples(self._soft(targets), self._soft(partner_targets), share)
        mixed_weights = [mix_examples(*each, share) for each in zip(weights, partner_weights, strict=True)]
        return mixed, mixed_targets, mask, *mixed_weights

    def _soft(self, targets: tf.Tensor) -> tf.Tensor:
        """Returns values as they are; classes become one-hot."""
        if self._classes is None:
            return targets
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

    def several(self, kind: int, kinds: int, count: int) -> tf.Tensor:
        """Returns [kinds, count] float32 in [0, 1), of this kind and those that follow."""
        return tf.stack([self.uniform(kind + each, count) for each in range(kinds)])

    def integers(self, kind: int, count: int, most: int) -> tf.Tensor:
        """Returns [count] int32 in [0, most)."""
        return tf.minimum(tf.cast(self.uniform(kind, count) * most, tf.int32), most - 1)


def mix_examples(values: tf.Tensor, others: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Returns share * values + (1 - share) * others, [b, ...] of the dtype of `values`; rounds integers."""
    dtype = tf.float64 if values.dtype == tf.float64 else tf.float32
    shares = tf.cast(tf.reshape(share, [-1, *[1] * (values.shape.rank - 1)]), dtype)
    mixed = shares * tf.cast(values, dtype) + (1 - shares) * tf.cast(others, dtype)
    return tf.cast(tf.round(mixed) if values.dtype.is_integer else mixed, values.dtype)


def batch_length(batch: tf.Tensor) -> int:
    return int(batch.shape[0])
