"""Changes the images or texts of a batch, and targets for pixels along with the images."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from scaleflow.features.augment.draws import Draws
from scaleflow.features.augment.feature import Augment
from scaleflow.features.augment.image_changes import (
    change_at_random,
    change_contrast,
    crop_and_resize,
    drop_words,
    erase,
    jitter,
    move_at_random,
    rotate,
    scale_to_integers,
    shift_and_flip,
    transform,
    translate,
    zoom,
)
from scaleflow.interfaces import Outputs, map_named

#: Options that move pixels by a matrix: (strength, random numbers, height and width) -> the result of `affine`.
MATRICES: Mapping[str, Callable[[float, tf.Tensor, Sequence[int]], tf.Tensor]] = {
    "rotation": rotate,
    "zoom": zoom,
    "translation": translate,
    "randaugment": move_at_random,
}


@dataclass(frozen=True)
class Changes:
    """The changes for a dataset: to the inputs named `image` and `text` (None: no such input), and to the targets for
    pixels.

    `white` is the largest value of the images, for `randaugment`.
    """

    options: Augment
    image: str | None
    text: str | None
    masks: Mapping[str, Outputs]
    white: float

    def change(self, inputs: Any, targets: Any, draws: Draws) -> tuple[Any, Any]:
        """Returns a batch's changed inputs and targets."""

        def change_input(name: str, values: tf.Tensor) -> tf.Tensor:
            if name == self.text:
                return self._change_text(values, draws)
            if name == self.image:
                return self._change_image(values, draws)
            return values

        def change_target(name: str, values: tf.Tensor) -> tf.Tensor:
            return self._change_mask(name, values, draws) if name in self.masks else values

        changed = map_named(change_input, inputs)
        if not self.masks:
            return changed, targets
        return changed, map_named(change_target, targets)

    def _change_image(self, images: tf.Tensor, draws: Draws) -> tf.Tensor:
        options = self.options
        length = batch_length(images)
        images = self._move(images, draws)
        if options.randaugment:
            images = change_at_random(images, options.randaugment, draws.of("randaugment", length), self.white)
        if options.color_jitter:
            images = jitter(images, options.color_jitter, draws.of("color_jitter", length))
        if options.contrast:
            images = change_contrast(images, options.contrast, draws.of("contrast", length))
        if options.erase:
            images = erase(images, options.erase, draws.of("erase", length))
        return images

    def _change_text(self, words: tf.Tensor, draws: Draws) -> tf.Tensor:
        if not self.options.word_dropout:
            return words
        drawn = draws.of("word_dropout", *map(int, words.shape))
        return drop_words(words, self.options.word_dropout, drawn[0])

    def _change_mask(self, name: str, targets: tf.Tensor, draws: Draws) -> tf.Tensor:
        """Moves targets for pixels like the pixels. Targets of erased pixels are ignored if `Outputs.ignore` is set."""
        ignore = self.masks[name].ignore
        has_channels = targets.shape.rank > 3
        masks = targets if has_channels else targets[..., None]
        masks = self._move(masks, draws, ignore or 0, is_mask=self.masks[name].kind != "regression")
        if self.options.erase and ignore is not None:
            masks = erase(masks, self.options.erase, draws.of("erase", batch_length(masks)), fill=ignore)
        return masks if has_channels else masks[..., 0]

    def _move(self, images: tf.Tensor, draws: Draws, fill: int = 0, is_mask: bool = False) -> tf.Tensor:
        """Moves the pixels of [b, h, w, c]. With the same draws, an image and its mask move alike."""
        options = self.options
        length = batch_length(images)
        size = images.shape[1:3]
        if options.resized_crop:
            images = crop_and_resize(images, options.resized_crop, draws.of("resized_crop", length), is_mask=is_mask)

        matrices = []
        for key, make_matrices in MATRICES.items():
            strength = getattr(options, key)
            if strength:
                matrices.append(make_matrices(strength, draws.of(key, length), size))
        if matrices:
            images = transform(images, functools.reduce(tf.matmul, matrices), is_mask)

        flips = []
        for key in ("vertical_flip", "flip"):
            flips.append(draws.of(key, length)[0] < 0.5 if getattr(options, key) else None)
        shifts = None
        if options.crop:
            shifts = scale_to_integers(draws.of("crop", length), 2 * options.crop + 1)
        return shift_and_flip(images, options.crop, shifts, flips=flips, fill=fill)


def batch_length(batch: tf.Tensor) -> int:
    return int(batch.shape[0])
