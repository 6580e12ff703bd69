"""Linear models: logistic regression for classes and labels, linear regression for values."""

from __future__ import annotations

import keras

from scaleflow.interfaces import InputStructure, OutputStructure
from scaleflow.interfaces.options import NotNegative, check_options
from scaleflow.model.layers import check_numbers, entry, flatten, head


@check_options("model")
def build(inputs: InputStructure, outputs: OutputStructure, l2: NotNegative = 0.0) -> keras.Model:
    """Builds one dense layer on the flattened input.

    The kind of target sets the loss. So this is multinomial logistic regression (classification), logistic regression
    (binary, multi_label) or least squares (regression).

    Args:
        inputs: numbers of any shape. A dict of inputs is concatenated.
        outputs: the outputs that the dataset needs.

    conf/model/linear.yaml describes the other arguments.

    Raises:
        ConfigError: if the inputs are text or `l2` is negative.
    """
    check_numbers(inputs, "linear")
    raw, x = entry(inputs)
    x = flatten(x)
    return keras.Model(raw, head(x, outputs, keras.regularizers.L2(l2) if l2 else None), name="linear")
