"""Loads a scaleflow model for `mlflow.pyfunc`."""

from __future__ import annotations

import base64
import datetime
import json
import math
import numbers
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import tensorflow as tf
from mlflow.exceptions import MlflowException

from scaleflow.serving.answers import make_prediction_columns, make_probability_columns
from scaleflow.serving.cells import rewrite_cells

#: Words in the place of a number that mean a missing one.
MISSING_WORDS = ("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?", ".")

#: What the inference parameter `output` may be.
PREDICTION, PROBABILITIES, LOGITS = OUTPUTS = ("prediction", "probabilities", "logits")

#: How files of JPEG, PNG, BMP and GIF begin.
MAGIC = (b"\xff\xd8", b"\x89PNG", b"BM", b"GIF8")

Array = np.ndarray[Any, Any]


class SavedModel:
    """Implements `mlflow.pyfunc`'s predict with a SavedModel.

    Args:
        folder: of the SavedModel.
        learned: what the run learned from its data, as its record says: what the outputs mean, which columns of a table
            are what, the words for a missing value.
    """

    def __init__(self, folder: str, learned: Mapping[str, Any]) -> None:
        self._loaded = tf.saved_model.load(folder)
        reading = learned.get("reading", {})
        self._kinds = reading.get("columns", {})
        self._missing = reading.get("missing", ())
        self._forms = reading.get("forms", {})
        self._outputs = {
            each["name"]: SimpleNamespace(kind=each["kind"], shape=tuple(each["shape"]), names=each["names"])
            for each in learned.get("outputs", ())
        }
        self._nested = read_specs(self._loaded.serve)
        self._decode: Callable[[Any], Any] | None = getattr(self._loaded, "decode", None)
        self._pictures = {} if self._decode is None else name_specs(read_specs(self._decode))
        self._specs = name_specs(self._nested) | self._pictures

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Returns a DataFrame of the predictions, with a row for each example.

        Args:
            model_input: raw inputs [batch, ...] as an array, (nested) lists, or a DataFrame with one row per example,
                whose columns are concatenated in order. For a model of several inputs: a dict of arrays or a DataFrame
                with a column for each input, by name; the name of an input in a nested dict is its keys joined with
                `/`. Numbers may be given as text, and missing ones are NaN. For text, numbers become text, dates
                become 2024-01-31T23:59:59, and missing values become empty strings. A picture is the bytes of its file.
            params: `output`: `prediction` (the default) returns the columns that `scaleflow predict` writes;
                `probabilities` the probability of every class; `logits` the model's outputs as they are, no DataFrame:
                logits or values, [batch, ...] float32, or a dict of such arrays by the name of the output.

        Raises MlflowException if a value cannot be converted, naming its column, and its row counted from 0, or if the
        model has no outputs of this kind.
        """
        output = (params or {}).get("output", PREDICTION)
        if output not in OUTPUTS:
            raise MlflowException.invalid_parameter_value(f"output={output}: expected {', '.join(OUTPUTS)}")
        inputs = {
            name: to_tensor(spec, self._read_as_in_training(name, model_input[name] if name else model_input), name)
            for name, spec in self._specs.items()
        }
        try:
            values = tf.nest.map_structure(np.asarray, self._serve(inputs))
        except tf.errors.InvalidArgumentError as error:
            raise MlflowException.invalid_parameter_value(self._explain(inputs, str(error.message))) from error
        return values if output == LOGITS else self._answer(values, output)

    def _answer(self, values: Any, output: str) -> pd.DataFrame:
        """Returns predictions or probabilities; the cells of a column with a value for each position are arrays."""
        named = values if isinstance(values, dict) else {"": values}
        outputs = self._outputs or {name: SimpleNamespace(kind=None, names=None) for name in named}
        make = make_prediction_columns if output == PREDICTION else make_probability_columns
        columns = make(outputs, named)
        if not columns:
            raise MlflowException.invalid_parameter_value(
                f"output={output}: this model predicts values, which have no probabilities; use output={PREDICTION}"
            )
        return pd.DataFrame({name: each if each.ndim == 1 else list(each) for name, each in columns.items()})

    def _read_as_in_training(self, name: str, given: Any) -> Any:
        """Returns texts of a column of a table as the run read them: trimmed, missing ones empty, dates in one form.

        Pictures become bytes.
        """
        if name in self._pictures:
            return np.array([to_picture(each) for each in read_values(given).ravel()], object)
        kind = self._kinds.get(name)
        form = self._forms.get(name)
        if kind is None or (kind == "numbers" and form is None):
            return given
        if kind == "numbers":
            cells = [to_cell(cell) for cell in read_values(given).ravel()]
            return np.array([rewrite_cells([c], form)[0] if isinstance(c, str) else c for c in cells], object)
        texts = pd.Series(convert_texts(read_values(given).ravel()), dtype=object)
        texts = texts.map(lambda text: text.decode(errors="replace") if isinstance(text, bytes) else text).str.strip()
        texts = texts.where(~texts.isin(self._missing), "")
        if form is not None:
            texts = pd.Series(rewrite_cells(texts, form), dtype=object)
        if kind == "dates":
            dates = pd.to_datetime(texts.where(texts != "", None), format="ISO8601", utc=True, errors="coerce")
            texts = texts.where(dates.isna(), dates.dt.strftime("%Y-%m-%dT%H:%M:%S"))  # the model names what is no date
        return texts.to_numpy()

    def _serve(self, inputs: dict[str, tf.Tensor]) -> Any:
        return self._loaded.serve(nest(self._nested, self._read_pictures(inputs)))

    def _read_pictures(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns the inputs with arrays in place of encoded pictures."""
        if self._decode is None:
            return inputs
        decoded = self._decode(inputs[""] if "" in self._pictures else {name: inputs[name] for name in self._pictures})
        return inputs | (decoded if isinstance(decoded, dict) else {"": decoded})

    def _fails(self, inputs: dict[str, tf.Tensor]) -> bool:
        try:
            self._serve(inputs)
        except tf.errors.InvalidArgumentError:
            return True
        return False

    def _explain(self, inputs: dict[str, tf.Tensor], reason: str) -> str:
        """Returns the first row, and its inputs, that the model fails with, such as a text that is no date."""
        first, end = 0, len(next(iter(inputs.values())))
        while end - first > 1:
            middle = (first + end) // 2
            is_before = self._fails({name: each[first:middle] for name, each in inputs.items()})
            first, end = (first, middle) if is_before else (middle, end)
        row = {name: each[first:end] for name, each in inputs.items()}
        try:
            self._read_pictures(row)
        except tf.errors.InvalidArgumentError:
            return f"row {first}: the picture cannot be read; expected a whole JPEG, PNG, GIF or BMP file"
        texts = {name: each for name, each in row.items() if each.dtype == tf.string}
        blank = row | {name: tf.zeros_like(each) for name, each in texts.items()}
        bad = [name for name, each in texts.items() if self._fails(blank | {name: each})]
        if not bad or self._fails(blank):
            place = f"row {first}: " if self._fails(row) else ""
            return f"{place}the model fails: {reason.strip().partition(chr(10))[0]}"
        values = (f"{name or 'the input'} is {join_text(texts[name])!r}"[:200] for name in bad)
        return f"row {first}: {', '.join(values)}, which the model cannot read; a date has the form 2024-01-31T23:59:59"


