"""Loads a scaleflow model for `mlflow.pyfunc`."""

from __future__ import annotations

import base64
import functools
import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import tensorflow as tf
from mlflow.exceptions import MlflowException

from scaleflow.serving.cells import ColumnReader, describe_units, fit_numbers, gather_cells, make_readers, write_cell
from scaleflow.serving.layers import choose_layer, compute_layer, read_specs
from scaleflow.serving.prediction_columns import make_prediction_columns, make_probability_columns
from scaleflow.serving.reasons import LAYER, Explainer

logger = logging.getLogger(__name__)

#: Values of the inference parameter `output`. It can also be `LAYER` with the name of a layer.
PREDICTION = "prediction"
PROBABILITIES = "probabilities"
LOGITS = "logits"
EXPLAIN = "explain"
OUTPUTS = (PREDICTION, PROBABILITIES, LOGITS, EXPLAIN)

#: The reader for a model that was not trained on a table.
PLAIN = ColumnReader()

#: First bytes of JPEG, PNG, BMP and GIF files.
MAGIC = (b"\xff\xd8", b"\x89PNG", b"BM", b"GIF8")

Array = np.ndarray[Any, Any]


class SavedModel:
    """Implements `predict` for `mlflow.pyfunc` with a SavedModel.

    Args:
        folder: the folder of the SavedModel.
        learned: the learned state of the run: the meaning of the outputs, the kinds of a table's columns, the words for
            missing values.
    """

    def __init__(self, folder: str, learned: Mapping[str, Any]) -> None:
        self._loaded = tf.saved_model.load(folder)
        self._keras_file = Path(folder).with_name("model.keras")
        words = {name: preprocessing["learned"] for name, preprocessing in learned["preprocessing"].items()}
        self._readers = make_readers(learned["reading"], words)
        self._outputs: dict[str, Any] = {}
        for output in learned["outputs"]:
            self._outputs[output["name"]] = SimpleNamespace(**{**output, "shape": tuple(output["shape"])})
        self._schema = learned["schema"]
        self._nested = read_specs(self._loaded.serve)
        self._decode: Callable[[Any], Any] | None = getattr(self._loaded, "decode", None)
        self._pictures = {} if self._decode is None else name_specs(read_specs(self._decode))
        self._specs = name_specs(self._nested) | self._pictures

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Predicts. Returns a DataFrame with a row for each example, or arrays for some values of `output`.

        Args:
            model_input: raw inputs [batch, ...] as an array, (nested) lists, or a DataFrame with one row per example,
                whose columns are concatenated in order. For a model with several inputs: a dict of arrays, or a
                DataFrame with a column for each input. The name of an input in a nested dict joins its keys with `/`.
                Numbers may be text, and a missing number is NaN. In a text input, numbers become text, dates become
                2024-01-31T23:59:59, and missing values become "". A picture is the bytes of its file.
            params: `output` selects the result:
                `prediction` (default): the columns that `scaleflow predict` writes;
                `probabilities`: the probability of every class;
                `logits`: the model's outputs (logits or values) as an array [batch, ...] float32, or a dict of arrays
                by output name;
                `explain`: the columns of `scaleflow predict --explain`, such as the contribution of each table column;
                `layer:NAME`: the result of a layer of the Keras model, an array [batch, ...] float32.

        Raises MlflowException if a value cannot be converted (the message has its column, and its row counted from 0),
        or if the model has no outputs of this kind.
        """
        output = (params or {}).get("output", PREDICTION)
        if output not in OUTPUTS and not output.startswith(LAYER):
            expected = ", ".join([*OUTPUTS, f"{LAYER}NAME"])
            raise MlflowException.invalid_parameter_value(f"output={output}: expected {expected}")
        inputs = {}
        for name, spec in self._specs.items():
            inputs[name] = self._to_tensor(name, spec, model_input[name] if name else model_input)
        if output.startswith(LAYER):
            return self._read_layer(output, nest(self._nested, self._read_pictures(inputs)))
        try:
            if output == EXPLAIN:
                decoded = self._read_pictures(inputs)
                return self._explain_rows({name: np.asarray(tensor) for name, tensor in decoded.items()})
            values = tf.nest.map_structure(np.asarray, self._serve(inputs))
        except tf.errors.InvalidArgumentError as error:
            raise MlflowException.invalid_parameter_value(self._explain(inputs, str(error.message))) from error
        return values if output == LOGITS else self._answer(values, output)

    def _to_tensor(self, name: str, spec: tf.TensorSpec, cells: Any) -> tf.Tensor:
        """Converts an input to a tensor as in training. A picture stays the bytes of its file."""
        if name in self._pictures:
            pictures = list(map(to_picture, read_values(cells).ravel()))
            return tf.constant(pictures, tf.string)
        return to_tensor(spec, cells, name, reader=self._readers.get(name, PLAIN))

    def _answer(self, values: Any, output: str) -> pd.DataFrame:
        """Returns predictions or probabilities. If a column has a value for each position, its cells are arrays."""
        named = values if isinstance(values, dict) else {"": values}
        make = make_prediction_columns if output == PREDICTION else make_probability_columns
        columns = make(self._outputs, named)
        if not columns:
            raise MlflowException.invalid_parameter_value(
                f"output={output}: this model predicts values, which have no probabilities; use output={PREDICTION}"
            )
        cells = {name: values if values.ndim == 1 else list(values) for name, values in columns.items()}
        return pd.DataFrame(cells)

    def _explain_rows(self, rows: dict[str, Array]) -> pd.DataFrame:
        """Explains the predictions of rows (see `Explainer`). Pictures in the rows are decoded arrays."""
        specs = name_specs(self._nested)
        inputs = {}
        for name, spec in specs.items():
            inputs[name] = (spec.shape[1:].as_list(), spec.dtype.as_numpy_dtype)
        try:
            explainer = Explainer(inputs, self._outputs, self._schema)
        except ValueError as error:
            raise MlflowException.invalid_parameter_value(f"output={EXPLAIN}: needs {error}") from error

        def compute(columns: Mapping[str, Array]) -> Mapping[str, Array]:
            tensors = {name: tf.constant(values, specs[name].dtype) for name, values in columns.items()}
            values = self._loaded.serve(nest(self._nested, tensors))
            return values if isinstance(values, dict) else {"": np.asarray(values)}

        return pd.DataFrame(explainer.explain(compute, rows, compute(rows)))

    @functools.cached_property
    def _keras_model(self) -> Any:
        if not self._keras_file.is_file():
            raise ValueError("Keras could not write this model as a .keras file, which has its layers")
        return tf.keras.models.load_model(self._keras_file, compile=False, safe_mode=True)

    def _read_layer(self, output: str, inputs: Any) -> Array:
        """Computes the result of a layer. Loads the Keras model for this, since a SavedModel has no layers."""
        try:
            layer = choose_layer(self._keras_model, output.removeprefix(LAYER))
            return np.asarray(compute_layer(self._keras_model, layer, inputs)[1])
        except Exception as error:  # zipfile, h5py and Keras raise many types
            reason = str(error).partition("\n")[0]
            raise MlflowException.invalid_parameter_value(f"output={output}: {reason}") from error

    def _serve(self, inputs: dict[str, tf.Tensor]) -> Any:
        return self._loaded.serve(nest(self._nested, self._read_pictures(inputs)))

    def _read_pictures(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Decodes the pictures among the inputs to arrays."""
        if self._decode is None:
            return inputs
        if "" in self._pictures:
            decoded = self._decode(inputs[""])
        else:
            decoded = self._decode({name: inputs[name] for name in self._pictures})
        if not isinstance(decoded, dict):
            decoded = {"": decoded}
        return inputs | decoded

    def _fails(self, inputs: dict[str, tf.Tensor]) -> bool:
        try:
            self._serve(inputs)
        except tf.errors.InvalidArgumentError:
            return True
        return False

    def _explain(self, inputs: dict[str, tf.Tensor], reason: str) -> str:
        """Finds the first row that makes the model fail, by bisection. Returns a message with its text inputs."""
        first = 0
        end = len(next(iter(inputs.values())))
        while end - first > 1:
            middle = (first + end) // 2
            if self._fails({name: tensor[first:middle] for name, tensor in inputs.items()}):
                end = middle
            else:
                first = middle
        row = {name: tensor[first:end] for name, tensor in inputs.items()}
        try:
            self._read_pictures(row)
        except tf.errors.InvalidArgumentError:
            return f"row {first}: the picture cannot be read; expected a whole JPEG, PNG, GIF or BMP file"
        texts = []
        for name, tensor in row.items():
            if tensor.dtype == tf.string:
                texts.append(f"{name or 'the input'} is {join_text(tensor)!r}"[:200])
        return f"row {first}: the model fails with {', '.join(texts) or 'it'}: {reason.strip().partition(chr(10))[0]}"


