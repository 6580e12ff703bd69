"""Encoded images as arrays of one size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from scaleflow.dataset.files import parse_choice
from scaleflow.errors import ConfigError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
RESIZE = ("stretch", "pad", "crop")


def make_image_decoder(
    size: Any, resize: Any = "stretch", channels: Any = 3, key: str = "dataset"
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Traced: an encoded image (JPEG, PNG, BMP, GIF) -> [height, width, channels] uint8.

    Of an animation it takes the first frame; an alpha channel is dropped; the orientation that a camera noted
    beside the picture is not looked at.

    Args:
        size: [height, width].
        resize: `stretch` to the size; `pad_batch` with black to keep the proportions; `crop` the middle, which fills
        it.
        channels: 3, or 1 for grey.
        key: whose options these are, for messages.

    Raises:
        ConfigError: for options that make no sense.
    """
    height, width = parse_image_size(size, key)
    parse_choice(resize, f"{key}.resize", RESIZE)
    if channels not in (1, 3):
        raise ConfigError(f"{key}.channels={channels}: expected 3, or 1 for grey")

    def decode(encoded: tf.Tensor) -> tf.Tensor:
        image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        image = tf.ensure_shape(image, [None, None, 3])
        if channels == 1:
            image = tf.image.rgb_to_grayscale(image)
        there = tf.reduce_all(tf.equal(tf.shape(image)[:2], [height, width]))
        image = tf.cond(there, lambda: image, lambda: resize_image(image, height, width, resize))
        return tf.ensure_shape(image, [height, width, channels])

    return decode


def resize_image(image: tf.Tensor, height: int, width: int, resize: str) -> tf.Tensor:
    """[h, w, c] uint8 -> [height, width, c] uint8, bilinear and antialiased."""
    if resize == "pad":
        found = tf.image.resize_with_pad(image, height, width, antialias=True)
    else:
        part = crop_middle(image, height, width) if resize == "crop" else image
        found = tf.image.resize(part, [height, width], antialias=True)
    return tf.saturate_cast(tf.round(found), tf.uint8)


def crop_middle(image: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """The largest part around the middle that has the proportions of height to width."""
    h, w = tf.shape(image)[0], tf.shape(image)[1]
    is_wide = w * height > h * width
    part_h = tf.where(is_wide, h, tf.maximum(1, w * height // width))
    part_w = tf.where(is_wide, tf.maximum(1, h * width // height), w)
    return tf.image.crop_to_bounding_box(image, (h - part_h) // 2, (w - part_w) // 2, part_h, part_w)


def parse_image_size(size: Any, key: str) -> tuple[int, int]:
    good = isinstance(size, Sequence) and not isinstance(size, str) and len(size) == 2
    if not good or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in size):
        raise ConfigError(f"{key}.size={size}: expected [height, width], such as [224, 224]")
    return size[0], size[1]
