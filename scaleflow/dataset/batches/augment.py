"""Data augmentation of the training split: changes of images, of their masks and of texts, mixup and cutmix.

All random numbers are a pure function of (seed, epoch, step). They are drawn for the whole global batch, and each
replica takes its rows. So the number of replicas, the training engine and a resume do not change the result.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.image_changes import (
    CHOSEN,
    affine,
    change_at_random,
    crop_and_resize,
    drop_words,
    erase,
    jitter,
    move_at_random,
    scale_to_integers,
    shift_and_flip,
    transform,
)
from scaleflow.dataset.batches.records import prefetch
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Arrays,
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

#: Number of the shares of mixtures that are drawn in advance. Each example uses one of them.
MIX_WEIGHTS = 1 << 16

#: The first of the random numbers of an example that each option uses, and their count. Each has its own seed, so that
#: a further option changes nothing about those before. Those of a partner in a mixture are offset by `PARTNER`.
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

#: Options that move pixels by a matrix: (strength, random numbers, height and width) -> what `affine` returns.
MATRICES: Mapping[str, Callable[[float, tf.Tensor, Sequence[int]], tf.Tensor]] = {
    "rotation": lambda most, drawn, size: affine(angle=most * math.pi / 180 * (2 * drawn[0] - 1)),
    "zoom": lambda most, drawn, size: affine(scale=1 + most * (2 * drawn[0] - 1)),
    "translation": lambda most, drawn, size: affine(
        moves=[most * length * (2 * each - 1) for length, each in zip(size, tf.unstack(drawn), strict=True)]
    ),
    "randaugment": move_at_random,
}

#: Options that change the values of pixels, in this order: (images, strength, random numbers, white=) -> images.
CHANGES: Mapping[str, Callable[..., tf.Tensor]] = {
    "randaugment": change_at_random,
    "color_jitter": lambda images, most, drawn, white: jitter(images, most, drawn),
    "contrast": lambda images, most, drawn, white: jitter(
        images, most, tf.pad(drawn, [[1, 1], [0, 0]], constant_values=0.5)
    ),
    "erase": lambda images, chance, drawn, white: erase(images, chance, drawn),
}

#: The options that move pixels, those that need an image, and those that mix two examples.
MOVES = ("flip", "vertical_flip", "crop", "resized_crop", *MATRICES)
IMAGE_OPTIONS = tuple(dict.fromkeys((*MOVES, *CHANGES, "cutmix")))
MIXTURES = ("mixup", "cutmix")


def augment_feed(
    feed: Any, options: Augment | None, seed: int, inputs: InputStructure, outputs: OutputStructure
) -> Feed:
    """Wraps the training feed as `dataset.augment` asks for; without options it is returned unchanged.

    `inputs` and `outputs` describe the inputs and targets that the feed returns. Raises ConfigError if an option does
    not apply to such inputs.
    """
    if options is None or options == Augment():
        return feed  # type: ignore[no-any-return]
    mixes = [key for key in MIXTURES if getattr(options, key)]
    find = functools.partial(find_only, options, inputs)
    images, words = "images of shape (height, width, channels)", "texts as numbers of words"
    image = find(IMAGE_OPTIONS, needed=images, fits=lambda each: len(each.shape) == 3 and not is_text(each))
    text = find(("word_dropout",), needed=words, fits=lambda each: len(each.shape) == 1 and each.vocabulary is not None)
    for key in mixes:
        check_mixture(key, options, inputs, outputs=outputs)
    check_changed_values(options, inputs, outputs, image=image, text=text)
    white = None if image is None else find_range(name_leaves(inputs)[image])
    masks = find_masks(options, image, inputs, outputs=outputs)
    changes = Changes(options, image, text, masks=masks, white=white or 1.0)
    return MixedFeed(feed, changes, seed, outputs=outputs) if mixes else AugmentedFeed(changes, seed, feed)


def check_mixture(option: str, options: Augment, inputs: InputStructure, outputs: OutputStructure) -> None:
    """Rejects examples that cannot be mixed."""
    key = label_option(options, option)
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
    if option == "cutmix" and len(outputs.shape) > 1:
        raise ConfigError(
            f"{key}: mixes one target of each image, and the dataset's have shape {outputs.target_shape}; remove it"
        )


def check_changed_values(
    options: Augment, inputs: InputStructure, outputs: OutputStructure, image: str | None, text: str | None
) -> None:
    """Rejects targets that would have to change with the words of a text, and images without a known range."""
    named = name_leaves(inputs)
    if options.randaugment and image is not None and find_range(named[image]) is None:
        raise ConfigError(
            f"{label_option(options, 'randaugment')}: needs images of bytes (uint8) or with Inputs.scale, and the "
            f"dataset's are {named[image].dtype}; use rotation, translation, contrast or color_jitter, or leave "
            "dataset.normalise false"
        )
    if options.word_dropout and text is not None:
        for each in name_leaves(outputs).values():
            if each.target_shape[:1] == named[text].shape[:1]:
                raise ConfigError(
                    f"{label_option(options, 'word_dropout')}: leaves out words, and the dataset's targets of shape "
                    f"{each.target_shape} are for each word; remove it"
                )


def find_only(
    options: Augment, inputs: InputStructure, keys: Sequence[str], *, needed: str, fits: Callable[[Inputs], bool]
) -> str | None:
    """Returns the name of the only input that `fits`, "" if it is the only input; None without one.

    Raises:
        ConfigError: if one of the options `keys` is to change such an input, and there is none, or there are several.
    """
    leaves = name_leaves(inputs)
    found = [name for name, each in leaves.items() if fits(each)]
    for key in keys:
        if getattr(options, key) and len(found) != 1:
            shapes = [f"{name} {each.shape}" for name, each in leaves.items()]
            has = f"have shape {leaves[''].shape}" if "" in leaves else f"are {', '.join(shapes)}"
            raise ConfigError(
                f"{label_option(options, key)}: needs {needed}, "
                f"{'one in each example, ' if len(found) > 1 else ''}and the dataset's inputs {has}; remove it"
            )
    return found[0] if len(found) == 1 else None


def find_masks(
    options: Augment, image: str | None, inputs: InputStructure, outputs: OutputStructure
) -> Mapping[str, Outputs]:
    """Returns the outputs whose targets have a value for each pixel of the image named `image`, by their names.

    Raises:
        ConfigError: if pixels are to be moved, and targets for places that are not those pixels would not move with
            them, or a border would need targets that mean nothing.
    """
    moves = [key for key in MOVES if getattr(options, key)]
    if image is None or (not moves and not options.erase):
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
    return f"dataset.augment.{key}={'true' if value is True else format(value, 'g')}"


def is_text(inputs: Inputs) -> bool:
    return inputs.dtype == "string" or inputs.vocabulary is not None


def find_range(inputs: Inputs) -> float | None:
    """Returns the value of white in images whose black is 0; None if it is not known."""
    return 255.0 if inputs.dtype == "uint8" else None if inputs.scale is None else 1 / inputs.scale


@dataclass(frozen=True)
class Changes:
    """What is changed: the inputs named `image` and `text`, if there are such, and the targets for pixels.

    `white` is the greatest value of the images, for `randaugment`.
    """

    options: Augment
    image: str | None
    text: str | None
    masks: Mapping[str, Outputs]
    white: float

    def change(self, inputs: Any, targets: Any, draws: Draws) -> tuple[Any, Any]:
        """Returns a batch's inputs and targets, changed."""
        changes = {self.image: self._change_image, self.text: self._change_text}
        changed = map_named(lambda name, x: changes[name](x, draws) if name in changes else x, inputs)
        if not self.masks:
            return changed, targets
        return changed, map_named(lambda name, y: self._change_mask(name, y, draws), targets)

    def _change_image(self, images: tf.Tensor, draws: Draws) -> tf.Tensor:
        images = self._move(images, draws)
        for key, change in CHANGES.items():
            if strength := getattr(self.options, key):
                images = change(images, strength, draws.of(key, batch_length(images)), white=self.white)
        return images

    def _change_text(self, words: tf.Tensor, draws: Draws) -> tf.Tensor:
        if not self.options.word_dropout:
            return words
        drawn = draws.of("word_dropout", *map(int, words.shape))
        return drop_words(words, self.options.word_dropout, drawn[0])

    def _change_mask(self, name: str, targets: tf.Tensor, draws: Draws) -> tf.Tensor:
        """Moves the targets of pixels with them. Those of erased pixels are ignored, if `Outputs.ignore` is set."""
        if name not in self.masks:
            return targets
        ignore = self.masks[name].ignore
        masks = targets[..., None] if targets.shape.rank == 3 else targets
        masks = self._move(masks, draws, ignore or 0, is_mask=self.masks[name].kind != "regression")
        if self.options.erase and ignore is not None:
            masks = erase(masks, self.options.erase, draws.of("erase", batch_length(masks)), fill=ignore)
        return masks[..., 0] if targets.shape.rank == 3 else masks

    def _move(self, images: tf.Tensor, draws: Draws, fill: int = 0, is_mask: bool = False) -> tf.Tensor:
        """Moves the pixels of [b, h, w, c]; the same draws move an image and its mask alike."""
        options, length, size = self.options, batch_length(images), images.shape[1:3]
        if options.resized_crop:
            images = crop_and_resize(images, options.resized_crop, draws.of("resized_crop", length), is_mask=is_mask)
        matrices = [
            make(strength, draws.of(key, length), size)
            for key, make in MATRICES.items()
            if (strength := getattr(options, key))
        ]
        if matrices:
            images = transform(images, functools.reduce(tf.matmul, matrices), is_mask)
        flips = [draws.of(key, length)[0] < 0.5 if getattr(options, key) else None for key in ("vertical_flip", "flip")]
        shifts = scale_to_integers(draws.of("crop", length), 2 * options.crop + 1) if options.crop else None
        return shift_and_flip(images, options.crop, shifts, flips=flips, fill=fill)


