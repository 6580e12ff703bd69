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
        ((self._specs,), _) = self._loaded.serve.concrete_functions[0].structured_input_signature

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Returns logits or values, [batch, ...] float32, or a dict of such arrays by the name of the output.

        Args:
            model_input: raw inputs [batch, ...] as an array, (nested) lists, or a DataFrame with one row per example,
                whose columns are concatenated in order. For a model of several inputs: a dict of arrays or a DataFrame
                with a column for each input, by name; the name of an input in a nested dict is its keys joined with
                `/`. For text, numbers become text and missing values become empty strings.
            params: unused; MLflow passes it.
        """
        outputs = self._loaded.serve(take_inputs(self._specs, model_input, ""))
        return tf.nest.map_structure(np.asarray, outputs)


def take_inputs(specs: Any, model_input: Any, name: str) -> Any:
    """Converts the inputs to tensors, in the structure of `specs`. `name` is that of the part of it."""
    if not isinstance(specs, dict):
        return to_tensor(specs, model_input[name] if name else model_input)
    start = f"{name}/" if name else ""
    return {key: take_inputs(spec, model_input, f"{start}{key}") for key, spec in specs.items()}


def to_tensor(spec: tf.TensorSpec, given: Any) -> tf.Tensor:
    """Converts an array, lists, a column or a table to a tensor [batch, ...]."""
    values = given.to_numpy() if hasattr(given, "to_numpy") else np.asarray(given)
    if spec.dtype == tf.string:
        cells = (cell if isinstance(cell, list | np.ndarray) else [cell] for cell in values.ravel())
        values = np.array([to_text(text) for cell in cells for text in cell], object)
    elif values.dtype == object:
        values = np.asarray(values.tolist())
    return tf.reshape(tf.cast(tf.constant(values), spec.dtype), [len(given), *spec.shape[1:]])


def to_text(value: Any) -> str | bytes:
    """Converts a cell to text; None and NaN become an empty string."""
    if isinstance(value, str | bytes):
        return value
    is_missing = value is None or value != value  # NaN differs from itself
    return "" if is_missing else str(value)


def _load_pyfunc(path: str) -> SavedModel:
    return SavedModel(str(Path(path) / "saved_model"))
