"""A small convolutional network, after TensorFlow's CIFAR tutorial.

https://www.tensorflow.org/tutorials/images/cnn
"""

from __future__ import annotations

from typing import Literal

import keras

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, OutputStructure
from scaleflow.interfaces.options import Fraction, Widths, check_options, to_list
from scaleflow.model.layers import add_rectified, check_shape, entry, head, hidden


@check_options("model")
def build(
    inputs: Inputs,
    outputs: OutputStructure,
    filters: Widths = (32, 64),
    units: Widths = 64,
    padding: Literal["same", "valid"] = "same",
    dropout: Fraction = 0.0,
    batch_norm: bool = False,
) -> keras.Model:
    """Builds 3 x 3 convolutions with ReLU, each followed by 2 x 2 max-pooling, then dense layers.

    Args:
        inputs: images of shape (height, width, channels).
        outputs: the outputs that the dataset needs.

    conf/model/cnn.yaml describes the other arguments.

    Raises:
        ConfigError: if the inputs are not images or too small for the convolutions, or an argument is invalid.
    """
    check_images(inputs, filters, padding)
    raw, x = entry(inputs)
    for count in to_list(filters):
        x = add_rectified(x, keras.layers.Conv2D, count, batch_norm=batch_norm, kernel_size=3, padding=padding)
        x = keras.layers.MaxPooling2D()(x)
    x = hidden(keras.layers.Flatten()(x), units, dropout, batch_norm=batch_norm)
    return keras.Model(raw, head(x, outputs), name="cnn")


def check_images(inputs: Inputs, filters: Widths, padding: str) -> None:
    check_shape(inputs, "cnn")
    size = min(inputs.shape[:2])
    for _ in to_list(filters):
        size = (size if padding == "same" else size - 2) // 2
    if size < 1:
        raise ConfigError(
            f"model.filters={filters}: images of shape {inputs.shape} are too small for so many convolutions; use "
            "fewer" + (", or model.padding=same" if padding == "valid" else "")
        )