class AugmentedFeed:
    """Changes the images of another feed, and the targets for their pixels."""

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
            epoch, step = number // steps_per_epoch, number % steps_per_epoch
            first = tf.constant(0, tf.int64)
            return self._change(batches, Draws(self._seed, epoch, step, size=self.batching.global_size, first=first))

        batches = tf.data.Dataset.zip(tuple(feed.batches(epochs, steps_per_epoch) for feed in self._feeds))
        return prefetch(batches.enumerate().map(change, num_parallel_calls=tf.data.AUTOTUNE))

    @property
    def changed(self) -> tuple[str | None, str | None]:
        """The names of the image and of the text that change."""
        options, image, text = self._changes.options, self._changes.image, self._changes.text
        has_image = any(getattr(options, key) for key in (*IMAGE_OPTIONS, *MIXTURES))
        return image if has_image else None, text if options.word_dropout else None

    def change_examples(self, halves: Sequence[Arrays], epoch: int) -> Any:
        """Returns the inputs of the first half as an epoch may change them; the second has partners of mixtures."""
        batches = [
            (*(tf.nest.map_structure(tf.constant, part) for part in each.parts), tf.ones([len(each)]))
            for each in halves[: len(self._feeds)]
        ]
        place, first = tf.constant(epoch, tf.int64), tf.constant(0, tf.int64)
        return self._change(batches, Draws(self._seed, place, first, size=len(halves[0]), first=first))[0]

    def _change(self, batches: Any, draws: Draws) -> tuple[Any, ...]:
        """Augments one batch (inputs, ...) from each feed."""
        ((inputs, targets, *rest),) = batches
        return *self._changes.change(inputs, targets, draws), *rest


