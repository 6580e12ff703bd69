"""Loads a Keras model that answers in its own terms: it returns what `model.predict` returns.

Such a model comes from a script. scaleflow does not know what its outputs mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from mlflow.exceptions import MlflowException

from scaleflow.serving.signature_files import PLAIN_SIGNATURE

Array = np.ndarray[Any, Any]


class PlainModel:
    """Implements `predict` for `mlflow.pyfunc` with the endpoint `serve` of a SavedModel.

    Args:
        folder: the folder of the SavedModel.
        signature: the inputs and outputs: their form, names, dtypes and shapes.
    """

    def __init__(self, folder: str, signature: Mapping[str, Any]) -> None:
        self._loaded = tf.saved_model.load(folder)
        self._inputs = signature["inputs"]
        self._outputs = signature["outputs"]

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Predicts.

        Args:
            model_input: a batch [batch, ...]: an array, (nested) lists or a DataFrame with one row per example. For a
                model with several inputs: a dict of arrays by name, or a DataFrame with a column for each input.
            params: must be empty.

        Returns:
            An array [batch, ...], or for several outputs a dict of arrays by name.

        Raises MlflowException if an input is missing or has another type.
        """
        tensors = self._inputs["tensors"]
        if self._inputs["form"] == "one":
            given: Any = convert_input(model_input, tensors[0])
        else:
            named = {each["name"]: find_input(model_input, each) for each in tensors}
            given = named if self._inputs["form"] == "dict" else list(named.values())
        outputs = self._loaded.serve(given)
        if self._outputs["form"] == "one":
            return np.asarray(outputs)
        names = [each["name"] for each in self._outputs["tensors"]]
        if isinstance(outputs, Mapping):
            return {name: np.asarray(outputs[name]) for name in names}
        return {name: np.asarray(each) for name, each in zip(names, outputs, strict=True)}


def find_input(given: Any, tensor: Mapping[str, Any]) -> tf.Tensor:
    """Returns an input of several, by its name."""
    name = tensor["name"]
    try:
        values = given[name]
    except (KeyError, TypeError, IndexError) as error:
        raise MlflowException.invalid_parameter_value(f"the input {name} is missing") from error
    return convert_input(values, tensor)


def convert_input(given: Any, tensor: Mapping[str, Any]) -> tf.Tensor:
    """Converts an input to a tensor of the model's dtype and shape."""
    values = given.to_numpy() if hasattr(given, "to_numpy") else given
    try:
        array = np.asarray(values)
        if array.dtype == object and tensor["dtype"] != "string":
            array = np.asarray([np.asarray(each) for each in values])
        shape = tensor["shape"]
        if array.ndim == len(shape) - 1 and shape[-1] == 1:
            array = array[..., np.newaxis]  # a column of a table
        return tf.cast(tf.constant(array), tf.as_dtype(tensor["dtype"]))
    except (TypeError, ValueError, tf.errors.OpError) as error:
        name = tensor["name"] or "the input"
        raise MlflowException.invalid_parameter_value(
            f"{name}: expected {tensor['dtype']} of shape {tensor['shape']}: {error}"
        ) from error


def _load_pyfunc(path: str) -> PlainModel:
    signature = json.loads(Path(path, PLAIN_SIGNATURE).read_text("utf-8"))
    return PlainModel(str(Path(path, "saved_model")), signature)
