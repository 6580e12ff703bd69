"""Reads the rows of a table of any size from files with pyarrow, without TensorFlow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import pyarrow
from pyarrow import csv, dataset

from scaleflow.dataset.reading.files import ALL, match_files
from scaleflow.dataset.reading.learned_cache import LearnedCache
from scaleflow.dataset.tables.files import TableFiles, unify_types
from scaleflow.errors import ConfigError, RunError
from scaleflow.files.table_formats import CsvForm, explain_arrow_error, find_format, refuse_unreadable_file
from scaleflow.predict.reading import Reading

#: Formats that store the number of rows.
COUNTED = ("parquet", "feather")

#: Bytes of a CSV file that are read at once; a row has to fit.
CSV_BYTES = 1 << 23

T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """Some rows of a file.

    Attributes:
        path: of the file.
        first: the number of the first row in it, counted from 0.
        table: the rows.
        malformed: the rows, counted from 0, that cannot be read, as those with too few or too many fields: what is
            wrong with each. They are empty in the table.
        files: the file of each row, if each row is a whole file.
    """

    path: str
    first: int
    table: Any
    malformed: Mapping[int, str] = field(default_factory=dict)
    files: Sequence[str] = ()

    def slice(self, start: int, count: int | None = None) -> Rows:
        table = self.table.slice(start, count)
        malformed = {row - start: reason for row, reason in self.malformed.items() if 0 <= row - start < len(table)}
        return Rows(self.path, self.first + start, table, malformed, self.files[start : start + len(table)])


class RowSource(Protocol):
    """Where the rows come from: `TableSource`, and those of `predict/inputs.py`.

    Attributes:
        files: their paths, in the order in which they are read.
        schema: names and types of the columns.
        form: of CSV files.
        values: the columns that have the values of a model's single input, if that is known.
        labels: the columns that are copied to the output, unless the user names some.
    """

    @property
    def files(self) -> Sequence[str]: ...
    @property
    def schema(self) -> Any: ...
    @property
    def form(self) -> CsvForm: ...
    @property
    def values(self) -> Sequence[str]: ...
    @property
    def labels(self) -> Sequence[str]: ...

    def count_rows(self) -> int | None:
        """Returns the number of rows, if it is known without reading them."""

    def read(self, columns: Sequence[str], at_once: int, skip: int = 0) -> Iterator[Rows]:
        """Yields the rows in order, at most `at_once` in one piece, without the first `skip`."""


@dataclass(frozen=True)
class TableSource:
    """Files with the same columns.

    Attributes:
        files: their paths, in the order in which they are read.
        format: pyarrow's name of their format.
        schema: names and types of the columns. Those of CSV files are strings.
        fragments: pyarrow's readers of the files; empty for CSV files.
        form: of CSV files.
        names: the names of the columns of the CSV files that have no header line, by path.
    """

    files: tuple[str, ...]
    format: str
    schema: Any
    fragments: tuple[Any, ...] = ()
    form: CsvForm = field(default_factory=CsvForm)
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    values: ClassVar[Sequence[str]] = ()
    labels: ClassVar[Sequence[str]] = ()

    def count_rows(self) -> int | None:
        """Returns the number of rows if the files store it, else None."""
        return sum(part.count_rows() for part in self.fragments) if self.format in COUNTED else None

    def read(self, columns: Sequence[str], at_once: int, skip: int = 0) -> Iterator[Rows]:
        """Yields the rows in order, without the first `skip`. Raises RunError if a file cannot be read.

        Args:
            columns: the columns to read.
            at_once: the most rows that are read from a file in one piece; of CSV files, 8 MiB are.
            skip: the number of rows to leave out.
        """
        for index, path in enumerate(self.files):
            if self.format in COUNTED and skip >= (count := self.fragments[index].count_rows()):
                skip -= count
                continue
            first = 0
            try:
                for batch, malformed in self._read_file(index, columns, at_once):
                    if len(batch) > skip:
                        yield Rows(path, first, batch, malformed).slice(skip)
                    first, skip = first + len(batch), max(0, skip - len(batch))
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                raise RunError(f"{path}: cannot be read after row {first}: {explain_arrow_error(error)}") from error

    def _read_file(self, index: int, columns: Sequence[str], at_once: int) -> Iterator[tuple[Any, dict[int, str]]]:
        if self.format == "csv":
            yield from self._read_csv(self.files[index], columns)
            return
        if self.format == "json":  # pyarrow's dataset takes the types of the first lines for those of all
            for table in open_json_lines(self.files, self.schema).read_json_lines(self.files[index], columns):
                for first in range(0, len(table), at_once):
                    yield table.slice(first, at_once), {}
            return
        for batch in self.fragments[index].to_batches(
            schema=self.schema,
            columns=list(columns),
            batch_size=at_once,
            batch_readahead=2,
            fragment_readahead=1,
        ):
            yield pyarrow.Table.from_batches([batch]), {}

    def _read_csv(self, path: str, columns: Sequence[str]) -> Iterator[tuple[Any, dict[int, str]]]:
        """Yields the rows of a file in pieces, with those that are malformed."""
        names = self.names.get(path)
        types = dict.fromkeys(self.schema.names, pyarrow.string())
        malformed: dict[int, str] = {}

        def note(number: int, reason: str) -> None:
            malformed[number - 1 - (names is None)] = reason

        first = 0
        read = csv.ReadOptions(  # with threads, rows have no numbers
            block_size=CSV_BYTES,
            column_names=names,
            encoding=self.form.encoding,
            use_threads=False,
            skip_rows=int(self.form.has_separator_line),
        )
        convert = csv.ConvertOptions(include_columns=list(columns), column_types=types)
        with csv.open_csv(path, read, self.form.parse_options(path, note), convert) as reader:
            empty = reader.schema.empty_table()
            for batch in reader:
                table, found = insert_malformed(pyarrow.Table.from_batches([batch]), first, malformed)
                yield table, found
                first += len(table)
        yield insert_malformed(empty, first, malformed)


def insert_malformed(table: Any, first: int, malformed: dict[int, str]) -> tuple[Any, dict[int, str]]:
    """Inserts an empty row in place of each malformed one.

    Args:
        table: rows of a file, from row `first` on, without the malformed ones.
        first: counted from 0.
        malformed: rows of the file, counted from 0; those that are inserted are removed.

    Returns:
        The table, and the malformed rows in it, counted from its first.
    """
    found: dict[int, str] = {}
    while malformed and (row := min(malformed)) <= first + len(table) + len(found):
        found[row - first] = malformed.pop(row)
    if not found:
        return table, found
    is_malformed = np.zeros(len(table) + len(found), bool)
    is_malformed[list(found)] = True
    places = np.cumsum(~is_malformed) - 1
    return table.take(pyarrow.array(places, mask=is_malformed)), found


def open_table(
    path: str, delimiter: str | None = None, reading: Reading | None = None, inputs: Collection[str] = ()
) -> TableSource:
    """Finds the files of a table and reads the names of their columns.

    Args:
        path: a file, a glob, or a folder with files of one format. The names of its subfolders may be columns, such as
            `year=2024`, except for CSV files.
        delimiter: between the fields of a CSV file; None: that of the run.
        reading: how the run read its own files; a delimiter that is a comma also means a tab in `.tsv` files.
        inputs: the names of the model's inputs, by which a header line is recognised.

    Raises:
        ConfigError: if there is no such file, a file cannot be read, or formats or columns differ.
    """
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii()):
        raise ConfigError(f"--delimiter {delimiter!r}: expected one character, such as ';'")
    files = list_input_files(path)
    form = find_format(files[0], "--input")
    for other in files[1:]:
        if find_format(other, "--input") != form:
            raise ConfigError(f"--input {path}: {other} and {files[0]} have different formats; use one of them")
    if delimiter is not None and form != "csv":
        raise ConfigError(f"--delimiter {delimiter}: {files[0]} is no CSV file; leave it out")
    source, headers = (
        open_csv_files(files, delimiter, reading or Reading(), inputs)
        if form == "csv"
        else open_dataset(path, files, form)
    )
    for other, names in zip(source.files, headers, strict=True):
        if sorted(names) != sorted(headers[0]):
            raise ConfigError(
                f"--input {path}: {other} and {source.files[0]} have different columns: "
                f"{', '.join(sorted(set(names) ^ set(headers[0])))} is in one of them only"
            )
    names = source.schema.names
    if duplicate := next((name for n, name in enumerate(names) if name in names[:n]), None):
        raise ConfigError(f"--input {path}: two columns have the name {duplicate!r}; rename one of them")
    return source


def open_csv_files(
    files: Sequence[str], delimiter: str | None, reading: Reading, inputs: Collection[str]
) -> tuple[TableSource, list[list[str]]]:
    """Opens CSV files. Returns the table, and the names of the columns that each file has."""
    usual = reading.form.delimiter
    form = replace(reading.form, delimiter=delimiter or (usual if usual != "," else None))
    form.check(files[0], "csv")
    with refuse_unreadable_file(f"--input {files[0]}:"), pyarrow.input_stream(files[0]) as stream:
        form = form.recognise(stream, files[0])
    headers, given = [], {}
    for file in files:
        names = read_first_row(file, form)
        if form.header and not set(inputs or form.header) <= set(names):
            names = given[file] = name_fields(file, len(names), form.header, reading.target)
        headers.append(names)
    schema = pyarrow.schema([(name, pyarrow.string()) for name in headers[0]])
    return TableSource(tuple(files), "csv", schema, (), form, given), headers


def read_first_row(file: str, form: CsvForm) -> list[str]:
    """Returns the fields of the first row of a CSV file."""
    with refuse_unreadable_file(f"--input {file}:"), pyarrow.input_stream(file) as stream:
        return form.read_first_fields(stream, file)


def name_fields(file: str, count: int, header: Sequence[str], target: str | None) -> list[str]:
    """Returns the names of the columns of a CSV file without a header line; the target may be left out of it.

    Raises ConfigError if their number is another one.
    """
    without_target = [name for name in header if name != target]
    for names in (list(header), without_target):
        if len(names) == count:
            return names
    raise ConfigError(
        f"--input {file}: its rows have {count} fields, and the run's dataset.header names {len(header)}: "
        f"{', '.join(header)}; write a header line with the names"
    )


def open_dataset(path: str, files: Sequence[str], form: str) -> tuple[TableSource, list[list[str]]]:
    """Opens files that are not CSV files. Returns the table, and the names of the columns that each file has."""
    with refuse_unreadable_file(f"--input {path}:"):
        is_folder = Path(path).is_dir()
        whole = dataset.dataset(
            path if is_folder else list(files), format=form, partitioning="hive" if is_folder else None
        )
        fragments = tuple(sorted(whole.get_fragments(), key=lambda each: each.path))
    headers, schema = [], whole.schema
    for fragment in fragments:
        with refuse_unreadable_file(f"--input {fragment.path}:"):
            found = fragment.physical_schema
            if form == "json":
                found = open_json_lines([fragment.path]).read_schema(fragment.path)
                schema = found if fragment is fragments[0] else unify_types(schema, found, form)
            headers.append(list(found.names))
    return TableSource(tuple(each.path for each in fragments), form, schema, fragments), headers


def open_json_lines(files: Sequence[str], schema: Any = None) -> TableFiles:
    return TableFiles({ALL: list(files)}, "json", CsvForm(), LearnedCache(None, ""), used=schema)


def list_input_files(path: str) -> Sequence[str]:
    """Returns the sorted files. In a folder, names that begin with `.` or `_` are left out."""
    found = match_files(path, f"--input {path}")
    if found is None:
        files = (file for file in Path(path).rglob("*") if file.is_file())
        found = sorted(str(file) for file in files if not any(p[0] in "._" for p in file.relative_to(path).parts))
    if not found:
        raise ConfigError(f"--input {path}: the folder has no files")
    return found


def take_chunks(rows: Iterator[Rows], places: Iterator[tuple[T, int]]) -> Iterator[tuple[tuple[T, int], list[Rows]]]:
    """Divides rows into chunks, and yields each with its place: (anything, number of rows). The last may have fewer."""
    chunk: list[Rows] = []
    place, missing = next_place(places)
    for piece in rows:
        start = 0
        while start < len(piece.table):
            taken = piece.slice(start, missing)
            chunk.append(taken)
            start, missing = start + len(taken.table), missing - len(taken.table)
            if not missing:
                yield place, chunk
                chunk, (place, missing) = [], next_place(places)
    if chunk:
        yield place, chunk


def next_place(places: Iterator[tuple[T, int]]) -> tuple[tuple[T, int], int]:
    place = next(places)
    return place, place[1]


def name_row(chunk: Sequence[Rows], row: int) -> str:
    """Names a row of a chunk by its file; the first row of a file is row 1, and a header does not count."""
    for piece in chunk:
        if row < len(piece.table):
            if piece.files:
                return piece.files[row]
            return f"{piece.path}, row {piece.first + row + 1}"
        row -= len(piece.table)
    raise IndexError(row)