class MixedFeed(AugmentedFeed):
    """Mixes each example with a partner: mixup (Zhang et al. 2017, arXiv:1710.09412), which averages them, and cutmix
    (Yun et al. 2019, arXiv:1905.04899), which pastes a rectangle of the partner's image.

    The partner is the example at the same position of a second shuffled order of the same epoch, so pairs do not
    depend on how a batch is divided. Targets are mixed as well; class targets become one-hot [b, classes] float32. With
    both options each example is mixed by one of them.

    If examples have weights, the loss is the mixture of the two weighted losses. So a target counts by its weight, and
    one of weight 0 does not count (`weigh_share`).
    """

    def __init__(self, feed: Any, changes: Changes, seed: int, outputs: Any) -> None:
        partner_seed = int(np.random.default_rng([seed, 4]).integers(2**31))
        super().__init__(changes, seed, feed, feed.reorder(partner_seed))
        self._classes = outputs.shape[-1] if outputs.kind == "classification" else None
        self._shares = {
            key: np.random.default_rng([seed, number]).beta(alpha, alpha, MIX_WEIGHTS).astype(np.float32)
            for key, number in zip(MIXTURES, (3, 6), strict=True)
            if (alpha := getattr(changes.options, key))
        }

    def _change(self, batches: Any, draws: Draws) -> tuple[Any, ...]:
        (inputs, targets, mask, *weights), (partner_inputs, partner_targets, _, *partner_weights) = batches
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
        """Returns the share of each example in its mixture: in its pixels, [b] or [b, h, w, 1], and in its target."""
        length, found = batch_length(inputs), {}
        for key, shares in self._shares.items():
            drawn = draws.of(key, length)
            found[key] = tf.gather(tf.constant(shares), scale_to_integers(drawn[0], MIX_WEIGHTS))
        if "cutmix" not in found:
            return found["mixup"], found["mixup"]
        kept = keep_outside(inputs.shape[1:3], found["cutmix"], drawn[1:3])
        share = tf.reduce_mean(kept, axis=[1, 2, 3])
        if "mixup" not in found:
            return kept, share
        is_cut = drawn[3] < 0.5
        pixels = tf.where(is_cut[:, None, None, None], kept, found["mixup"][:, None, None, None])
        return pixels, tf.where(is_cut, share, found["mixup"])

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

    _offset = 0

    def __init__(self, seed: int, epoch: tf.Tensor, step: tf.Tensor, size: int, first: tf.Tensor) -> None:
        start = tf.constant([seed, 2], tf.int64)  # other draws from the run's seed use other second numbers
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
        """Returns the numbers of an option for each example, [numbers, *shape] float32 in [0, 1)."""
        first, count = NUMBERS[option]
        return tf.stack([self._draw(first + self._offset + number, *shape) for number in range(count)])

    def _draw(self, kind: int, count: int, *shape: int) -> tf.Tensor:
        seed = tf.random.experimental.stateless_fold_in(self._seed, tf.constant(kind, tf.int64), alg="philox")
        numbers = tf.random.stateless_uniform([self._size, *shape], seed, alg="philox")
        return tf.slice(numbers, [self._first, *[0] * len(shape)], [count, *shape])


