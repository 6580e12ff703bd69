"""Loads a scaleflow model for `mlflow.pyfunc`.

A copy of this file travels in each logged model, so it imports nothing of scaleflow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf


class SavedModel:
    """The SavedModel behind `mlflow.pyfunc`'s predict."""

    def __init__(self, folder: str) -> None:
        self._loaded = tf.saved_model.load(folder)
        (spec,) = self._loaded.signatures["serving_default"].structured_input_signature[1].values()
        self._spec = spec

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> np.ndarray[Any, Any]:
        """Logits or values, [batch, ...] float32.

        Args:
            model_input: raw inputs [batch, ...] as an array, (nested) lists, or a DataFrame with a row to an
                example, whose cells are put together in the order of its columns. Where the model takes text,
                numbers are written out, and what is missing is empty.
            params: MLflow passes them; there are none.
        """
        values = model_input.to_numpy() if hasattr(model_input, "to_numpy") else np.asarray(model_input)
        if self._spec.dtype == tf.string:
            values = np.array([to_text(value) for value in values.ravel()], object).reshape(values.shape)
        elif values.dtype == object:
            values = np.asarray(values.tolist())
        shape = [len(values), *self._spec.shape[1:]]
        batch = tf.reshape(tf.cast(tf.constant(values), self._spec.dtype), shape)
        return np.asarray(self._loaded.serve(batch))


def to_text(value: Any) -> str | bytes:
    """A cell as text."""
    if isinstance(value, str | bytes):
        return value
    is_missing = value is None or value != value  # NaN is not itself
    return "" if is_missing else str(value)


def _load_pyfunc(path: str) -> SavedModel:
    return SavedModel(str(Path(path) / "saved_model"))