def to_picture(value: Any) -> bytes:
    """Returns the bytes of a picture's file, which may be base64: MLflow decodes it in some forms of JSON only."""
    content = value.encode() if isinstance(value, str) else value if isinstance(value, bytes) else b""
    if content.startswith(MAGIC):
        return content
    try:
        return base64.b64decode(content, validate=True)
    except ValueError:
        return content


def join_text(texts: tf.Tensor) -> str:
    return ", ".join(text.decode(errors="replace") for text in np.ravel(texts.numpy()))


def read_specs(endpoint: Any) -> Any:
    """Returns the specs of the argument of an endpoint: one, or a dict of them."""
    ((specs,), _) = endpoint.concrete_functions[0].structured_input_signature
    return specs


def name_specs(specs: Any, name: str = "") -> dict[str, tf.TensorSpec]:
    """Returns the specs of the inputs by name; a single one without a name has the name ""."""
    if not isinstance(specs, dict):
        return {name: specs}
    start = f"{name}/" if name else ""
    return {leaf: each for key, part in specs.items() for leaf, each in name_specs(part, start + key).items()}


def nest(specs: Any, tensors: dict[str, tf.Tensor], name: str = "") -> Any:
    """Returns the tensors in the structure of `specs`."""
    if not isinstance(specs, dict):
        return tensors[name]
    start = f"{name}/" if name else ""
    return {key: nest(part, tensors, start + key) for key, part in specs.items()}


def to_tensor(spec: tf.TensorSpec, given: Any, name: str) -> tf.Tensor:
    """Converts an array, lists, a column or a table to a tensor [batch, ...]. `name` is that of the input."""
    size, rows = math.prod(spec.shape[1:]), len(given)
    values = flatten_cells(read_values(given), rows, size, name)
    if spec.dtype == tf.string:
        converted, is_bad, expected = convert_texts(values), np.zeros(len(values), bool), ""
    else:
        converted, is_bad, expected = convert_numbers(values, spec.dtype)
    if is_bad.any():
        at = int(is_bad.argmax())
        column = name or name_value(given, at % size)
        value = repr(str(values[at])[:80]) if convert_text(values[at]) else "missing"
        raise MlflowException.invalid_parameter_value(f"row {at // size}: {column} is {value}, expected {expected}")
    return tf.reshape(tf.constant(converted, spec.dtype), [rows, *spec.shape[1:]])


