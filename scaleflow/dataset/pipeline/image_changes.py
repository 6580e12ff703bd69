"""Random changes of images and of the masks that belong to them, given what was drawn. Traced."""

from __future__ import annotations

import math

import tensorflow as tf

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