def keep_outside(size: Sequence[int], share: tf.Tensor, drawn: tf.Tensor) -> tf.Tensor:
    """Returns 0 in a rectangle of whole pixels of each image and 1 elsewhere, [b, h, w, 1].

    The rectangle has nearly the area 1 - share [b], and the image's aspect ratio. `drawn` [2, b] says where it is.
    """
    inside = []
    for length, place in zip(size, tf.unstack(drawn), strict=True):
        extent = tf.round(tf.sqrt(1 - share) * length)
        first = tf.floor(place * (length - extent + 1))[:, None]
        places = tf.range(length, dtype=tf.float32)
        inside.append((places >= first) & (places < first + extent[:, None]))
    return tf.cast(~(inside[0][:, :, None] & inside[1][:, None, :]), tf.float32)[..., None]


def mix_examples(values: tf.Tensor, others: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Returns share * values + (1 - share) * others, [b, ...] of the dtype of `values`; rounds integers.

    `share` is [b], or has a number for each pixel.
    """
    dtype = tf.float64 if values.dtype == tf.float64 else tf.float32
    shares = tf.cast(tf.reshape(share, [*share.shape, *[1] * (values.shape.rank - share.shape.rank)]), dtype)
    mixed = shares * tf.cast(values, dtype) + (1 - shares) * tf.cast(others, dtype)
    return tf.cast(tf.round(mixed) if values.dtype.is_integer else mixed, values.dtype)


def weigh_share(share: tf.Tensor, weights: tf.Tensor, others: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the share of a target in the mixture of two weighted targets, and the weight of the mixture, both [b].

    For a loss L that is linear in the target, such as the cross-entropy, and total = share * w + (1 - share) * v:
    share * w * L(y) + (1 - share) * v * L(z) = total * L((share * w * y + (1 - share) * v * z) / total). The squared
    error has the same gradient.

    Args:
        share: of the first target, [b].
        weights, others: the weights of the first and of the second target, [b].
    """
    own = share * weights
    total = own + (1 - share) * others
    return tf.where(total > 0, tf.math.divide_no_nan(own, total), share), total


def batch_length(batch: tf.Tensor) -> int:
    return int(batch.shape[0])
