"""Computes a SavedModel's outputs for chunks of a table, on the devices of a strategy."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import tensorflow as tf
from pyarrow import compute, types

from scaleflow.errors import ConfigError, RunError, read_reason
from scaleflow.features.predict.bad_rows import Problem, RowReport
from scaleflow.features.predict.reading import Array, InputForm, RowBatch, is_list, is_picture
from scaleflow.interfaces import map_named, name_leaves
from scaleflow.serving.cells import DATE, ColumnReader
from scaleflow.serving.layers import choose_layer, compute_layer
from scaleflow.serving.reasons import LAYER

#: Maps encoded pictures, [b] strings, to arrays [b, ...].
Decode = Callable[[Any], Any]

#: Threads that decode pictures, and pictures per call.
DECODERS = os.cpu_count() or 1
AT_ONCE = 32

#: Maximum number of rows that a device computes at once, and of input values in these rows.
BATCH_ROWS = 1024
BATCH_VALUES = 1 << 22

#: Spec of the input of a model that takes one text.
TEXT = tf.TensorSpec([None], tf.string)


class DistributedModel:
    """A SavedModel that computes batches of one size. Each replica computes an equal share.

    Args:
        folder: folder of the SavedModel.
        strategy: strategy with the devices.
        batch_size: rows per replica; None: 1024, or fewer if an example is large.

    Attributes:
        inputs: specs of the inputs, by name.
        decode: maps encoded pictures to inputs (a tensor, or a dict of tensors); None if the model takes none.
        batch_size: rows of all replicas together.
        extra: results besides the outputs: arrays without rows, by name.
    """

    def __init__(self, folder: Path, strategy: tf.distribute.Strategy, batch_size: int | None = None) -> None:
        with strategy.scope():
            self._loaded = tf.saved_model.load(str(folder))
        ((self._specs,), _) = self._loaded.serve.concrete_functions[0].structured_input_signature
        self.inputs: Mapping[str, tf.TensorSpec] = name_leaves(self._specs)
        self.decode: Decode | None = getattr(self._loaded, "decode", None)
        values_per_row = sum(math.prod(spec.shape[1:]) for spec in self.inputs.values())
        rows_that_fit = BATCH_VALUES // max(1, values_per_row)
        self._replicas = strategy.num_replicas_in_sync
        self._rows = batch_size or max(1, min(BATCH_ROWS, rows_that_fit))
        self._strategy = strategy
        self.batch_size = self._rows * self._replicas

        self.extra: Mapping[str, Array] = {}
        self._serve: Callable[[Any], Any] = self._loaded.serve
        self._run = tf.function(self._compute_replicas, autograph=False)

    def add_layer(self, path: Path, name: str) -> None:
        """Adds a layer's values to the results. The Keras file of the model computes them.

        Raises ConfigError if the file cannot be loaded, or the model has no such layer with numbers as values.
        """
        from keras.models import load_model

        try:
            with self._strategy.scope():
                model = load_model(path, compile=False, safe_mode=True)
            layer = choose_layer(model, name)

            def serve(inputs: Any) -> dict[str, Any]:
                outputs, values = compute_layer(model, layer, inputs)
                return {**name_leaves(outputs), LAYER + name: values}

            traced = tf.function(serve, input_signature=[self._specs], autograph=False)
            shape = traced.get_concrete_function().structured_outputs[LAYER + name].shape[1:]
        except Exception as error:  # zipfile, h5py and Keras raise many types
            raise ConfigError(f"--layer {name}: {read_reason(error)[:1000]}") from error
        self._serve = traced
        self.extra = {LAYER + name: np.zeros((0, *shape), np.float32)}

    def _compute_replicas(self, batch: Any) -> Any:
        outputs = self._strategy.run(lambda inputs: self._serve(inputs), args=(batch,))
        return tf.nest.map_structure(self._strategy.experimental_local_results, outputs)

    def predict(self, arrays: Mapping[str, Array], name: Callable[[int], str]) -> dict[str, Array]:
        """Returns the outputs [rows, ...] by name for inputs [rows, ...] by name.

        The last batch is filled with copies of its last row: another shape would be compiled anew.

        Args:
            arrays: the inputs.
            name: returns the name of a row: its file and number.

        Raises:
            RunError: if TensorFlow cannot compute a batch, with the batch's first row.
        """
        rows = len(next(iter(arrays.values())))
        start = 0
        try:
            pending = []
            for start in range(0, rows, self.batch_size):
                pending.append(self._compute(arrays, start))
            batches = [join_replicas(batch) for batch in pending]  # waits for the devices
        except tf.errors.OpError as error:
            reason = str(error.message).strip().partition("\n")[0][:300]
            raise RunError(
                f"{name(start)}, or one of the {self.batch_size - 1:,} after it: the model fails: {reason}"
            ) from error
        outputs = {}
        for output in batches[0]:
            joined = np.concatenate([batch[output] for batch in batches])
            outputs[output] = joined[:rows]
        return outputs

    def explain_failure(self, row: int) -> str:
        """Returns why a row has no prediction."""
        return "the model computes NaN"

    def _compute(self, arrays: Mapping[str, Array], start: int) -> dict[str, Any]:
        def take(replica: int) -> Any:
            first = start + replica * self._rows
            return map_named(lambda name, _: tf.constant(take_rows(arrays[name], first, self._rows)), self._specs)

        if self._replicas == 1:
            return name_leaves(self._run(take(0)))
        values = self._strategy.experimental_distribute_values_from_function(
            lambda context: take(context.replica_id_in_sync_group)
        )
        return name_leaves(self._run(values))


def join_replicas(outputs: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the outputs of all replicas, [rows, ...] by name. `outputs` has a tensor per replica, by name."""
    joined = {}
    for name, per_replica in outputs.items():
        joined[name] = np.concatenate([np.asarray(values) for values in per_replica])
    return joined


