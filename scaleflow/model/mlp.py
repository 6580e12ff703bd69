"""A multi-layer perceptron."""

from __future__ import annotations

import keras

from scaleflow.interfaces import InputStructure, OutputStructure
from scaleflow.interfaces.options import Fraction, Widths, check_options
from scaleflow.model.layers import check_numbers, entry, flatten, head, hidden


@check_options("model")
def build(
    inputs: InputStructure,
    outputs: OutputStructure,
    units: Widths = (128, 128),
    dropout: Fraction = 0.0,
    batch_norm: bool = False,
) -> keras.Model:
    """Builds dense layers with ReLU on the flattened input.

    Args:
        inputs: numbers of any shape. A dict of inputs is concatenated.
        outputs: the outputs that the dataset needs.

    conf/model/mlp.yaml describes the other arguments.

    Raises:
        ConfigError: if the inputs are text, or an argument is invalid.
    """
    check_numbers(inputs, "mlp")
    raw, x = entry(inputs)
    x = hidden(flatten(x), units, dropout, batch_norm=batch_norm)
    return keras.Model(raw, head(x, outputs), name="mlp")
