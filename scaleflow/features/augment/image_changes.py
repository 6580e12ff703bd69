"""Functions that change pixels and words. All random numbers are arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

#: Shares of the colours in the brightness of a pixel (ITU-R BT.601).
BRIGHTNESS = (0.299, 0.587, 0.114)

#: Bound of the logarithm of the aspect ratio of a part cut out by `resized_crop`.
CROP_ASPECT = math.log(4 / 3)

#: Bounds of an erased rectangle's area, as shares of the image, and bound of the logarithm of its aspect ratio.
ERASED_AREA = (0.02, 0.33)
ERASED_ASPECT = math.log(10 / 3)


def shift_and_flip(
    images: tf.Tensor, padding: int, shifts: tf.Tensor | None, flips: Sequence[tf.Tensor | None], fill: int = 0
) -> tf.Tensor:
    """Pads images [b, h, w, c] of one size with `fill`, and cuts a window of the original size out of each.

    One gather does both, because mirroring all images and choosing some would cost more than the rest.

    Args:
        padding: number of pixels to add at each side.
        shifts: offset of each window down and across, [2, b] from 0 to 2 * padding.
        flips: images [b] to mirror first, top to bottom and left to right.
    """
    size = images.shape[1:3]
    if padding:
        paddings = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
        images = tf.pad(images, paddings, constant_values=tf.constant(fill, images.dtype))
    for axis, length, flip in zip((1, 2), size, flips, strict=True):
        places = tf.range(length)[None]
        if shifts is not None:
            places += shifts[axis - 1][:, None]
        if flip is not None:
            places = tf.where(flip[:, None], length + 2 * padding - 1 - places, places)
        if shifts is not None or flip is not None:
            images = tf.gather(images, places, axis=axis, batch_dims=1)
    return images


def affine(
    angle: Any = 0.0, scale: Any = 1.0, shears: Sequence[Any] = (0.0, 0.0), moves: Sequence[Any] = (0.0, 0.0)
) -> tf.Tensor:
    """Returns matrices [b, 3, 3] from a place (across, down, 1) in the result to the place that its pixel is read from.

    Places count from the middle of the image. Each argument is a number or [b]: an angle in radians, a factor, and
    shears and moves in pixels, each down and across.
    """
    cos = tf.cos(angle) / scale
    sin = tf.sin(angle) / scale
    down, across = moves
    shear_down, shear_across = shears
    entries = (
        *(cos, shear_across - sin, across),
        *(shear_down + sin, cos, down),
        *(0.0, 0.0, 1.0),
    )
    zeros = sum(tf.zeros_like(values) for values in (cos, *shears, *moves))  # [b] if an argument is
    return tf.reshape(tf.stack([entry + zeros for entry in entries], axis=-1), [-1, 3, 3])


def rotate(max_degrees: float, drawn: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
    """Returns matrices that turn by up to `max_degrees`. `drawn` is [1, b] in [0, 1)."""
    return affine(angle=max_degrees * math.pi / 180 * (2 * drawn[0] - 1))


def zoom(strength: float, drawn: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
    """Returns matrices that enlarge by 1 - strength to 1 + strength. `drawn` is [1, b] in [0, 1)."""
    return affine(scale=1 + strength * (2 * drawn[0] - 1))


def translate(max_share: float, drawn: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
    """Returns matrices that shift by up to this share of the height and width. `drawn` is [2, b] in [0, 1)."""
    height, width = size
    down, across = tf.unstack(drawn)
    return affine(moves=[max_share * height * (2 * down - 1), max_share * width * (2 * across - 1)])


def transform(images: tf.Tensor, matrices: tf.Tensor, is_mask: bool) -> tf.Tensor:
    """Reads the pixels of each image [b, h, w, c] at the places given by its matrix (see `affine`).

    Images are mirrored beyond their borders. Values are interpolated bilinearly. A mask takes the nearest pixel.
    """
    height, width = images.shape[1:3]
    middle = tf.constant([[1.0, 0, (width - 1) / 2], [0, 1, (height - 1) / 2], [0, 0, 1]])
    whole = middle @ matrices @ tf.linalg.inv(middle)
    moved = tf.raw_ops.ImageProjectiveTransformV3(
        images=tf.cast(images, tf.float32),
        transforms=tf.reshape(whole, [-1, 9])[:, :8],
        output_shape=[height, width],
        fill_value=0.0,
        interpolation="NEAREST" if is_mask else "BILINEAR",
        fill_mode="REFLECT",
    )
    return to_dtype(tf.ensure_shape(moved, images.shape), images.dtype)


def crop_and_resize(images: tf.Tensor, least: float, drawn: tf.Tensor, is_mask: bool) -> tf.Tensor:
    """Cuts a part out of each image of [b, h, w, c] and resizes it to [h, w].

    Args:
        images: images of any number dtype.
        least: minimum share of the area.
        drawn: [4, b] float32 in [0, 1): area, aspect ratio, place down and across.
        is_mask: take the nearest pixel instead of bilinear values.
    """
    area = least + (1 - least) * drawn[0]
    height, width = rectangle(area, CROP_ASPECT, drawn[1])
    top = drawn[2] * (1 - height)
    left = drawn[3] * (1 - width)
    # A little smaller: a pixel that rounding places beyond the last one would be black.
    boxes = tf.stack([top, left, top + height * (1 - 1e-5), left + width * (1 - 1e-5)], axis=1)
    method = "nearest" if is_mask else "bilinear"
    parts = tf.image.crop_and_resize(images, boxes, tf.range(images.shape[0]), images.shape[1:3], method)
    return to_dtype(parts, images.dtype)


def rectangle(area: tf.Tensor, log_aspect: float, drawn: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns [b] heights and widths, as shares of the image, at most 1. `drawn` [b] chooses the aspect ratios."""
    aspect = tf.exp(log_aspect * (2 * drawn - 1))
    height = tf.minimum(tf.sqrt(area / aspect), 1.0)
    width = tf.minimum(tf.sqrt(area * aspect), 1.0)
    return height, width


