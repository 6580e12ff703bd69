"""Computes the outputs of a SavedModel for chunks of a table, on the devices of a strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import tensorflow as tf
from pyarrow import ArrowInvalid, compute, types

from scaleflow.dataset.table_values import (
    EXPECTED,
    MISSING,
    NUMBER,
    clean_column,
    is_missing,
    to_dates,
    to_numbers,
    to_texts,
)
from scaleflow.errors import RunError
from scaleflow.interfaces import name_leaves
from scaleflow.predict.columns import Array, is_list
from scaleflow.predict.source import Rows, name_row

#: The most rows that a device computes at once, and the most values of all inputs in these rows.
BATCH_ROWS, BATCH_VALUES = 1024, 1 << 22


class DistributedModel:
    """A SavedModel that computes batches of one size, a part of each on every replica.

    Args:
        folder: of the SavedModel.
        strategy: of the devices.
        batch_size: rows of a replica; None: 1024, or fewer if an example is large.

    Attributes:
        batch_size: rows of all replicas.
    """

    def __init__(self, folder: Path, strategy: tf.distribute.Strategy, batch_size: int | None = None) -> None:
        with strategy.scope():
            self._loaded = tf.saved_model.load(str(folder))
        ((self._specs,), _) = self._loaded.serve.concrete_functions[0].structured_input_signature
        self.inputs: Mapping[str, tf.TensorSpec] = name_leaves(self._specs)
        values = sum(math.prod(spec.shape[1:]) for spec in self.inputs.values())
        self._replicas = strategy.num_replicas_in_sync
        self._rows = batch_size or max(1, min(BATCH_ROWS, BATCH_VALUES // max(1, values)))
        self._strategy = strategy
        self.batch_size = self._rows * self._replicas

        @tf.function
        def run(batch: Any) -> Any:
            outputs = strategy.run(lambda inputs: self._loaded.serve(inputs), args=(batch,))
            return tf.nest.map_structure(strategy.experimental_local_results, outputs)

        self._run = run

    def predict(self, arrays: Mapping[str, Array], chunk: Sequence[Rows]) -> dict[str, Array]:
        """Returns the outputs [rows, ...] by name for inputs [rows, ...] by name.

        The last batch is filled with copies of its last row: another shape would be compiled anew.

        Args:
            arrays: the inputs.
            chunk: the rows that they come from.

        Raises:
            RunError: if TensorFlow cannot compute a batch, naming its first row.
        """
        rows = len(next(iter(arrays.values())))
        start = 0
        try:
            parts = []
            for start in range(0, rows, self.batch_size):
                parts.append(self._compute(arrays, start))
            outputs = [{name: join_replicas(values) for name, values in part.items()} for part in parts]
        except tf.errors.OpError as error:
            reason = str(error.message).strip().partition("\n")[0][:300]
            raise RunError(
                f"{name_row(chunk, start)}, or one of the {self.batch_size - 1:,} after it: the model fails: {reason}"
            ) from error
        return {name: np.concatenate([part[name] for part in outputs])[:rows] for name in outputs[0]}

    def _compute(self, arrays: Mapping[str, Array], start: int) -> dict[str, Any]:
        def take(replica: int) -> Any:
            first = start + replica * self._rows
            return self._nest(lambda name: tf.constant(take_rows(arrays[name], first, self._rows)), self._specs)

        if self._replicas == 1:
            return name_outputs(self._run(take(0)))
        values = self._strategy.experimental_distribute_values_from_function(
            lambda context: take(context.replica_id_in_sync_group)
        )
        return name_outputs(self._run(values))

    def _nest(self, make: Any, specs: Any, name: str = "") -> Any:
        """Returns the structure of the model's inputs with `make(name)` in place of each."""
        if not isinstance(specs, Mapping):
            return make(name)
        return {key: self._nest(make, spec, f"{name}/{key}" if name else key) for key, spec in specs.items()}


def take_rows(array: Array, first: int, count: int) -> Array:
    """Returns rows, and copies of the last one in place of those that there are not."""
    rows = array[first : first + count]
    if len(rows) == count:
        return rows
    return np.concatenate([rows, np.repeat(array[-1:], count - len(rows), axis=0)])


def name_outputs(outputs: Any) -> dict[str, Any]:
    """Returns the tensors of all replicas by the name of the output; "" if there is one output without a name."""
    return dict(outputs) if isinstance(outputs, Mapping) else {"": outputs}