def name_value(given: Any, index: int) -> str:
    """Returns the name of a value of each row: that of its column in a table, else its index."""
    columns = getattr(given, "columns", ())
    return str(columns[index]) if index < len(columns) else f"value {index}"


def read_values(given: Any) -> Array:
    """Returns an array. A column or table with pandas's or pyarrow's types and missing values becomes objects."""
    plain = getattr(getattr(given, "dtype", None), "numpy_dtype", None)
    if plain is not None and np.dtype(plain).kind in "biuf" and not given.isna().any():
        return np.asarray(given.to_numpy(plain))
    if hasattr(given, "to_numpy"):
        return np.asarray(given.to_numpy())
    try:
        return np.asarray(given)
    except ValueError:  # lists of different lengths
        return np.array([np.array(each, object) for each in given], object)


def flatten_cells(values: Array, rows: int, size: int, name: str) -> Array:
    """Returns the values of all rows, [rows * size]; a cell may be a (nested) list. Refuses a row of another size."""
    if values.dtype == object and any(isinstance(cell, list | tuple | np.ndarray) for cell in values.flat):
        parts = [np.ravel(np.array(row.tolist() if isinstance(row, np.ndarray) else row, object)) for row in values]
        lengths = [len(part) for part in parts]
        values = np.concatenate(parts)
    else:
        lengths = [values.size // max(1, rows)] * rows
    if wrong := [row for row, length in enumerate(lengths) if length != size]:
        raise MlflowException.invalid_parameter_value(
            f"row {wrong[0]}: {name or 'the input'} has {lengths[wrong[0]]} values, expected {size}"
        )
    return values.ravel()


def convert_numbers(values: Array, dtype: tf.DType) -> tuple[Array, Array, str]:
    """Converts values [n] to numbers, and returns which of them cannot be converted, [n] bool, and what is expected."""
    is_bad = np.zeros(len(values), bool)
    if values.dtype.kind not in "biuf":
        values, is_bad = parse_numbers(values)
    if dtype.is_floating:
        with np.errstate(over="ignore"):
            converted = values.astype(dtype.as_numpy_dtype)
        return converted, is_bad | np.isinf(converted), "a finite number"
    if values.dtype.kind == "f":
        is_bad = is_bad | np.isnan(values)
    if dtype.is_bool:
        return values.astype(bool), is_bad, "true or false"
    if values.dtype.kind == "f":
        is_bad = is_bad | (values != np.floor(values))
    is_bad = is_bad | (values < dtype.min) | (values > dtype.max)
    return np.where(is_bad, 0, values).astype(dtype.as_numpy_dtype), is_bad, f"a whole number ({dtype.name})"


def parse_numbers(values: Array) -> tuple[Array, Array]:
    """Converts objects or texts [n] to numbers, NaN if missing, and returns which are no finite numbers: [n] bool."""
    cells = pd.Series([to_cell(value) for value in values], dtype=object)
    is_missing = cells.isna() | cells.isin(MISSING_WORDS)
    words = cells.map({"true": 1, "false": 0, "True": 1, "False": 0, "TRUE": 1, "FALSE": 0})
    parsed = pd.to_numeric(words.where(words.notna(), cells).where(~is_missing, None), errors="coerce").to_numpy()
    return parsed, ~(np.isfinite(parsed.astype(np.float64)) | is_missing.to_numpy())


def to_cell(value: Any) -> Any:
    """Returns a number or a missing value as it is, and anything else as a text without spaces around it."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    is_plain = isinstance(value, numbers.Number) or value is None or value is pd.NA
    return value if is_plain or is_missing_date(value) else str(value).strip()


def is_missing_date(value: Any) -> bool:
    return value is pd.NaT or (isinstance(value, np.datetime64) and bool(np.isnat(value)))


def convert_texts(values: Array) -> Array:
    """Converts values [n] to texts."""
    if values.dtype.kind == "M":
        return np.where(np.isnat(values), "", np.datetime_as_string(values.astype("datetime64[s]"))).astype(object)
    return np.array([convert_text(value) for value in values], object)


def convert_text(value: Any) -> str | bytes:
    """Converts a cell to text; a missing value becomes an empty string."""
    if isinstance(value, str | bytes):
        return value
    if value is None or value is pd.NA or is_missing_date(value) or value != value:  # NaN differs from itself
        return ""
    if isinstance(value, datetime.date):  # also datetime.datetime and pandas.Timestamp
        moment = pd.Timestamp(value)
        return str((moment if moment.tz is None else moment.tz_convert(None)).strftime("%Y-%m-%dT%H:%M:%S"))
    return str(value)


def _load_pyfunc(path: str) -> SavedModel:
    record = Path(path) / "learned_state.json"
    return SavedModel(
        str(Path(path) / "saved_model"), json.loads(record.read_text("utf-8")) if record.is_file() else {}
    )
