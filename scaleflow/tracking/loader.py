"""Loads a scaleflow model for `mlflow.pyfunc`.

Each logged model contains a copy of this file, so it must not import scaleflow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf


class SavedModel:
    """Implements `mlflow.pyfunc`'s predict with a SavedModel."""

    def __init__(self, folder: str) -> None:
        self._loaded = tf.saved_model.load(folder)
        (spec,) = self._loaded.signatures["serving_default"].structured_input_signature[1].values()
        self._spec = spec

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> np.ndarray[Any, Any]:
        """Returns logits or values, [batch, ...] float32.

        Args:
            model_input: raw inputs [batch, ...] as an array, (nested) lists, or a DataFrame with one row per example,
                whose columns are concatenated in order. For a text model, numbers become text and missing values
                become empty strings.
            params: unused; MLflow passes it.
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
    """Converts a cell to text; None and NaN become an empty string."""
    if isinstance(value, str | bytes):
        return value
    is_missing = value is None or value != value  # NaN differs from itself
    return "" if is_missing else str(value)


def _load_pyfunc(path: str) -> SavedModel:
    return SavedModel(str(Path(path) / "saved_model"))
