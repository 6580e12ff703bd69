"""A U-Net for segmentation: a class for each pixel, after Ronneberger et al. 2015 (arXiv:1505.04597)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs
from scaleflow.interfaces.options import Widths, check_options, to_list
from scaleflow.model.layers import add_rectified, check_one_output, check_shape, entry


@check_options("model")
def build(inputs: Inputs, outputs: Outputs, filters: Widths = (16, 32, 64), batch_norm: bool = False) -> keras.Model:
    """Builds levels of two 3 x 3 convolutions with ReLU, max-pooling down and transposed convolutions up.

    The features of each level on the way down are concatenated to those on the way up. Borders are padded, so the
    outputs have the size of the images.

    Args:
        inputs: images of shape (height, width, channels). Both sides must be multiples of 2 ** (levels - 1).
        outputs: logits or values for each pixel, of shape (height, width, values).

    conf/model/unet.yaml describes the other arguments.

    Raises:
        ConfigError: if the inputs are not images of such a size, the targets are not per pixel, or an argument is
            invalid.
    """
    check_shape(inputs, "unet")
    check_one_output(outputs, "unet")
    levels = to_list(filters)
    check_pixels(inputs, outputs, levels)
    raw, x = entry(inputs)
    skips = []
    for count in levels[:-1]:
        x = convolve_twice(x, count, batch_norm)
        skips.append(x)
        x = keras.layers.MaxPooling2D()(x)
    x = convolve_twice(x, levels[-1], batch_norm)
    for count, skip in zip(levels[-2::-1], skips[::-1], strict=True):
        x = keras.layers.Conv2DTranspose(count, 2, strides=2)(x)
        x = convolve_twice(keras.layers.Concatenate()([skip, x]), count, batch_norm)
    x = keras.layers.Conv2D(outputs.shape[-1], 1, dtype="float32", name="outputs")(x)
    return keras.Model(raw, x, name="unet")


def check_pixels(inputs: Inputs, outputs: Outputs, levels: Sequence[int]) -> None:
    if outputs.shape[:-1] != inputs.shape[:2]:
        raise ConfigError(
            f"model=unet: returns outputs for each of {inputs.shape[0]} x {inputs.shape[1]} pixels, but the dataset's "
            f"{outputs.kind} targets need outputs of shape {outputs.shape}; use model=cnn or model=resnet"
        )
    step = 2 ** (len(levels) - 1)
    if any(side % step for side in inputs.shape[:2]):
        raise ConfigError(
            f"model.filters={list(levels)}: {len(levels)} levels halve the images {len(levels) - 1} times, and "
            f"{inputs.shape[0]} x {inputs.shape[1]} pixels are not multiples of {step}; use fewer levels or resize "
            "the images"
        )


def convolve_twice(x: Any, count: int, normalizes: bool) -> Any:
    """Adds two 3 x 3 convolutions with ReLU."""
    for _ in range(2):
        x = add_rectified(x, keras.layers.Conv2D, count, batch_norm=normalizes, kernel_size=3, padding="same")
    return x