def join_replicas(values: Any) -> Array:
    return np.concatenate([np.asarray(value) for value in values]) if len(values) > 1 else np.asarray(values[0])


# ---------------------------------------------------------------------------------------------
# Columns to arrays
# ---------------------------------------------------------------------------------------------


def convert_inputs(
    specs: Mapping[str, tf.TensorSpec],
    columns: Mapping[str, Sequence[str]],
    chunk: Sequence[Rows],
    missing: Sequence[str] | None,
) -> dict[str, Array]:
    """Converts the rows of a chunk to the inputs of a model, [rows, ...] by name.

    Args:
        specs: of the inputs.
        columns: of each input.
        chunk: the rows.
        missing: words that mean a missing value; None: text is taken as it is.

    Raises:
        RunError: if a value cannot be converted, naming its file, row and column.
    """
    return {
        name: np.concatenate([convert_input(spec, columns[name], piece, missing) for piece in chunk])
        for name, spec in specs.items()
    }


def convert_input(spec: tf.TensorSpec, columns: Sequence[str], rows: Rows, missing: Sequence[str] | None) -> Array:
    """Converts columns to one array [rows, ...]."""
    count, shape = len(rows.table), tuple(spec.shape[1:])
    parts = []
    for name in columns:
        column = rows.table[name]
        is_lists = is_list(column.type)
        flat = flatten_lists(column, math.prod(shape), name, rows) if is_lists else column
        values, is_unusable, expected = convert_values(flat, spec.dtype, missing)
        is_bad = is_unusable.reshape(count, -1).any(axis=1)
        if is_bad.any():
            row = int(is_bad.argmax())
            raise RunError(f"{name_row([rows], row)}: {name} is {str(column[row].as_py())[:80]}, expected {expected}")
        parts.append(values)
    return (parts[0] if len(parts) == 1 else np.stack(parts, axis=1)).reshape(count, *shape)


def flatten_lists(column: Any, size: int, name: str, rows: Rows) -> Any:
    """Returns the values of lists, or of lists of lists, in order. Raises RunError if a row has not `size` of them."""
    column, lengths = column.combine_chunks(), np.ones(len(column), np.int64)
    while is_list(column.type):
        inner = compute.fill_null(compute.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        ends = np.cumsum(lengths)
        totals = np.concatenate([[0], np.cumsum(inner)])
        lengths = totals[ends] - totals[ends - lengths]
        column = column.flatten()
    if (lengths != size).any():
        row = int((lengths != size).argmax())
        raise RunError(f"{name_row([rows], row)}: {name} has {lengths[row]} values, expected {size}")
    return pyarrow.chunked_array([column])


def convert_values(column: Any, dtype: tf.DType, missing: Sequence[str] | None) -> tuple[Array, Array, str]:
    """Converts values to an array, and returns which of them cannot be converted: [n] bool, and what is expected."""
    if dtype == tf.string:
        if types.is_timestamp(column.type) or types.is_date(column.type):
            return *to_dates(column), "a date"
        text = clean_column(column, missing) if missing is not None else column
        if types.is_string(text.type) or types.is_large_string(text.type):
            values = compute.fill_null(text, "").to_numpy()
            return values, np.zeros(len(values), bool), "a text"
        return *to_texts(text), "a text"
    column = clean_column(column, MISSING if missing is None else missing)
    if dtype.is_integer:
        return *to_integers(column, dtype), f"a whole number ({dtype.name})"
    numbers, is_bad = to_numbers(column)
    if dtype.is_bool:
        is_bad = is_bad | np.isnan(numbers)
    return numbers.astype(dtype.as_numpy_dtype), is_bad, EXPECTED[NUMBER]


def to_integers(column: Any, dtype: tf.DType) -> tuple[Array, Array]:
    """Converts a column to whole numbers, and returns which values are none, are missing, or are out of range."""
    is_bad = is_missing(column)
    try:
        numbers = compute.fill_null(compute.cast(column, "int64"), 0).to_numpy()
    except ArrowInvalid:
        floats, is_unusable = to_numbers(column)
        is_bad = is_bad | is_unusable | (floats != np.floor(floats))
        numbers = np.where(is_bad, 0, floats).astype(np.int64)
    is_bad = is_bad | (numbers < dtype.min) | (numbers > dtype.max)
    return numbers.astype(dtype.as_numpy_dtype), is_bad
