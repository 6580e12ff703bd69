"""How a run read its data; the rows of a new table; the columns that a model takes. No TensorFlow."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow
from pyarrow import types

from scaleflow.errors import ConfigError
from scaleflow.files.table_formats import CsvForm
from scaleflow.interfaces import LearnedState
from scaleflow.interfaces.formatting import join_first
from scaleflow.serving.cells import CATEGORY, DATE, NUMBER, CellForm
from scaleflow.tracking.saved_models import ModelInput

#: The source of tables, and the kinds of columns of which the model replaces a missing value by what training learned.
TABLE, FILLED = "scaleflow.dataset.table.Table", (NUMBER, DATE)


@dataclass(frozen=True)
class Reading:
    """How a run read its data.

    Attributes:
        form: of CSV files.
        target: the column that the run predicts; None if it is not known.
        missing: words that mean a missing value; None: text is taken as it is.
        kinds: what the columns are taken for: `numbers`, `categories`, `texts` or `dates`; empty if it is not known.
        filled: the inputs in which the model replaces a missing value, and whether training had missing ones; None: it
            is not known.
        categories: those that the model knows, by input.
        many_words: the inputs of which it knows only the most frequent words of training.
        input: the column, array or feature that the run read its single input from; None if it is not known.
        features: `dataset.features` of TFRecord files.
        compression: of TFRecord files, as TensorFlow names it.
        forms: how the numbers and dates of columns are written; see `rewrite_cells`.
        unused: the columns of the run's table that were no inputs; None: it is not known.
    """

    form: CsvForm = field(default_factory=CsvForm)
    target: str | None = None
    missing: tuple[str, ...] | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    filled: Mapping[str, bool | None] = field(default_factory=dict)
    categories: Mapping[str, Collection[str]] = field(default_factory=dict)
    many_words: Collection[str] = ()
    input: str | None = None
    features: Mapping[str, Any] = field(default_factory=dict)
    compression: str = ""
    forms: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unused: tuple[str, ...] | None = None

    def describe_cells(self, name: str) -> CellForm:
        """Returns how the run read the cells of a column."""
        return CellForm(self.kinds.get(name), self.missing, self.forms.get(name), [*self.categories.get(name, ())])


def describe_reading(state: LearnedState | None, options: Mapping[str, Any], inputs: Collection[str]) -> Reading:
    """Returns how a run read its data.

    Args:
        state: what the run learned; None if its model was logged before that was recorded.
        options: `dataset` of its config, for what the record does not say.
        inputs: the names of the model's inputs.
    """
    found = {**options, **(state.reading if state is not None else {})}
    delimiter, target, encoding = (to_word(found.get(key)) for key in ("delimiter", "target", "encoding"))
    missing, kinds = to_words(found.get("missing")), found.get("columns")
    kinds = kinds if isinstance(kinds, dict) and to_words([*kinds.values()]) else {}  # a store's content is not trusted
    form = CsvForm(delimiter, to_words(found.get("header")) or (), encoding or CsvForm.encoding)
    features = found.get("features")
    compression = (to_word(found.get("compression")) or "none").upper()
    common = Reading(
        form,
        target,
        missing,
        input=to_word(found.get("input")) or to_word(found.get("inputs")),
        features=features if isinstance(features, dict) else {},
        compression="" if compression == "NONE" else compression,
        forms=forms if isinstance(forms := found.get("forms"), dict) else {},
        unused=to_words(found.get("unused")),
        many_words=tuple(many) if isinstance(many := found.get("many_words"), dict) else (),
    )
    if state is None:
        is_table = options.get("_target_") == TABLE
        return replace(common, filled=dict.fromkeys(inputs)) if is_table else common
    learned = {name: each.learned for name, each in state.preprocessing.items()}
    numbers = {name: each for name, each in learned.items() if kinds.get(name) in FILLED and isinstance(each, dict)}
    own = [name for name, each in state.preprocessing.items() if not each.path.startswith("scaleflow.")]  # may fill
    return replace(
        common,
        kinds=kinds,
        filled={name: bool(each.get("missing")) for name, each in numbers.items()}
        | dict.fromkeys(own),  # may fill, too
        categories={name: to_words(each) or () for name, each in learned.items() if kinds.get(name) == CATEGORY},
    )


def to_word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def to_words(value: Any) -> tuple[str, ...] | None:
    is_words = isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)
    return tuple(value) if is_words else None


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class RowBatch:
    """Some rows.

    Attributes:
        table: the rows.
        paths: the file of each: [rows] `str` objects.
        numbers: the number of each in its file, from 1; 0: the file is the row. [rows] int64.
        faults: why a row cannot be read, as those with too few or too many fields; "" if it can. Such a row is empty
            in the table. [rows] `str` objects.
    """

    table: Any
    paths: Array
    numbers: Array
    faults: Array

    def slice(self, start: int, count: int = sys.maxsize) -> RowBatch:
        parts = (each[start : start + count] for each in (self.paths, self.numbers, self.faults))
        return RowBatch(self.table.slice(start, count), *parts)

    def name(self, row: int) -> str:
        """Names a row by its file; the first row of a file is row 1, and a header does not count."""
        number = self.numbers[row]
        return f"{self.paths[row]}, row {number}" if number else str(self.paths[row])


def make_batch(path: str, first: int, table: Any, malformed: Mapping[int, str] | None = None) -> RowBatch:
    """Returns rows of a file, `first` and the malformed ones counted from 0."""
    rows = len(table)
    faults = np.full(rows, "", object)
    for row, reason in (malformed or {}).items():
        faults[row] = reason
    return RowBatch(table, np.full(rows, path, object), np.arange(first + 1, first + rows + 1), faults)


@dataclass(frozen=True)
class RowSource:
    """Where the rows come from.

    Attributes:
        files: their paths, in the order in which they are read.
        schema: names and types of the columns.
        read: yields the rows in order: `read(columns, at_once, skip)`, with the names of the columns, the most rows of
            a batch (of a text file, a block is one), and the number of rows to leave out.
        rows: the number of rows, if it is known without reading them.
        values: the columns that have the values of a model's single input, if that is known.
        labels: the columns that are copied to the output, unless the user names some.
        delimiter: of CSV files, if it is no usual one.
    """

    files: Sequence[str]
    schema: Any
    read: Callable[..., Iterator[RowBatch]]
    rows: int | None = None
    values: Sequence[str] = ()
    labels: Sequence[str] = ()
    delimiter: str | None = None


def read_places(
    count: int, read: Callable[[list[str], int, int], RowBatch]
) -> Callable[[Sequence[str], int, int], Iterator[RowBatch]]:
    """Returns `RowSource.read` of rows that can be read at any place: `read(columns, first, end)`."""

    def read_in_order(columns: Sequence[str], at_once: int, skip: int = 0) -> Iterator[RowBatch]:
        for first in range(skip, count, at_once):
            yield read(list(columns), first, min(first + at_once, count))

    return read_in_order


def divide_rows(
    batches: Iterator[RowBatch], shard: int, largest: int, shard_rows: int | None
) -> Iterator[tuple[int, RowBatch]]:
    """Yields rows with the number of their shard, that of the first one being `shard`; at most `largest` at once."""
    left = shard_rows or sys.maxsize
    parts, missing = list[RowBatch](), min(left, largest)
    for batch in batches:
        while len(batch.table):
            parts.append(batch.slice(0, missing))
            taken = len(parts[-1].table)
            batch, missing, left = batch.slice(taken), missing - taken, left - taken
            if not missing:
                yield shard, join_batches(parts)
                shard, left = (shard, left) if left else (shard + 1, shard_rows or sys.maxsize)
                parts, missing = [], min(left, largest)
    if parts:
        yield shard, join_batches(parts)


def join_batches(parts: Sequence[RowBatch]) -> RowBatch:
    arrays = zip(*((each.paths, each.numbers, each.faults) for each in parts), strict=True)
    return RowBatch(pyarrow.concat_tables([each.table for each in parts]), *map(np.concatenate, arrays))


#: The most columns that a message names.
MOST_NAMED = 20


def match_columns(
    inputs: Mapping[str, ModelInput], schema: Any, selected: Sequence[str], target: str | None
) -> dict[str, list[str]]:
    """Returns the columns of each input.

    An input with a name is read from the column of that name. An input without one is read from several columns with a
    value each, in order, or from one column of lists.

    Args:
        inputs: of the model.
        schema: of the table.
        selected: the columns that the user names, in the order of the model's values; empty: all but the target.
        target: the target that the model was trained on, if it is known.

    Raises:
        ConfigError: if columns are missing, or cannot be what the model takes.
    """
    if "" not in inputs:
        if selected:
            raise ConfigError(
                f"--columns: this model takes columns by name: {format_columns(list(inputs))}; leave it out"
            )
        if missing := [name for name in inputs if name not in schema.names]:
            raise ConfigError(
                f"--input: there is no column {format_columns(missing)}, which the model takes; the table has "
                f"{format_columns(schema.names)}"
            )
        for name, described in inputs.items():
            check_type(name, schema.field(name).type, described)
        return {name: [name] for name in inputs}
    if missing := [name for name in selected if name not in schema.names]:
        raise ConfigError(
            f"--columns {format_columns(missing)}: there is no such column; the table has "
            f"{format_columns(schema.names)}"
        )
    columns = list(selected) or [name for name in schema.names if name != target]
    described = inputs[""]
    count = math.prod(described.shape)
    first = schema.field(columns[0]).type if len(columns) == 1 else None
    if first is not None and (is_list(first) or (described.is_picture and is_picture(first))):
        check_type(columns[0], schema.field(columns[0]).type, described)
    elif len(columns) == count:
        for name in columns:
            check_type(name, schema.field(name).type, ModelInput((), described.dtype))
    else:
        raise ConfigError(
            f"--input: the model takes {describe_model_input(described)}: {count:,} column"
            f"{'s' if count != 1 else ''} with a value each, or one column of lists; the table has {len(columns)}: "
            f"{format_columns(columns)}; name those of the model, in its order, with --columns"
        )
    return {"": columns}


def describe_model_input(described: ModelInput) -> str:
    """Returns an input in words, such as `an array of shape (8, 8, 1), float32`."""
    if described.is_picture:
        return "pictures (the bytes of JPEG, PNG, BMP or GIF files)"
    kind = "text" if described.dtype in ("object", "string") else str(described.dtype)
    return f"an array of shape {described.shape}, {kind}" if described.shape else f"one value, {kind}"


def check_type(name: str, type_: Any, described: ModelInput) -> None:
    """Raises ConfigError if no value of a column's type can be a value of the input."""
    if described.is_picture and is_picture(type_):
        return
    inner = type_
    while is_list(inner):
        inner = inner.value_type
    if is_list(type_) and not described.shape:
        problem = "the model takes one value of each row"
    elif math.prod(described.shape) != 1 and not is_list(type_):
        problem = f"the model takes a list, {describe_model_input(described)}"
    elif types.is_nested(inner) or types.is_binary(inner) or types.is_large_binary(inner):
        problem = "the model takes numbers, texts or dates"
    else:
        return
    raise ConfigError(f"--input: the column {name} has the type {type_}, and {problem}")


def is_picture(type_: Any) -> bool:
    """Returns whether a column may have encoded pictures: their bytes, alone or as `datasets` keeps them."""
    if types.is_struct(type_):
        return bool(type_.get_field_index("bytes") >= 0)
    return bool(types.is_binary(type_) or types.is_large_binary(type_))


def is_list(type_: Any) -> bool:
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_))


def format_columns(names: Sequence[str]) -> str:
    return join_first(names, MOST_NAMED)
