"""TensorFlow's variables behind Keras's."""

from __future__ import annotations

from typing import Any

import keras


def to_tf_variable(variable: Any) -> Any:
    """Returns the TensorFlow variable of a Keras variable; anything else unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable
