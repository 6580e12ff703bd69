"""Decodes images to arrays of one size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from scaleflow.dataset.files import is_shape, parse_choice
from scaleflow.errors import ConfigError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
RESIZE = ("stretch", "pad", "crop")


def make_image_decoder(
    size: Any, resize: Any = "stretch", channels: Any = 3, key: str = "dataset"
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function: encoded image (JPEG, PNG, BMP, GIF) -> [height, width, channels] uint8. Traced.

    It takes the first frame of an animation, drops an alpha channel, and ignores the orientation in EXIF data.

    Args:
        size: [height, width].
        resize: `stretch` to the size; `pad` with black, keeps the aspect ratio; `crop` the middle to fill the size.
        channels: 3, or 1 for grey.
        key: prefix of the options in messages.
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
        has_size = tf.reduce_all(tf.equal(tf.shape(image)[:2], [height, width]))
        image = tf.cond(has_size, lambda: image, lambda: resize_image(image, height, width, resize))
        return tf.ensure_shape(image, [height, width, channels])

    return decode


def resize_image(image: tf.Tensor, height: int, width: int, resize: str) -> tf.Tensor:
    """Resizes [h, w, c] uint8 to [height, width, c] uint8, bilinear and antialiased."""
    if resize == "pad":
        resized = tf.image.resize_with_pad(image, height, width, antialias=True)
    else:
        part = crop_middle(image, height, width) if resize == "crop" else image
        resized = tf.image.resize(part, [height, width], antialias=True)
    return tf.saturate_cast(tf.round(resized), tf.uint8)


def crop_middle(image: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Crops the largest centred part with the aspect ratio of height and width."""
    h, w = tf.shape(image)[0], tf.shape(image)[1]
    is_wide = w * height > h * width
    part_h = tf.where(is_wide, h, tf.maximum(1, w * height // width))
    part_w = tf.where(is_wide, tf.maximum(1, h * width // height), w)
    return tf.image.crop_to_bounding_box(image, (h - part_h) // 2, (w - part_w) // 2, part_h, part_w)


def parse_image_size(size: Any, key: str) -> tuple[int, int]:
    if not is_shape(size) or len(size) != 2:
        raise ConfigError(f"{key}.size={size}: expected [height, width], such as [224, 224]")
    return size[0], size[1]
