"""Reads the rows of new data in order, and matches their columns to a model's inputs. No TensorFlow."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from pyarrow import types

from scaleflow.errors import ConfigError, find_similar
from scaleflow.interfaces import Inputs, LearnedState, Outputs, name_leaves
from scaleflow.interfaces.formatting import join_first
from scaleflow.serving.cells import CATEGORY, DATE, NUMBER, ColumnReader, make_readers

Array = np.ndarray[Any, Any]


class RowBatch(NamedTuple):
    """Consecutive rows.

    Attributes:
        first: index of the first row among all rows, from 0.
        table: the rows.
        faults: why a row cannot be read, such as too many fields, by its index. Such a row is empty in the table.
    """

    first: int
    table: Any
    faults: Mapping[int, str] = {}


@dataclass(frozen=True)
class RowSource:
    """A source of rows.

    Attributes:
        files: paths in reading order.
        schema: names and types of the columns.
        read: yields the rows in order: `read(columns, at_once, skip)`, with the column names, the maximum number of
            rows per batch (for a text file, a block), and the number of rows to skip.
        name: returns the name of a row that was read, from its index: a file, or a file and a row counted from 1
            without the header.
        rows: number of rows; None: unknown before reading.
        values: columns with the values of a model's single input, if known.
        labels: columns to copy to the output if the user names none.
        delimiter: delimiter of CSV files, if unusual.
    """

    files: Sequence[str]
    schema: Any
    read: Callable[..., Iterator[RowBatch]]
    name: Callable[[int], str]
    rows: int | None = None
    values: Sequence[str] = ()
    labels: Sequence[str] = ()
    delimiter: str | None = None


def read_places(
    count: int, read: Callable[[list[str], int, int], RowBatch]
) -> Callable[[Sequence[str], int, int], Iterator[RowBatch]]:
    """Returns a `RowSource.read` for rows that can be read by index with `read(columns, first, end)`."""

    def read_in_order(columns: Sequence[str], at_once: int, skip: int = 0) -> Iterator[RowBatch]:
        for first in range(skip, count, at_once):
            yield read(list(columns), first, min(first + at_once, count))

    return read_in_order


class FileRows:
    """The rows of several files, one file after the other.

    Args:
        counts: number of rows of each file; None: unknown.
        read: yields the rows of a file in pieces: `read(file, columns, at_once)`. Each piece comes with the faults of
            its malformed rows, by index in the piece.
    """

    def __init__(
        self,
        counts: Mapping[str, int | None],
        read: Callable[[str, Sequence[str], int], Iterator[tuple[Any, Mapping[int, str]]]],
    ) -> None:
        self._counts = counts
        self._read = read
        self._files = list(counts)
        self._firsts: list[int] = []

    def read(self, columns: Sequence[str], at_once: int, skip: int = 0) -> Iterator[RowBatch]:
        place = 0
        self._firsts = []
        for file, count in self._counts.items():
            self._firsts.append(place)
            if count is not None and place + count <= skip:
                place += count
                continue
            for table, malformed in self._read(file, columns, at_once):
                first = max(place, skip)
                end = place + len(table)
                if first < end:
                    faults = {place + row: fault for row, fault in malformed.items() if place + row >= first}
                    yield RowBatch(first, table.slice(first - place), faults)
                place = end

    def name(self, place: int) -> str:
        number = bisect_right(self._firsts, place) - 1
        return f"{self._files[number]}, row {place - self._firsts[number] + 1}"


def divide_rows(batches: Iterator[RowBatch], largest: int, shard_rows: int | None) -> Iterator[RowBatch]:
    """Divides rows into batches of at most `largest` rows. No batch spans two shards."""
    parts = list[Any]()
    faults = dict[int, str]()
    place = 0
    waiting = 0
    for batch in batches:
        place = place if waiting else batch.first
        parts.append(batch.table)
        faults |= batch.faults
        waiting += len(batch.table)
        size = limit_to_shard(place, largest, shard_rows)
        while waiting >= size:
            table = pyarrow.concat_tables(parts)
            end = place + size
            yield RowBatch(place, table.slice(0, size), {at: fault for at, fault in faults.items() if at < end})
            faults = {at: fault for at, fault in faults.items() if at >= end}
            parts = [table.slice(size)]
            place = end
            waiting -= size
            size = limit_to_shard(place, largest, shard_rows)
    if waiting:
        yield RowBatch(place, pyarrow.concat_tables(parts), faults)


def limit_to_shard(place: int, largest: int, shard_rows: int | None) -> int:
    """Returns how many rows from `place` on are one batch: at most `largest`, and no more than the shard has left."""
    if not shard_rows:
        return largest
    return min(largest, shard_rows - place % shard_rows)


def to_word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def to_words(value: Any) -> tuple[str, ...] | None:
    is_words = isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)
    return tuple(value) if is_words else None


#: Maximum number of columns that a message names.
MAX_NAMED = 20


def name_columns(names: Sequence[str], missing: str, others: Collection[str] = ()) -> str:
    """Returns the columns of a table as text, for a message about a `missing` one. Suggests a similar name."""
    similar = find_similar(missing, [name for name in names if name not in others])
    start = f"did you mean {similar}? The" if similar else "the"
    return f"{start} table has {format_columns(names)}"


def match_columns(state: LearnedState, schema: Any, selected: Sequence[str]) -> dict[str, list[str]]:
    """Returns the table's columns for each input of the model.

    An input with a name is read from the column of that name. An input without a name is read from several columns in
    order, one value each, or from one column of lists.

    Args:
        state: the run's learned state, with the model's inputs.
        schema: schema of the table.
        selected: columns that the user names, in the order of the model's values; empty: all except the training's
            target.

    Raises:
        ConfigError: if columns are missing, or have a type that the model cannot take.
    """
    inputs = name_leaves(state.inputs)
    if "" not in inputs:
        return match_named_columns(inputs, state, schema, selected)
    missing = [name for name in selected if name not in schema.names]
    if missing:
        raise ConfigError(
            f"--columns {format_columns(missing)}: there is no such column; {name_columns(schema.names, missing[0])}"
        )
    columns = list(selected) or [name for name in schema.names if name != state.reading.get("target")]
    described = inputs[""]
    takes_pictures = "" in state.pictures
    count = math.prod(described.shape)
    first = schema.field(columns[0]).type if len(columns) == 1 else None
    if first is not None and (is_list(first) or (takes_pictures and is_picture(first))):
        check_type(columns[0], first, described, takes_pictures=takes_pictures)
    elif len(columns) == count:
        for name in columns:
            check_type(name, schema.field(name).type, Inputs((), described.dtype))
    else:
        raise ConfigError(
            f"--input: the model takes {describe_in_words(described, takes_pictures)}: {count:,} column"
            f"{'s' if count != 1 else ''} with a value each, or one column of lists; the table has {len(columns)}: "
            f"{format_columns(columns)}; name those of the model, in its order, with --columns"
        )
    return {"": columns}


def match_named_columns(
    inputs: Mapping[str, Inputs], state: LearnedState, schema: Any, selected: Sequence[str]
) -> dict[str, list[str]]:
    """Returns the table's column for each input with a name. Raises ConfigError as `match_columns` does."""
    if selected:
        raise ConfigError(f"--columns: this model takes columns by name: {format_columns(list(inputs))}; leave it out")
    missing = [name for name in inputs if name not in schema.names]
    if missing:
        raise ConfigError(
            f"--input: there is no column {format_columns(missing)}, which the model takes; "
            f"{name_columns(schema.names, missing[0], others=inputs)}"
        )
    for name, described in inputs.items():
        check_type(name, schema.field(name).type, described, takes_pictures=name in state.pictures)
    return {name: [name] for name in inputs}