def to_picture(value: Any) -> bytes:
    """Returns the bytes of a picture's file. Decodes base64, which MLflow does only for some forms of JSON."""
    content = b""
    if isinstance(value, str):
        content = value.encode()
    elif isinstance(value, bytes):
        content = value
    if content.startswith(MAGIC):
        return content
    try:
        return base64.b64decode(content, validate=True)
    except ValueError:
        return content


def join_text(texts: tf.Tensor) -> str:
    return ", ".join(text.decode(errors="replace") for text in np.ravel(texts.numpy()))


def name_specs(specs: Any, name: str = "") -> dict[str, tf.TensorSpec]:
    """Flattens nested specs to a dict by name. A single spec without a name has the name ""."""
    if not isinstance(specs, dict):
        return {name: specs}
    start = f"{name}/" if name else ""
    named: dict[str, tf.TensorSpec] = {}
    for key, part in specs.items():
        named |= name_specs(part, start + key)
    return named


def nest(specs: Any, tensors: dict[str, tf.Tensor], name: str = "") -> Any:
    """Returns the tensors in the structure of `specs`."""
    if not isinstance(specs, dict):
        return tensors[name]
    start = f"{name}/" if name else ""
    return {key: nest(part, tensors, start + key) for key, part in specs.items()}


def to_tensor(spec: tf.TensorSpec, data: Any, name: str, reader: ColumnReader = PLAIN) -> tf.Tensor:
    """Converts an array, lists, a column or a table to a tensor [batch, ...].

    Raises MlflowException with the row and column of a value that cannot be converted. `name` is the input's name.
    """
    size = math.prod(spec.shape[1:])
    rows = len(data)
    dtype = np.dtype(spec.dtype.as_numpy_dtype)
    values = flatten_cells(read_values(data), rows, size, name=name)
    if values.dtype.kind in "biuf" and dtype.kind != "O":
        converted, is_bad, expected = fit_numbers(values, np.zeros(len(values), bool), dtype)
    else:
        cells = gather_cells(values)
        converted, is_bad, expected = reader.convert(cells, dtype)
        units = reader.count_other_units(reader.clean(cells)) if reader.has_unit else None
        if units:
            logger.warning(
                "%s: %d numbers have units that training did not have: %s; they count as missing",
                name,
                units.total(),
                describe_units(units),
            )
    if is_bad.any():
        at = int(is_bad.argmax())
        column = name or name_value(data, at % size)
        text = write_cell(values[at])
        value = repr(text[:80]) if text else "missing"
        raise MlflowException.invalid_parameter_value(f"row {at // size}: {column} is {value}, expected {expected}")
    return tf.reshape(tf.constant(converted, spec.dtype), [rows, *spec.shape[1:]])


