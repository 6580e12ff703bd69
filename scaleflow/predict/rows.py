"""Rows of files, in batches that know their places. No TensorFlow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow

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
