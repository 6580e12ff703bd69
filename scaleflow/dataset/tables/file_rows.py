"""Rows of table files as the files have them, and a sample of them to learn from.

pyarrow is imported inside the functions, because only this dataset needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from scaleflow.dataset.batches.blocks import share_rows
from scaleflow.dataset.reading.division import find_strata, is_by_target, read_keys
from scaleflow.dataset.reading.files import ALL
from scaleflow.dataset.tables.files import TableFiles
from scaleflow.dataset.tables.kinds import SampleColumns, find_columns, find_targets
from scaleflow.dataset.tables.values import Form, convert_target
from scaleflow.errors import ConfigError
from scaleflow.interfaces import DivisionKeys, Outputs, Split
from scaleflow.serving.cells import Array, ColumnReader, is_missing

#: The sample has the first rows of at most this many blocks.
MAX_SAMPLED_BLOCKS = 32


@dataclass(frozen=True)
class RawSample:
    """The columns of the sampled rows."""

    columns: Mapping[str, Any]  # as `ColumnReader.clean` returns them
    targets: Sequence[Any]  # by block, the target as it is in the file


class FileRows:
    """The rows of the files of a split.

    Args:
        files: the files of all splits.
        group: the split whose files are read, or `all`.
        columns: the names of the used columns. The last one is the target.
        learn_on: the number of rows in the sample. None: all rows.

    Attributes:
        lengths: the number of rows of each block.
        paths: the file of each block.
        firsts: the index of the first row of each block, then the number of rows.
        malformed: messages about rows that cannot be divided into fields. No block has them.
        sampled: the indices of the rows in the sample, [n] int64.
    """

    def __init__(self, files: TableFiles, group: str, columns: Sequence[str], learn_on: int | None) -> None:
        self.files = files
        self.group = group
        self.columns = list(columns)
        self.target = self.columns[-1]
        self._learn_on = learn_on
        self._blocks = files.list_blocks(group, self.target)
        self.lengths: Sequence[int] = [block.rows for block in self._blocks]
        self.paths: Sequence[str] = [block.path for block in self._blocks]
        self.firsts = np.cumsum([0, *self.lengths])
        self.malformed: Sequence[str] = files.describe_malformed(group)
        self._sampled_blocks = self._choose_sample()
        self.sampled = np.concatenate([self.firsts[block] + np.arange(rows) for block, rows in self._sampled_blocks])
        self._reader = ColumnReader(missing=files.csv.missing)
        self._parsed: SampleColumns | None = None

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @property
    def is_whole_sampled(self) -> bool:
        """Whether the sample has all rows."""
        return len(self.sampled) == len(self)

    def _choose_sample(self) -> list[tuple[int, int]]:
        """Returns the blocks of the sample, spread evenly over the files, with the number of their rows in it."""
        filled = np.flatnonzero(self.lengths)
        if not len(filled):
            files = "the files" if self.group == ALL else f"the files of the split {self.group!r}"
            fault = f"; {self.malformed[0]}" if self.malformed else ""
            raise ConfigError(f"dataset.data_dir: {files} have no rows{fault}")
        wanted = len(self) if self._learn_on is None else min(self._learn_on, len(self))
        chosen = filled
        if wanted < len(self):
            blocks = MAX_SAMPLED_BLOCKS
            if self.files.is_text:  # a block is parsed from its beginning: fewer, whole blocks are read faster
                blocks_with_wanted = -(-wanted * len(filled) // len(self)) + 1
                blocks = min(blocks_with_wanted, MAX_SAMPLED_BLOCKS)
            places = np.linspace(0, len(filled) - 1, blocks).astype(int)
            chosen = filled[np.unique(places)]
        return list(share_rows(self.lengths, chosen, wanted).items())

    def recall(self, what: str, options: Any, learn: Callable[[], Any]) -> Any:
        """Returns the result of `learn`, which reads the sample, from the cache if an earlier run has learned it.

        Args:
            what: a word for the result.
            options: everything that the result depends on, except the rows.
            learn: returns values that JSON can hold.
        """
        files = self.files
        form = [files.form, str(files.used), files.partitions, self.columns, files.csv.missing, self._learn_on]
        return files.cache.recall(what, files.by_split[self.group], [form, options], learn=learn)

    @cached_property
    def _raw_sample(self) -> RawSample:
        import pyarrow

        targets: list[Any] = []
        chunks: dict[str, list[Any]] = {name: [] for name in self.columns}
        for block, rows in self._sampled_blocks:
            is_whole_block = rows == self.lengths[block]
            # Columns of a CSV file are read as strings here, whether it is known yet or not that they are numbers.
            table = self.files.read(self._blocks[block], self.columns, None if is_whole_block else rows)
            targets.append(table[self.target])
            for name in self.columns:
                chunks[name] += self._reader.clean(table[name]).chunks
        columns = {name: pyarrow.chunked_array(parts) for name, parts in chunks.items()}
        return RawSample(columns, targets)

    @property
    def raw_columns(self) -> Mapping[str, Any]:
        """The sample as it is in the files. It is read at the first use."""
        return self._raw_sample.columns

    def parse_sample(self, forms: Mapping[str, Form]) -> SampleColumns:
        """Returns the sample with the numbers and dates of all columns in the one form.

        The last result is kept.

        Args:
            forms: by column, how its numbers or dates are written.
        """
        if self._parsed is None or self._parsed.forms != forms:
            columns: dict[str, Any] = {}
            for name, column in self.raw_columns.items():
                columns[name] = ColumnReader(written=forms.get(name)).rewrite(column)
            self._parsed = SampleColumns(
                columns,
                self._name_sample_row,
                forms=forms,
                missing_words=self.count_missing_words(),
                classes=self._targets[1],
            )
        return self._parsed

    def _name_sample_row(self, row: int) -> str:
        return self.name(int(self.sampled[row]))

    def describe_sample(self) -> Iterator[str]:
        """Yields a line with the size of the sample, unless it has all rows."""
        learned = len(self.sampled)
        if not self.is_whole_sampled:
            yield (
                f"dataset.learn_on={learned}: types, means and words are learned from {learned:,} of the "
                f"{len(self):,} rows"
            )

    @property
    def has_target(self) -> Array:
        """Which rows have a target, [n] bool."""
        return self._targets[0]

    @cached_property
    def _targets(self) -> tuple[Array, list[str] | None]:
        """Which rows have a target, [n] bool, and the classes of the rows outside of the sample.

        The classes are None if there are too many different values.
        """
        files = self.files
        if self.is_whole_sampled:
            return ~is_missing(self.raw_columns[self.target]), []

        def learn() -> Any:
            return find_targets(self._read_targets())

        form = [files.form, str(files.used.field(self.target)), files.partitions, files.csv.missing]
        absent, classes = files.cache.recall("rows", files.by_split[self.group], form, learn=learn)
        has_target = np.ones(len(self), bool)
        has_target[absent] = False
        return has_target, classes

    def _read_targets(self) -> Iterator[Any]:
        """Yields the target of each block, as `ColumnReader.clean` returns it."""
        for block in self._blocks:
            table = self.files.read(block, [self.target])
            yield self._reader.clean(table[self.target])

    def count_missing_words(self) -> dict[str, int]:
        """Returns how often the target has each word of `dataset.missing` in the sample."""
        import pyarrow
        from pyarrow import compute, types

        missing = pyarrow.array(self.files.csv.missing)
        counts: Counter[str] = Counter()
        for column in self._raw_sample.targets:
            if types.is_string(column.type):
                words = column.filter(compute.is_in(column, value_set=missing))
                counts.update(word for word in words.to_pylist() if word)
        return dict(counts)

    def count_other_units(self, forms: Mapping[str, Form]) -> dict[str, dict[str, int]]:
        """Counts the numbers of all rows that have another unit than their column.

        Returns:
            The counts by column and unit, without columns that have no such numbers.
        """
        readers: dict[str, ColumnReader] = {}
        for name in self.columns:
            form = forms.get(name, {})
            if form.get("unit"):
                readers[name] = ColumnReader(written=form)
        if not readers:
            return {}

        def learn() -> dict[str, Counter[str]]:
            counts = {name: Counter[str]() for name in readers}
            if self.is_whole_sampled:
                for name, reader in readers.items():
                    counts[name] += reader.count_other_units(self.raw_columns[name])
                return counts
            for block in self._blocks:
                table = self.files.read(block, list(readers))
                for name, reader in readers.items():
                    counts[name] += reader.count_other_units(self._reader.clean(table[name]))
            return counts

        counts_by_name = self.recall("types", ["units", {name: forms[name] for name in readers}], learn)
        return {name: counts for name, counts in counts_by_name.items() if counts}

    def read(self, block: int, rows: int | None, numbers: Sequence[str]) -> dict[str, Any]:
        """Returns the used columns of the first rows of a block, or of all of them, as `ColumnReader.clean` does.

        Args:
            block: its number.
            rows: how many rows are read. None: all.
            numbers: columns that a CSV file is expected to have as numbers.
        """
        table = self.files.read(self._blocks[block], self.columns, rows, numbers=numbers)
        return {name: self._reader.clean(table[name]) for name in self.columns}

    def name(self, row: int) -> str:
        """Names a row by its file. The first row of a file is row 1, and a header does not count."""
        paths, numbers = self.locate(np.array([row]))
        return f"{paths[0]}, row {numbers[0]}"

    def locate(self, rows: Array) -> tuple[list[str], Array]:
        """Returns the file of each row, and its number in the file, as `name` counts: [n]."""
        begins_file = np.ones(len(self.paths), bool)
        for block in range(1, len(self.paths)):
            begins_file[block] = self.paths[block] != self.paths[block - 1]
        first_of_file = np.maximum.accumulate(np.where(begins_file, self.firsts[:-1], 0))  # for each block
        blocks = self._find_blocks(rows)
        numbers = rows - first_of_file[blocks]
        paths, file_of_block = np.unique(np.array(self.paths, object), return_inverse=True)
        file_of_row = file_of_block[blocks]
        for file in np.unique(file_of_row):
            is_in_file = file_of_row == file
            numbers[is_in_file] = self.files.number_rows(paths[file], numbers[is_in_file])
        return paths[file_of_row].tolist(), numbers

    def _find_blocks(self, rows: Array) -> Array:
        """Returns the number of the block that each row is in: [n]."""
        return np.searchsorted(self.firsts, rows, side="right") - 1

    def open_columns(self, names: Sequence[str], key: str) -> Callable[[Array], dict[str, Any]]:
        """Returns a function that reads columns of ascending rows, [n] int64. The columns need not be inputs.

        Raises:
            ConfigError: if a file lacks a column. The message begins with `key`.
        """
        import pyarrow

        find_columns(names, self.files.names, key)
        files = replace(self.files)
        files.use(names)

        def read(rows: Array) -> dict[str, Any]:
            blocks = self._find_blocks(rows)
            parts: list[Any] = []
            for block in np.unique(blocks):
                places = rows[blocks == block] - self.firsts[block]
                table = files.read(self._blocks[block], names, int(places[-1]) + 1)
                parts.append(table.take(pyarrow.array(places)))
            whole = pyarrow.concat_tables(parts)
            return {name: self._reader.clean(whole[name]) for name in names}

        return read

    def read_keys(self, rule: Split, forms: Mapping[str, Form], outputs: Outputs) -> DivisionKeys:
        """Reads the values that `rule` uses to divide the rows."""
        all_rows = np.arange(len(self))

        def read(name: str) -> Any:
            column = self.open_columns([name], "dataset.split.column")(all_rows)[name]
            return ColumnReader(written=forms.get(name)).rewrite(column) if rule.by == "time" else column

        keys = read_keys(rule, read, self.name)
        is_one_class_sampled = self.is_whole_sampled and outputs.is_one_class
        if not (is_by_target(rule) or (rule.by == "auto" and is_one_class_sampled)):
            return keys
        column = self.raw_columns[self.target] if self.is_whole_sampled else read(self.target)
        targets = ColumnReader(written=forms.get(self.target)).rewrite(column)
        values = np.ravel(convert_target(targets, outputs)[0])
        strata = np.zeros(len(self), np.int64)
        strata[self.has_target] = find_strata(values[self.has_target], outputs)
        return replace(keys, strata=strata)
