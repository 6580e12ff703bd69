"""Linear models: logistic regression for classes and labels, linear regression for values."""

from __future__ import annotations

import keras

from scaleflow.interfaces import Inputs, Outputs
from scaleflow.model.layers import check_numbers, entry, head, not_negative


def build(inputs: Inputs, outputs: Outputs, l2: float = 0.0) -> keras.Model:
    """One dense layer on the flattened input.

    With the loss that follows from the kind of target this is multinomial logistic regression
    (classification), logistic regression (binary, multi_label) or least squares (regression).

    Args:
        inputs: what an example is; any shape.
        outputs: what the model has to return.
        l2: times the sum of the squared weights, without the bias, is added to the loss (ridge; Hoerl and
            Kennard 1970).

    Raises:
        ConfigError: if the inputs are text.
    """
    check_numbers(inputs, "linear")
    penalty = not_negative(l2, "model.l2")
    raw, x = entry(inputs)
    x = keras.layers.Flatten()(x)
    return keras.Model(raw, head(x, outputs, keras.regularizers.L2(penalty) if penalty else None), name="linear")