def describe_in_words(described: Inputs, takes_pictures: bool = False) -> str:
    """Describes an input in words, such as `an array of shape (8, 8, 1), float32`."""
    if takes_pictures:
        return "pictures (the bytes of JPEG, PNG, BMP or GIF files)"
    kind = "text" if described.dtype in ("object", "string") else described.dtype
    return f"an array of shape {described.shape}, {kind}" if described.shape else f"one value, {kind}"


def check_type(name: str, type_: Any, described: Inputs, takes_pictures: bool = False) -> None:
    """Raises ConfigError if a column's type cannot hold values of the input."""
    if takes_pictures and is_picture(type_):
        return
    inner = type_
    while is_list(inner):
        inner = inner.value_type
    if is_list(type_) and not described.shape:
        problem = "the model takes one value of each row"
    elif math.prod(described.shape) != 1 and not is_list(type_):
        problem = f"the model takes a list, {describe_in_words(described, takes_pictures)}"
    elif types.is_nested(inner) or types.is_binary(inner) or types.is_large_binary(inner):
        problem = "the model takes numbers, texts or dates"
    else:
        return
    raise ConfigError(f"--input: the column {name} has the type {type_}, and {problem}")


def is_picture(type_: Any) -> bool:
    """Returns whether a column can hold encoded pictures: as bytes, or as the structs of `datasets`."""
    if types.is_struct(type_):
        return bool(type_.get_field_index("bytes") >= 0)
    return bool(types.is_binary(type_) or types.is_large_binary(type_))


def is_list(type_: Any) -> bool:
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_))


def format_columns(names: Sequence[str]) -> str:
    return join_first(names, MAX_NAMED)


def drop_unfit_names(outputs: Outputs) -> Outputs:
    """Returns outputs without class names if these do not fit the shape or repeat."""
    count = 2 if outputs.kind == "binary" else outputs.shape[-1]
    names = outputs.names or ()
    return outputs if len(set(names)) == len(names) == count else replace(outputs, names=None)


#: Kinds of columns whose missing values the model replaces by learned ones.
FILLED = (NUMBER, DATE)


@dataclass(frozen=True)
class InputForm:
    """How rows become a model's inputs."""

    state: LearnedState  # the model's inputs, and how its run read the data
    columns: Mapping[str, Sequence[str]]  # columns of the rows, for each input

    @cached_property
    def readers(self) -> dict[str, ColumnReader]:
        """Readers of the columns that the run took for numbers, categories, texts or dates."""
        words = {}
        for name, preprocessing in self.state.preprocessing.items():
            words[name] = to_words(preprocessing.learned) or ()
        return make_readers(self.state.reading, words)

    def find_reader(self, column: str) -> ColumnReader:
        return self.readers.get(column) or ColumnReader(missing=to_words(self.state.reading.get("missing")))

    @cached_property
    def filled(self) -> dict[str, bool | None]:
        """Inputs whose missing values the model replaces, and whether training had such values; None: unknown."""
        filled: dict[str, bool | None] = {}
        for name, preprocessing in self.state.preprocessing.items():
            if not preprocessing.path.startswith("scaleflow."):  # own preprocessing may replace them
                filled[name] = None
            elif self.find_reader(name).kind in FILLED and isinstance(preprocessing.learned, dict):
                filled[name] = bool(preprocessing.learned.get("missing"))
        return filled

    @property
    def categories(self) -> list[str]:
        """Inputs that are categories."""
        return [name for name, reader in self.readers.items() if reader.kind == CATEGORY]

    @property
    def many_words(self) -> Collection[str]:
        """Inputs with a vocabulary cut to the most frequent words of training."""
        many_words = self.state.reading.get("many_words")
        return many_words if isinstance(many_words, dict) else ()
