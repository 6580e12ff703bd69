"""Reads the rows of a table of any size from files with pyarrow, without TensorFlow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import pyarrow

from scaleflow.dataset.reading.files import ALL, match_files
from scaleflow.dataset.reading.learned_cache import LearnedCache
from scaleflow.dataset.reading.object_store import list_in_store
from scaleflow.dataset.tables.files import TableFiles, prepare_tables
from scaleflow.errors import ConfigError, RunError
from scaleflow.files.object_store import is_store_address
from scaleflow.files.table_formats import CsvForm, explain_arrow_error, find_format
from scaleflow.predict.reading import Reading

T = TypeVar("T")


@dataclass(frozen=True)
class FileRows:
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

    def slice(self, start: int, count: int | None = None) -> FileRows:
        table = self.table.slice(start, count)
        malformed = {row - start: reason for row, reason in self.malformed.items() if 0 <= row - start < len(table)}
        return FileRows(self.path, self.first + start, table, malformed, self.files[start : start + len(table)])


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

    def read(self, columns: Sequence[str], at_once: int, skip: int = 0) -> Iterator[FileRows]:
        """Yields the rows in order, at most `at_once` in one piece, without the first `skip`."""


@dataclass(frozen=True)
class TableSource:
    """The files of a table.

    Attributes:
        table: the files, as a dataset opens them.
    """

    table: TableFiles
    values: ClassVar[Sequence[str]] = ()
    labels: ClassVar[Sequence[str]] = ()

    @property
    def files(self) -> Sequence[str]:
        return self.table.by_split[ALL]

    @property
    def schema(self) -> Any:
        return self.table.used

    @property
    def form(self) -> CsvForm:
        return self.table.csv

    def count_rows(self) -> int | None:
        """Returns the number of rows if the files store it, else None."""
        counts = [self.table.count_rows(path) for path in self.files]
        return None if None in counts else sum(filter(None, counts))

    def read(self, columns: Sequence[str], at_once: int, skip: int = 0) -> Iterator[FileRows]:
        """Yields the rows in order, without the first `skip`. Raises RunError if a file cannot be read.

        Args:
            columns: the columns to read.
            at_once: the most rows of a piece of a Parquet file; of other files, a block is one.
            skip: the number of rows to leave out.
        """
        for path in self.files:
            if skip and (count := self.table.count_rows(path)) is not None and skip >= count:
                skip -= count
                continue
            first = 0
            try:
                for part, malformed in self.table.read_in_order(path, columns, at_once):
                    if len(part) > skip:
                        yield FileRows(path, first, part, malformed).slice(skip)
                    first, skip = first + len(part), max(0, skip - len(part))
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                raise RunError(f"{path}: cannot be read after row {first}: {explain_arrow_error(error)}") from error
            except ConfigError as error:
                raise RunError(f"{path}: cannot be read after row {first}: {error}") from error


def open_table(
    path: str, delimiter: str | None = None, reading: Reading | None = None, inputs: Collection[str] = ()
) -> TableSource:
    """Finds the files of a table and reads the names of their columns.

    Args:
        path: a file, a glob, or a folder with files of one format; also addresses in an object store. The names of
            subfolders may be columns, such as `year=2024`.
        delimiter: between the fields of a CSV file; None: that of the run.
        reading: how the run read its own files; a delimiter that is a comma also means a tab in `.tsv` files.
        inputs: the names of the model's inputs, by which a header line is recognised.

    Raises:
        ConfigError: if there is no such file, a file cannot be read, or formats or columns differ.
    """
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii()):
        raise ConfigError(f"--delimiter {delimiter!r}: expected one character, such as ';'")
    files, form, target = list_input_files(path), CsvForm(), None
    if find_format(files[0], "--input") != "csv":
        if delimiter is not None:
            raise ConfigError(f"--delimiter {delimiter}: {files[0]} is no CSV file; leave it out")
    elif reading is not None:
        usual, target = reading.form.delimiter, reading.target
        form = replace(reading.form, delimiter=delimiter or (usual if usual != "," else None))
    else:
        form = CsvForm(delimiter)
    table = prepare_tables({ALL: [*files]}, path, form, LearnedCache(None, path), "--input")
    if table.csv.header:
        table.csv = replace(table.csv, header=find_header(table, inputs, target))
    table.name_columns([table.read_schema(file) for file in files])
    first, *others = table.schemas
    for other in others:
        if differing := sorted(set(table.schemas[other].names) ^ set(table.names)):
            raise ConfigError(
                f"--input {path}: {other} and {first} have different columns: {', '.join(differing)} is in one of them "
                "only"
            )
    table.use(table.names)
    return TableSource(table)


def find_header(table: TableFiles, inputs: Collection[str], target: str | None) -> tuple[str, ...]:
    """Returns the names of the columns of CSV files without a header line: all, all but the target, or the inputs.

    Empty if the first file has a header line. Raises ConfigError if the number of the fields is another one.
    """
    header, file = table.csv.header, table.by_split[ALL][0]
    fields = replace(table, csv=replace(table.csv, header=())).read_schema(file).names
    if set(inputs or header) <= set(fields):
        return ()
    without_target, only_inputs = ([n for n in header if n != target], [n for n in header if n in inputs])
    for names in (header, without_target, only_inputs):
        if len(names) == len(fields):
            return tuple(names)
    raise ConfigError(
        f"--input {file}: its rows have {len(fields)} fields, and the run's dataset.header names {len(header)}: "
        f"{', '.join(header)}; write a header line with the names"
    )


def list_input_files(path: str) -> Sequence[str]:
    """Returns the sorted files. In a folder, names that begin with `.` or `_` are left out."""
    if is_store_address(path):
        scheme = path.partition("://")[0]
        return [f"{scheme}://{name}" for name in list_in_store("--input", path)[1] if "/_" not in name]
    found = match_files(path, f"--input {path}")
    if found is None:
        files = (file for file in Path(path).rglob("*") if file.is_file())
        found = sorted(str(file) for file in files if not any(p[0] in "._" for p in file.relative_to(path).parts))
    if not found:
        raise ConfigError(f"--input {path}: the folder has no files")
    return found


def take_chunks(
    rows: Iterator[FileRows], places: Iterator[tuple[T, int]]
) -> Iterator[tuple[tuple[T, int], list[FileRows]]]:
    """Divides rows into chunks, and yields each with its place: (anything, number of rows). The last may have fewer."""
    chunk: list[FileRows] = []
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


def name_row(chunk: Sequence[FileRows], row: int) -> str:
    """Names a row of a chunk by its file; the first row of a file is row 1, and a header does not count."""
    for piece in chunk:
        if row < len(piece.table):
            if piece.files:
                return piece.files[row]
            return f"{piece.path}, row {piece.first + row + 1}"
        row -= len(piece.table)
    raise IndexError(row)
