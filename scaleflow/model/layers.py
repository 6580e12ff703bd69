"""What our factories share, and a user's own may use."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from scaleflow.interfaces import Inputs, Outputs


def entry(inputs: Inputs) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """The model's input and the same brought near [0, 1].

    Returns:
        (raw [batch, *shape] of the dataset's dtype, scaled [batch, *shape] of the layers' dtype).
    """
    raw = keras.Input(inputs.shape, dtype=inputs.dtype, name="inputs")
    return raw, raw if inputs.scale is None else keras.layers.Rescaling(inputs.scale)(raw)


def head(x: keras.KerasTensor, outputs: Outputs) -> keras.KerasTensor:
    """A dense layer to [batch, *outputs.shape] logits or values, float32 whatever the precision."""
    size = 1
    for width in outputs.shape:
        size *= width
    x = keras.layers.Dense(size, dtype="float32", name="outputs")(x)
    return x if len(outputs.shape) == 1 else keras.layers.Reshape(outputs.shape, dtype="float32")(x)


def widths(units: int | Sequence[int]) -> list[int]:
    """`units` as a list, whether it was one number or several."""
    return [units] if isinstance(units, int) else list(units)


def hidden(x: keras.KerasTensor, units: int | Sequence[int], dropout: float) -> keras.KerasTensor:
    """Dense layers with ReLU, each followed by dropout where that is above 0."""
    for width in widths(units):
        x = keras.layers.Dense(width, activation="relu")(x)
        if dropout:
            x = keras.layers.Dropout(dropout)(x)
    return x