def jitter(images: tf.Tensor, strength: float, drawn: tf.Tensor) -> tf.Tensor:
    """Changes brightness, contrast and saturation of [b, h, w, c] images, in this order; integers stay in their range.

    `drawn` is [3, b] float32 in [0, 1). Saturation changes only if an image has three channels.
    """
    factors = 1 + strength * (2 * drawn - 1)
    b, c, s = (factor[:, None, None, None] for factor in tf.unstack(factors))  # brightness, contrast, saturation
    values = tf.cast(images, tf.float32)
    grey, mean = find_brightness(values)
    if images.shape[-1] != 3:
        s = tf.ones_like(s)
    # All three are linear: v = b x; v = mean(v) + c (v - mean(v)); v = grey(v) + s (v - grey(v)).
    return to_dtype(values * (b * c * s) + grey * (b * c * (1 - s)) + mean * (b * (1 - c)), images.dtype)


def change_contrast(images: tf.Tensor, strength: float, drawn: tf.Tensor) -> tf.Tensor:
    """Changes only the contrast of [b, h, w, c] images, as `jitter` does. `drawn` is [1, b] in [0, 1)."""
    unchanged = 0.5
    return jitter(images, strength, tf.pad(drawn, [[1, 1], [0, 0]], constant_values=unchanged))


