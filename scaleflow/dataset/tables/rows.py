"""Rows of tables as the arrays that training takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.tables.file_rows import FileRows
from scaleflow.dataset.tables.values import Form, are_plain_numbers, convert_target, to_weights
from scaleflow.interfaces import Arrays, Outputs
from scaleflow.interfaces.formatting import MAX_NAMED, join_first
from scaleflow.serving.cells import NUMBER, Array, ColumnReader

#: Maximum number of faults that are recorded with file and row.
MAX_FAULTS = 10


class TableRows:
    """Converts rows of files to arrays, as a `RowReader`.

    Args:
        rows: the rows of the files.
        forms: by column, how its numbers or dates are written.
        readers: the readers of the inputs, by name.
        outputs: the target.
        weights: the column with the weights of rows, if there is one.
    """

    def __init__(
        self,
        rows: FileRows,
        forms: Mapping[str, Form],
        readers: Mapping[str, ColumnReader],
        outputs: Outputs,
        weights: str | None,
    ) -> None:
        self.rows = rows
        self._forms = forms
        self._readers = readers
        self._outputs = outputs
        self._weights = weights
        self.lengths = rows.lengths
        self.paths = rows.paths
        self.malformed = rows.malformed
        self.sampled = rows.sampled
        self.spec = self._make_spec()
        numbers, faults = rows.recall("types", [self._kinds, outputs, forms], self._learn_from_sample)
        self._numbers: Sequence[str] = numbers
        self.faults: Sequence[str] = [*self.malformed, *faults][:MAX_FAULTS]

    @property
    def _kinds(self) -> dict[str, str | None]:
        return {name: reader.kind for name, reader in self._readers.items()}

    def _make_spec(self) -> tuple[Any, ...]:
        """Returns the specs (inputs, targets) of one row, or with a weight."""
        inputs: dict[str, tf.TensorSpec] = {}
        for name, kind in self._kinds.items():
            inputs[name] = tf.TensorSpec([], tf.float64 if kind == NUMBER else tf.string)
        targets = tf.TensorSpec(self._outputs.target_shape, self._outputs.target_dtype)
        if self._weights is None:
            return inputs, targets
        return inputs, targets, tf.TensorSpec([], tf.float32)

    def _learn_from_sample(self) -> tuple[list[str], list[str]]:
        """Returns the columns that pyarrow can read as numbers, and messages about the first unusable rows."""
        names = [name for name, kind in self._kinds.items() if kind == NUMBER]
        if self._outputs.kind == "regression":
            names.append(self.rows.target)
        if self._weights is not None:
            names.append(self._weights)
        sample = self.rows.parse_sample(self._forms)
        numbers: list[str] = []
        for name in names:
            if name not in self._forms and are_plain_numbers(sample.columns[name]):
                numbers.append(name)
        _, reasons = self._sample
        messages: list[str] = []
        for row in sorted(reasons):
            if self.rows.has_target[self.sampled[row]] and len(messages) < MAX_FAULTS:
                messages.append(f"{sample.place(row)}: {reasons[row]}")
        return numbers, messages

    @cached_property
    def _sample(self) -> tuple[Arrays, dict[int, str]]:
        """The sample as arrays, and why some of its rows cannot be used."""
        return self._convert(self.rows.parse_sample(self._forms).columns)

    def recall(self, what: str, options: Any, learn: Callable[[], Any]) -> Any:
        return self.rows.recall(what, options, learn)

    def read(self, block: int, rows: int | None = None) -> tuple[Arrays, Mapping[int, str]]:
        """Returns rows of a block. A sample of all rows is kept in memory."""
        if not self.rows.is_whole_sampled:
            columns: dict[str, Any] = {}
            for name, column in self.rows.read(block, rows, self._numbers).items():
                columns[name] = ColumnReader(written=self._forms.get(name)).rewrite(column)
            return self._convert(columns)
        first = self.rows.firsts[block]
        end = self.rows.firsts[block + 1]
        if rows is not None:
            end = min(first + rows, end)
        arrays, reasons = self._sample
        reasons_of_block = {row - first: reason for row, reason in reasons.items() if first <= row < end}
        return arrays.map(lambda array: array[first:end]), reasons_of_block

    def sample(self) -> tuple[Any, Array]:
        return self._sample[0].inputs, self.sampled

    def name(self, row: int) -> str:
        return self.rows.name(row)

    def locate(self, rows: Array) -> tuple[list[str], Array]:
        return self.rows.locate(rows)

    def open_columns(self, names: Sequence[str], key: str) -> Callable[[Array], dict[str, Any]]:
        return self.rows.open_columns(names, key)

    def describe_unlabelled(self, is_in_split: Array, hint: str) -> str:
        """Returns a text about the rows of a split, [n] bool, that have no target; "" if all have one."""
        absent = np.flatnonzero(is_in_split & ~self.rows.has_target)
        if not len(absent):
            return ""
        names = join_first([self.name(int(row)) for row in absent[:MAX_NAMED]], count=len(absent), between="; ")
        total = np.count_nonzero(is_in_split)
        return f"{len(absent):,} of {total:,} rows have no target {self.rows.target} ({names}){hint}"

    def _convert(self, columns: Mapping[str, Any]) -> tuple[Arrays, dict[int, str]]:
        """Converts columns to arrays. Returns also why rows cannot be used, by their index."""
        reasons: dict[int, str] = {}

        def convert(name: str, values: Array, is_bad: Array, expected: str, role: str = "") -> Array:
            for row in np.flatnonzero(is_bad):
                value = columns[name][int(row)].as_py()
                shown = "missing" if value is None else value
                reasons.setdefault(int(row), f"{role}{name} is {shown}, expected {expected}")
            return values

        target = self.rows.target
        targets = convert(target, *convert_target(columns[target], self._outputs), role="its target ")
        inputs: dict[str, Array] = {}
        for name, reader in self._readers.items():
            dtype = np.dtype(self.spec[0][name].dtype.as_numpy_dtype)
            inputs[name] = convert(name, *reader.to_array(columns[name], dtype))
        weights = None
        if self._weights is not None:
            weights = convert(self._weights, *to_weights(columns[self._weights]), role="its weight ")
        return Arrays(inputs, targets, weights), reasons