def take_rows(array: Array, first: int, count: int) -> Array:
    """Returns `count` rows from `first` on, filled with copies of the last row."""
    rows = array[first : first + count]
    if len(rows) == count:
        return rows
    return np.concatenate([rows, np.repeat(array[-1:], count - len(rows), axis=0)])


# Columns to arrays ---------------------------------------------------------------------------


class InputColumn(NamedTuple):
    """Values of a column, [rows, values of a row], and the rows with missing values: [rows] bool."""

    name: str
    values: Array
    is_missing: Array


def convert_to_inputs(
    specs: Mapping[str, tf.TensorSpec], form: InputForm, rows: RowBatch, report: RowReport, decode: Decode | None = None
) -> tuple[dict[str, Array], Array]:
    """Converts rows to a model's inputs, and reports differences from training.

    Args:
        specs: specs of the inputs.
        form: the columns of each input, and how the run read them.
        rows: rows of the table.
        report: counts bad rows, unknown categories and missing values.
        decode: the model's decoder of pictures.

    Returns:
        The inputs of the good rows, [good, ...] by name, and which rows are good: [rows] bool.

    Raises:
        RunError: if a row is bad and the report does not allow it.
    """
    is_malformed = np.zeros(len(rows.table), bool)
    for place in rows.faults:
        is_malformed[place - rows.first] = True
    problems = [Problem("fields", is_malformed, lambda row: rows.faults[rows.first + row])]
    columns_of: dict[str, list[InputColumn]] = {}
    for name, spec in specs.items():
        columns_of[name] = []
        for table_column in form.columns[name]:
            cells = rows.table[table_column]
            if is_picture(cells.type):
                converted, problem = read_pictures(spec, name, cells, decode)
                new_problems = [problem]
            else:
                reader = form.find_reader(table_column)
                can_miss = name in form.filled
                converted, new_problems = convert_column(spec, table_column, cells, reader, can_miss=can_miss)
            columns_of[name].append(converted)
            for problem in new_problems:  # a malformed row has only its first problem
                problems.append(problem._replace(is_bad=problem.is_bad & ~is_malformed))
    report.add_problems(problems, rows.first)
    is_good = ~np.any([problem.is_bad for problem in problems], axis=0)
    for name, columns in columns_of.items():
        for column in columns:
            report_column(name, column, form, rows, report=report, is_good=is_good)
    inputs = {name: join_columns(columns, specs[name]) for name, columns in columns_of.items()}
    if not is_good.all():
        inputs = {name: values[is_good] for name, values in inputs.items()}
    return inputs, is_good


def report_column(
    name: str, column: InputColumn, form: InputForm, rows: RowBatch, report: RowReport, is_good: Array
) -> None:
    """Reports the units, missing values and categories in the good rows of a column. `name` is its input."""
    units = count_other_units(rows.table, column.name, form.find_reader(column.name), is_good=is_good)
    report.add_units(column.name, units)
    missing = int((column.is_missing & is_good).sum()) - units.total()
    report.add_missing(column.name, missing, form.filled.get(name))
    if name in form.categories:
        words = column.values[is_good].ravel()
        known = form.readers[name].known
        report.add_categories(column.name, words, known, has_rare=name in form.many_words)


def count_other_units(table: Any, name: str, reader: ColumnReader, is_good: Array) -> Counter[str]:
    """Counts numbers in good rows of a column with units that training did not have, by unit."""
    if not reader.has_unit:  # pictures have no column of this name, and no unit
        return Counter()
    column = table[name] if is_good.all() else table[name].filter(pyarrow.array(is_good))
    return reader.count_other_units(reader.clean(column))