def name_value(data: Any, index: int) -> str:
    """Returns a name for a value of a row: its column in a table, or else its index."""
    columns = getattr(data, "columns", ())
    return str(columns[index]) if index < len(columns) else f"value {index}"


def read_values(data: Any) -> Array:
    """Converts a column, table or lists to an array. pandas or pyarrow types with missing values become objects."""
    plain = getattr(getattr(data, "dtype", None), "numpy_dtype", None)
    if plain is not None and np.dtype(plain).kind in "biuf" and not data.isna().any():
        return np.asarray(data.to_numpy(plain))
    if hasattr(data, "to_numpy"):
        return np.asarray(data.to_numpy())
    try:
        return np.asarray(data)
    except ValueError:  # lists of different lengths
        return np.array([np.array(row, object) for row in data], object)


def flatten_cells(values: Array, rows: int, size: int, name: str) -> Array:
    """Flattens the values of all rows to [rows * size]. Cells may be (nested) lists.

    Raises MlflowException if a row has another size.
    """
    if values.dtype == object and any(isinstance(cell, list | tuple | np.ndarray) for cell in values.flat):
        flat_rows = []
        for row in values:
            lists = row.tolist() if isinstance(row, np.ndarray) else row
            flat_rows.append(np.ravel(np.array(lists, object)))
        lengths = list(map(len, flat_rows))
        values = np.concatenate(flat_rows)
    else:
        lengths = [values.size // max(1, rows)] * rows
    wrong = [row for row, length in enumerate(lengths) if length != size]
    if wrong:
        raise MlflowException.invalid_parameter_value(
            f"row {wrong[0]}: {name or 'the input'} has {lengths[wrong[0]]} values, expected {size}"
        )
    return values.ravel()


def _load_pyfunc(path: str) -> SavedModel:
    learned = json.loads(Path(path, "learned_state.json").read_text("utf-8"))
    return SavedModel(str(Path(path, "saved_model")), learned)
