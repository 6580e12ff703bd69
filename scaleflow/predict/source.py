"""Reads the rows of a table of any size from files with pyarrow, without TensorFlow."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
from pyarrow import csv, dataset

from scaleflow.errors import ConfigError, RunError
from scaleflow.table_formats import find_format

#: Formats that store the number of rows.
COUNTED = ("parquet", "feather")

#: Bytes of a CSV file that are read at once; a row has to fit.
CSV_BYTES = 1 << 23

T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """Some rows of a file: `table` begins with row `first` of `path`, counted from 0."""

    path: str
    first: int
    table: Any


@dataclass(frozen=True)
class TableSource:
    """Files with the same columns.

    Attributes:
        files: their paths, in the order in which they are read.
        format: pyarrow's name of their format.
        schema: names and types of the columns. Those of CSV files are strings.
        fragments: pyarrow's readers of the files; empty for CSV files.
        delimiter: between the fields of a CSV file; None: a tab in `.tsv` files, a comma in others.
    """

    files: tuple[str, ...]
    format: str
    schema: Any
    fragments: tuple[Any, ...] = ()
    delimiter: str | None = None

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
                for batch in self._read_file(index, columns, at_once):
                    if len(batch) > skip:
                        yield Rows(path, first + skip, pyarrow.Table.from_batches([batch.slice(skip)]))
                    first, skip = first + len(batch), max(0, skip - len(batch))
            except (pyarrow.ArrowException, OSError) as error:
                raise RunError(f"{path}: cannot be read after row {first}: {explain(error)}") from error

    def _read_file(self, index: int, columns: Sequence[str], at_once: int) -> Iterator[Any]:
        if self.format != "csv":
            yield from self.fragments[index].to_batches(
                schema=self.schema,
                columns=list(columns),
                batch_size=at_once,
                batch_readahead=2,
                fragment_readahead=1,
            )
            return
        texts = csv.ConvertOptions(
            include_columns=list(columns), column_types=dict.fromkeys(self.schema.names, pyarrow.string())
        )
        with csv.open_csv(
            self.files[index],
            csv.ReadOptions(block_size=CSV_BYTES),
            parse_options(self.files[index], self.delimiter),
            texts,
        ) as reader:
            yield from reader


def open_table(path: str, delimiter: str | None = None, usual: str = ",") -> TableSource:
    """Finds the files of a table and reads the names of their columns.

    Args:
        path: a file, a glob, or a folder with files of one format. The names of its subfolders may be columns, such as
            `year=2024`, except for CSV files.
        delimiter: between the fields of a CSV file; None: `usual`.
        usual: the delimiter that the model was trained with; a comma also means a tab in `.tsv` files.

    Raises:
        ConfigError: if there is no such file, a file cannot be read, or formats or columns differ.
    """
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii()):
        raise ConfigError(f"--delimiter {delimiter!r}: expected one character, such as ';'")
    files = find_files(path)
    form = find_format(files[0], "--input")
    for other in files[1:]:
        if find_format(other, "--input") != form:
            raise ConfigError(f"--input {path}: {other} and {files[0]} have different formats; use one of them")
    if delimiter is not None and form != "csv":
        raise ConfigError(f"--delimiter {delimiter}: {files[0]} is no CSV file; leave it out")
    if form == "csv":
        delimiter = delimiter or (usual if usual != "," else None)
        headers = [read_header(file, delimiter) for file in files]
        schema = pyarrow.schema([(name, pyarrow.string()) for name in headers[0]])
        source = TableSource(files, form, schema, (), delimiter)
    else:
        source, headers = open_dataset(path, files, form)
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


def read_header(file: str, delimiter: str | None) -> list[str]:
    """Returns the names of the columns of a CSV file."""
    with refuse_unreadable(file), csv.open_csv(file, parse_options=parse_options(file, delimiter)) as reader:
        return list(reader.schema.names)


def open_dataset(path: str, files: Sequence[str], form: str) -> tuple[TableSource, list[list[str]]]:
    """Opens files that are not CSV files. Returns the table, and the names of the columns that each file has."""
    with refuse_unreadable(path):
        is_folder = Path(path).is_dir()
        whole = dataset.dataset(
            path if is_folder else list(files), format=form, partitioning="hive" if is_folder else None
        )
        fragments = tuple(sorted(whole.get_fragments(), key=lambda each: each.path))
    headers = []
    for fragment in fragments:
        with refuse_unreadable(fragment.path):
            headers.append(list(fragment.physical_schema.names))
    return TableSource(tuple(each.path for each in fragments), form, whole.schema, fragments), headers


@contextlib.contextmanager
def refuse_unreadable(path: str) -> Iterator[None]:
    """Raises pyarrow's errors as ConfigError."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"--input {path}: cannot be read: {explain(error)}") from error


def find_files(path: str) -> tuple[str, ...]:
    """Returns the sorted files. In a folder, names that begin with `.` or `_` are left out."""
    if Path(path).is_file():
        return (path,)
    if Path(path).is_dir():
        found = [
            str(file)
            for file in Path(path).rglob("*")
            if file.is_file() and not any(part[0] in "._" for part in file.relative_to(path).parts)
        ]
        if not found:
            raise ConfigError(f"--input {path}: the folder has no files")
    elif glob.has_magic(path):
        found = [name for name in glob.glob(path, recursive=True) if Path(name).is_file()]  # noqa: PTH207
        if not found:
            raise ConfigError(f"--input {path}: no file matches it")
    else:
        raise ConfigError(f"--input {path}: there is no such file or folder")
    return tuple(sorted(found))


def parse_options(path: str, delimiter: str | None) -> Any:
    used = delimiter or ("\t" if ".tsv" in Path(path).name.lower() else ",")
    return csv.ParseOptions(delimiter=used, newlines_in_values=True)


def explain(error: Exception) -> str:
    """Returns the first line of pyarrow's reason."""
    return str(error).strip().partition("\n")[0] or "pyarrow gives no reason"


def take_chunks(rows: Iterator[Rows], places: Iterator[tuple[T, int]]) -> Iterator[tuple[tuple[T, int], list[Rows]]]:
    """Divides rows into chunks, and yields each with its place: (anything, number of rows). The last may have fewer."""
    chunk: list[Rows] = []
    place, missing = next_place(places)
    for piece in rows:
        start = 0
        while start < len(piece.table):
            taken = piece.table.slice(start, missing)
            chunk.append(Rows(piece.path, piece.first + start, taken))
            start, missing = start + len(taken), missing - len(taken)
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
            return f"{piece.path}, row {piece.first + row + 1}"
        row -= len(piece.table)
    raise IndexError(row)