def join_columns(columns: Sequence[InputColumn], spec: tf.TensorSpec) -> Array:
    """Returns the values of an input, [rows, *shape]."""
    values = [column.values for column in columns]
    joined = values[0] if len(values) == 1 else np.concatenate(values, axis=1)
    return joined.reshape(len(joined), *spec.shape[1:])


def read_pictures(spec: tf.TensorSpec, name: str, column: Any, decode: Decode | None) -> tuple[InputColumn, Problem]:
    """Decodes the pictures of input `name`. Unreadable ones become zeros, and are the bad rows of the problem."""
    assert decode is not None
    if types.is_struct(column.type):  # the format of the library datasets
        column = compute.struct_field(column, "bytes")
    pictures = np.array([picture or b"" for picture in column.to_pylist()], object)

    def decode_together(batch: Array) -> Array | None:
        """Returns the decoded pictures, or None if one of them cannot be read."""
        encoded = tf.constant(batch, tf.string)
        try:
            return np.asarray(decode({name: encoded})[name] if name else decode(encoded))
        except tf.errors.OpError:
            return None

    def decode_batch(batch: Array) -> list[Array | None]:
        together = decode_together(batch)
        if together is not None:
            return list(together)
        decoded: list[Array | None] = []
        for n in range(len(batch)):
            single = decode_together(batch[n : n + 1])
            decoded.append(None if single is None else single[0])
        return decoded

    batches = [pictures[first : first + AT_ONCE] for first in range(0, len(pictures), AT_ONCE)]
    decoded: list[Array | None] = []
    with ThreadPoolExecutor(DECODERS) as pool:
        for batch in pool.map(decode_batch, batches):
            decoded += batch
    is_bad = np.array([picture is None for picture in decoded])
    problem = Problem("picture", is_bad, lambda row: "it is no whole JPEG, PNG, BMP or GIF")
    blank = np.zeros(spec.shape[1:], spec.dtype.as_numpy_dtype)
    values = np.stack([blank if picture is None else picture for picture in decoded])
    return InputColumn(name, values.reshape(len(values), -1), np.zeros(len(values), bool)), problem


def convert_column(
    spec: tf.TensorSpec, name: str, column: Any, reader: ColumnReader, can_miss: bool
) -> tuple[InputColumn, list[Problem]]:
    """Converts a column of an input. Returns its values, and the problems of its rows.

    `can_miss`: whether the model imputes missing values.
    """
    count = len(column)
    size = math.prod(spec.shape[1:]) if is_list(column.type) else 1
    # `is_whole` has one value per row: whether its list has the model's number of values. The other masks have one per
    # number: of all rows, or of all numbers in whole lists.
    is_whole = np.ones(count, bool)
    problems = []
    flat = column
    if is_list(column.type):
        flat, lengths = flatten_lists(column)
        is_whole = lengths == size
        problems.append(Problem(name, ~is_whole, lambda row: f"{name} has {lengths[row]} values, expected {size}"))
        if not is_whole.all():
            flat, _ = flatten_lists(column.filter(pyarrow.array(is_whole)))
    converted, is_unusable, expected = reader.convert(flat, np.dtype(spec.dtype.as_numpy_dtype))
    absent = find_missing(converted, reader.kind) & ~is_unusable
    is_bad = is_unusable if can_miss else is_unusable | absent

    def explain(row: int) -> str:
        value = column[row].as_py()
        has_none = value is None or (not is_list(column.type) and absent[row])
        fact = "is missing" if has_none else f"is {str(value)[:80]}"
        return f"{name} {fact}, expected {expected}"

    def to_rows(values: Array) -> Array:
        """Returns values as [rows, size]. Rows whose list is not whole are 0."""
        if is_whole.all():
            return values.reshape(count, size)
        whole = np.zeros((count, size), values.dtype)
        whole[is_whole] = values.reshape(-1, size)
        return whole

    problems.append(Problem(name, np.any(to_rows(is_bad), axis=1), explain))
    return InputColumn(name, to_rows(converted), np.any(to_rows(absent), axis=1)), problems


def find_missing(values: Array, kind: str | None) -> Array:
    """Returns which numbers or dates are missing: [n] bool."""
    if kind == DATE:
        return np.asarray(values == "")
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)


def flatten_lists(column: Any) -> tuple[Any, Array]:
    """Returns the values of (nested) lists in order, and the number of values of each row: [rows] int."""
    column = column.combine_chunks()
    lengths = np.ones(len(column), np.int64)
    while is_list(column.type):
        inner = compute.fill_null(compute.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        ends = np.cumsum(lengths)
        totals = np.concatenate([[0], np.cumsum(inner)])
        lengths = totals[ends] - totals[ends - lengths]
        column = column.flatten()
    return pyarrow.chunked_array([column]), lengths
