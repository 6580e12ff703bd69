"""Residual networks, after He et al. 2015 ("Deep Residual Learning for Image Recognition", arXiv:1512.03385).

The small networks are from section 4.2 (CIFAR-10). Depth 50 is `keras.applications.ResNet50`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
from keras import ops

from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import Inputs, OutputStructure
from scaleflow.model.layers import check_shape, entry, head

#: Depths of section 4.2: 6n + 2, with n blocks of two convolutions in each stage.
SMALL = (20, 32, 44, 56, 110)

#: Filters in each of the three stages.
FILTERS = (16, 32, 64)

#: Momentum of BatchNorm. With Keras's default of 0.99, evaluations would use statistics from hundreds of updates ago.
MOMENTUM = 0.9

#: The smallest image side that Keras builds ResNet50 for, in pixels.
SMALLEST_SIDE = 32

#: ImageNet's mean colour (blue, green, red). Weights of Keras's ResNet50 expect images minus this colour.
MEAN_COLOUR = (103.939, 116.779, 123.68)


def build(inputs: Inputs, outputs: OutputStructure, depth: int = 20, weights: str | None = None) -> keras.Model:
    """Builds a residual network with BatchNorm over all replicas.

    Args:
        inputs: images of shape (height, width, channels).
        outputs: the outputs that the dataset needs.

    conf/model/resnet.yaml describes the other arguments.

    Raises:
        ConfigError: if the inputs are not images or too small, or the depth or the file is invalid.
    """
    check_shape(inputs, "resnet")
    check_resnet(inputs, depth, weights)
    raw, x = entry(inputs)
    x = resnet50(inputs, x, weights) if depth == 50 else build_small(x, (depth - 2) // 6)
    return keras.Model(raw, head(x, outputs), name=f"resnet{depth}")


def check_resnet(inputs: Inputs, depth: Any, weights: Any) -> None:
    if depth not in (*SMALL, 50):
        raise ConfigError(
            f"model.depth={depth}: expected one of {', '.join(map(str, SMALL))} (for small images), or 50 (ResNet50)"
        )
    if depth == 50 and min(inputs.shape[:2]) < SMALLEST_SIDE:
        raise ConfigError(
            f"model.depth=50: needs images of {SMALLEST_SIDE} x {SMALLEST_SIDE} pixels at least, but the dataset's "
            f"are {inputs.shape[0]} x {inputs.shape[1]}; use model.depth=20"
        )
    if weights is None:
        return
    if depth != 50:
        raise ConfigError(f"model.weights={weights}: these weights are for model.depth=50; use it, or model.init_from")
    if inputs.shape[2] != 3:
        raise ConfigError(
            f"model.weights={weights}: these weights are for images with 3 channels, but the dataset's have "
            f"{inputs.shape[2]}; leave it null"
        )
    if not isinstance(weights, str) or not Path(weights).expanduser().is_file():
        raise ConfigError(f"model.weights={weights}: there is no such file; use a local .h5 file of weights, or null")


def build_small(x: Any, blocks: int) -> Any:
    """Adds the CIFAR-10 network without its dense layer: [b, height, width, channels] -> [b, 64]."""
    x = keras.layers.ReLU()(convolve(x, FILTERS[0], 1, name="first"))
    for stage, filters in enumerate(FILTERS, 1):
        for number in range(1, blocks + 1):
            stride = 2 if stage > 1 and number == 1 else 1
            x = build_residual_block(x, filters, stride, name=f"stage{stage}_block{number}")
    return keras.layers.GlobalAveragePooling2D()(x)


def build_residual_block(x: Any, filters: int, stride: int, name: str) -> Any:
    """Adds two convolutions and the shortcut around them."""
    y = keras.layers.ReLU()(convolve(x, filters, stride, name=f"{name}_1"))
    y = convolve(y, filters, 1, name=f"{name}_2")
    return keras.layers.ReLU()(y + make_shortcut(x, filters, stride))


def convolve(x: Any, filters: int, stride: int, name: str) -> Any:
    """Adds a 3 x 3 convolution without bias, and BatchNorm."""
    conv = keras.layers.Conv2D(
        filters, 3, strides=stride, padding="same", use_bias=False, kernel_initializer="he_normal", name=f"{name}_conv"
    )
    return keras.layers.BatchNormalization(momentum=MOMENTUM, synchronized=True, name=f"{name}_norm")(conv(x))


def make_shortcut(x: Any, filters: int, stride: int) -> Any:
    """Adds the shortcut of option A: every `stride`-th pixel, and zeros in the additional channels."""
    if stride > 1:
        x = keras.layers.AveragePooling2D(1, strides=stride)(x)
    extra = filters - x.shape[-1]
    return ops.pad(x, ((0, 0), (0, 0), (0, 0), (extra // 2, extra - extra // 2))) if extra else x


def resnet50(inputs: Inputs, x: Any, weights: str | None) -> Any:
    """Adds Keras's ResNet50 without its top: [b, height, width, channels] near [0, 1] -> [b, 2048]."""
    net = keras.applications.ResNet50(include_top=False, weights=None, input_shape=inputs.shape, pooling="avg")
    for layer in net.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
    if weights is not None:
        load_weights(net, weights)
        x = keras.layers.Rescaling(255.0, [-mean for mean in MEAN_COLOUR])(ops.flip(x, axis=-1))
    return net(x)


def load_weights(net: keras.Model, weights: str) -> None:
    """Loads weights from a file.

    Raises:
        ConfigError: if it is not a file of weights, or is for another network.
    """
    try:
        net.load_weights(Path(weights).expanduser())
    except Exception as error:  # h5py, zipfile and Keras raise many types
        reason = read_reason(error)
        raise ConfigError(
            f"model.weights={weights}: this is not a file with the weights of ResNet50 without its top ({reason}); "
            "use such a file, or null"
        ) from error
