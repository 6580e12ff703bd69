"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from scaleflow.interfaces import Inputs, Outputs
from scaleflow.model.layers import check_numbers, entry, head, hidden


def build(
    inputs: Inputs,
    outputs: Outputs,
    units: int | Sequence[int] = (128, 128),
    dropout: float = 0.0,
    batch_norm: bool = False,
) -> keras.Model:
    """Flattens the input and passes it through dense layers.

    Args:
        inputs: what an example is; any shape.
        outputs: what the model has to return.
        units: the width of the hidden layer, or of each of several.
        dropout: the fraction dropped behind each hidden layer.
        batch_norm: normalize behind each hidden layer, over all replicas.

    Raises:
        ConfigError: if the inputs are text.
    """
    check_numbers(inputs, "mlp")
    raw, x = entry(inputs)
    x = hidden(keras.layers.Flatten()(x), units, dropout, batch_norm)
    return keras.Model(raw, head(x, outputs), name="mlp")