def find_brightness(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the brightness of each pixel of [b, h, w, c] images, [b, h, w, 1], and its mean, [b, 1, 1, 1]."""
    channels = values.shape[-1]
    shares = BRIGHTNESS if channels == 3 else [1 / channels] * channels
    grey = tf.tensordot(values, tf.constant(shares), 1)[..., None]
    return grey, tf.reduce_mean(grey, axis=[1, 2, 3], keepdims=True)


#: Operations of `randaugment` (Cubuk et al. 2019, arXiv:1909.13719, without equalize): moves, then changes.
OPERATIONS = (
    *("identity", "rotate", "shear_x", "shear_y", "translate_x", "translate_y"),
    *("brightness", "color", "contrast", "sharpness", "posterize", "solarize", "autocontrast"),
)

#: Number of operations that `randaugment` applies to an image, and the strength for their full effect.
CHOSEN = 2
STRONGEST = 30


#: Maximum shear and shift of `randaugment`: a tangent, and a share of the height and width.
MAX_SHEAR = 0.3
MAX_SHIFT = 0.45


class Chosen(NamedTuple):
    """The operation that `randaugment` chose for each image of a batch."""

    index: tf.Tensor  # index in `OPERATIONS`, [b]
    sign: tf.Tensor  # sign of its strength, [b], 1 or -1

    def is_operation(self, name: str) -> tf.Tensor:
        """Returns which images have this operation, [b] bool."""
        return tf.equal(self.index, OPERATIONS.index(name))


def choose_operations(drawn: tf.Tensor) -> Sequence[Chosen]:
    """Returns the operations of `randaugment` in order. `drawn` is [2 * CHOSEN, b] in [0, 1)."""
    indices = scale_to_integers(drawn[:CHOSEN], len(OPERATIONS))
    signs = tf.where(drawn[CHOSEN:] < 0.5, 1.0, -1.0)
    return [Chosen(index, sign) for index, sign in zip(tf.unstack(indices), tf.unstack(signs), strict=True)]


def move_at_random(strength: float, drawn: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
    """Returns the matrices of the moves that `randaugment` chooses (see `affine`)."""
    height, width = size
    matrices = []
    for chosen in choose_operations(drawn):
        amount = chosen.sign * strength / STRONGEST
        angle = choose_amount(chosen, "rotate", amount * math.pi / 6)
        shears = [
            choose_amount(chosen, "shear_y", amount * MAX_SHEAR),
            choose_amount(chosen, "shear_x", amount * MAX_SHEAR),
        ]
        moves = [
            choose_amount(chosen, "translate_y", amount * (MAX_SHIFT * height)),
            choose_amount(chosen, "translate_x", amount * (MAX_SHIFT * width)),
        ]
        matrices.append(affine(angle, 1.0, shears, moves=moves))
    return functools.reduce(tf.matmul, matrices)


def choose_amount(chosen: Chosen, name: str, amount: tf.Tensor) -> tf.Tensor:
    """Returns the amount for images with this operation and 0 for others, [b]."""
    return tf.where(chosen.is_operation(name), amount, 0.0)


def change_at_random(images: tf.Tensor, strength: float, drawn: tf.Tensor, white: float) -> tf.Tensor:
    """Applies the changes that `randaugment` chooses to [b, h, w, c] images with values from 0 to `white`."""
    values = tf.cast(images, tf.float32) * (255 / white)
    share = strength / STRONGEST
    for chosen in choose_operations(drawn):
        for name, changed in make_changes(values, share, chosen.sign).items():
            values = tf.where(chosen.is_operation(name)[:, None, None, None], changed, values)
        values = tf.clip_by_value(values, 0, 255)
    return to_dtype(values * (white / 255), images.dtype)


def make_changes(values: tf.Tensor, share: float, sign: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the images [b, h, w, c] after each change of `randaugment`, by the change's name.

    Args:
        values: the images, from 0 to 255.
        share: share of the greatest strength.
        sign: whether to increase or decrease, [b], 1 or -1. Some changes ignore it.
    """
    grey, mean = find_brightness(values)
    black = tf.zeros_like(mean)
    blurred = blur(values)
    low = tf.reduce_min(values, [1, 2], keepdims=True)
    high = tf.reduce_max(values, [1, 2], keepdims=True)
    factor = (1 + 0.9 * share * sign)[:, None, None, None]
    step = 2.0 ** round(4 * share)
    return {
        "brightness": black + factor * (values - black),
        "color": grey + factor * (values - grey),
        "contrast": mean + factor * (values - mean),
        "sharpness": blurred + factor * (values - blurred),
        "posterize": values - tf.math.floormod(values, step),
        "solarize": tf.where(values >= 255 * (1 - share), 255 - values, values),
        "autocontrast": tf.where(high > low, (values - low) * 255 / tf.maximum(high - low, 1), values),
    }


def blur(values: tf.Tensor) -> tf.Tensor:
    """Returns images [b, h, w, c] with each pixel averaged with its neighbours."""
    weights = tf.constant([[1.0, 1, 1], [1, 5, 1], [1, 1, 1]])[:, :, None, None] / 13
    padded = tf.pad(values, [[0, 0], [1, 1], [1, 1], [0, 0]], "SYMMETRIC")
    return tf.nn.depthwise_conv2d(padded, tf.tile(weights, [1, 1, values.shape[-1], 1]), [1, 1, 1, 1], "VALID")


def drop_words(words: tf.Tensor, probability: float, drawn: tf.Tensor) -> tf.Tensor:
    """Replaces some of the words [b, n] by padding, but never all words of a text. `drawn` is [b, n] in [0, 1)."""
    drawn = tf.where(words == 0, -1.0, drawn)
    is_kept = (drawn >= probability) | (drawn == tf.reduce_max(drawn, axis=1, keepdims=True))
    return tf.where(is_kept, words, tf.zeros_like(words))


def erase(images: tf.Tensor, probability: float, drawn: tf.Tensor, fill: int = 0) -> tf.Tensor:
    """Fills a rectangle in some of the images [b, h, w, c].

    `drawn` is [5, b] float32 in [0, 1): whether, area, aspect ratio, place down and across.
    """
    least, most = ERASED_AREA
    height, width = rectangle(least + (most - least) * drawn[1], ERASED_ASPECT, drawn[2])
    inside = []
    for size, start, extent in zip(images.shape[1:3], tf.unstack(drawn[3:]), (height, width), strict=True):
        first = start * (1 - extent)
        places = (tf.range(size, dtype=tf.float32) + 0.5) / size
        inside.append((places >= first[:, None]) & (places < (first + extent)[:, None]))
    rows, columns = inside
    is_chosen = (drawn[0] < probability)[:, None, None, None]
    is_erased = rows[:, :, None, None] & columns[:, None, :, None] & is_chosen
    return tf.where(is_erased, tf.constant(fill, images.dtype), images)


def to_dtype(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Converts float32 to the dtype. For an integer dtype, rounds and keeps the range."""
    return tf.saturate_cast(tf.round(values), dtype) if dtype.is_integer else tf.cast(values, dtype)


def scale_to_integers(drawn: tf.Tensor, most: int) -> tf.Tensor:
    """Returns integers from 0 to `most` - 1, from numbers in [0, 1)."""
    return tf.minimum(tf.cast(drawn * most, tf.int32), most - 1)
