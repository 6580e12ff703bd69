"""Reads tables from files with pyarrow, in blocks: CSV, TSV, Parquet, Feather, Arrow and JSON lines.

A block is a row group of a Parquet file, a record batch of a Feather file, or about `TEXT_BLOCK` bytes of a text file.
pyarrow is imported inside the functions, because only this dataset needs it.
"""

from __future__ import annotations

import base64
import contextlib
import glob
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from scaleflow.dataset.reading.files import expand_data_dir, find_files, find_in_store, open_in_store
from scaleflow.dataset.reading.learned_cache import LearnedCache
from scaleflow.errors import ConfigError
from scaleflow.files.object_store import is_store_address
from scaleflow.files.table_formats import FORMATS, CsvForm, explain_arrow_error, find_format, refuse_unreadable_file

#: Suffixes of compressed text files, which are read as a whole.
COMPRESSED = (".gz", ".zst", ".bz2", ".lz4")

#: The name of a folder's value that means a missing one.
MISSING_PARTITION = "__HIVE_DEFAULT_PARTITION__"

#: The metadata of the schema of a CSV file without a header line.
NO_HEADER = {b"header": b"none"}

#: Bytes of a block of a text file.
TEXT_BLOCK = 4 << 20

#: Bytes that are parsed at once of a block of which only the first rows are needed.
PARSED_AT_ONCE = 128 << 10

#: The key that names the files of a run.
DATA_DIR = "dataset.data_dir"


class Block(NamedTuple):
    """A part of a file.

    Attributes:
        path: of the file.
        place: the number of the row group or record batch, or (first byte, end) of a text file.
        rows: the number of rows.
    """

    path: str
    place: Any
    rows: int


@dataclass
class TableFiles:
    """Files with the same columns.

    Attributes:
        by_split: the files of each split, or all of them as `all`.
        format: the name of their format.
        csv: the form of CSV files.
        cache: what earlier runs have learned of the files.
        schemas: the names of the columns of each file, and their types; in a CSV file these are strings.
        used: the names and the types of the used columns, which all files have.
        partitions: the columns that the names of a file's folders give, such as `year=2024`, with their values; by
            file. In the file's schema they are the last columns.
        malformed: the rows with too few or too many fields, which are left out, counted from 0 among all rows of the
            file, and what is wrong with each; by file.
        key: what names the files, in messages.
    """

    by_split: dict[str, list[str]]
    format: str
    csv: CsvForm
    cache: LearnedCache
    schemas: dict[str, Any] = field(default_factory=dict)
    used: Any = None
    partitions: dict[str, dict[str, Any]] = field(default_factory=dict)
    malformed: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    key: str = DATA_DIR

    @property
    def is_text(self) -> bool:
        """Whether a part of a block cannot be read alone."""
        return self.format in ("csv", "json")

    @property
    def form(self) -> list[Any]:
        """How the files are divided into rows; part of the fingerprint of what is learned of them."""
        block = TEXT_BLOCK if self.is_text else None
        return [self.format, self.csv.delimiter, self.csv.header, self.csv.encoding, self.csv.has_separator_line, block]

    def list_blocks(self, split: str, column: str) -> list[Block]:
        """Returns the blocks of a split. Text files are read for it, as far as `column`, unless an earlier run has."""
        paths = self.by_split[split]

        def learn() -> list[Any]:
            blocks = [[(each.place, each.rows) for each in self._list_blocks(path, column)] for path in paths]
            return [(each, self.malformed.get(path, [])) for path, each in zip(paths, blocks, strict=True)]

        parsed = str(self.used) if self.format == "json" else column
        found = []
        for path, (blocks, malformed) in zip(
            paths, self.cache.recall("rows", paths, [self.form, parsed], learn=learn), strict=True
        ):
            self.malformed[path] = malformed
            found += [Block(path, tuple(at) if isinstance(at, list) else at, rows) for at, rows in blocks]
        return found

    def describe_malformed(self, split: str) -> list[str]:
        """Returns messages about the malformed rows of a split."""
        found = ((path, row, why) for path in self.by_split[split] for row, why in self.malformed.get(path, ()))
        return [f"{path}, row {row + 1}: {why}" for path, row, why in found]

    def number_rows(self, path: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the numbers in a file, from 1, of rows that are counted from 0 without the malformed ones: [n]."""
        malformed = np.array([row for row, _ in self.malformed.get(path, ())], np.int64)
        return rows + 1 + np.searchsorted(malformed - np.arange(len(malformed)), rows, side="right")

    def read(self, block: Block, columns: Sequence[str], rows: int | None = None, numbers: Sequence[str] = ()) -> Any:
        """Returns columns of the first rows of a block, or of all of them, as a `pyarrow.Table`.

        Those of a CSV file are strings, except `numbers`, which are float64 if all of their values in the block are.
        """
        own = [name for name in columns if name not in self.partitions.get(block.path, {})]
        table = self._read_columns(block, own or self._own_names(block.path)[:1], rows, numbers=numbers)
        return self._add_partitions(block.path, table, columns, numbers=numbers)

    def read_in_order(self, path: str, columns: Sequence[str], at_once: int) -> Iterator[tuple[Any, dict[int, str]]]:
        """Yields columns of a file in pieces, and what is wrong with the malformed rows of each, counted from 0.

        These rows are empty. `list_blocks` need not be called before.

        Args:
            path: of the file.
            columns: their names.
            at_once: the most rows of a piece of a Parquet file. A block of another file is a piece.

        Raises:
            ConfigError, OSError, or an error of pyarrow: if the file cannot be read.
        """
        own = [name for name in columns if name not in self.partitions.get(path, {})] or self._own_names(path)[:1]
        for table, malformed in self._read_pieces(path, own, at_once):
            whole = insert_malformed(table, malformed) if malformed else table
            yield self._add_partitions(path, whole, columns), malformed

    def _read_pieces(self, path: str, columns: list[str], at_once: int) -> Iterator[tuple[Any, dict[int, str]]]:
        """Yields columns that are in a file, without the malformed rows, and these."""
        import pyarrow
        from pyarrow import parquet

        if self.format == "parquet":
            with parquet.ParquetFile(open_file(path)) as file:
                for batch in file.iter_batches(batch_size=at_once, columns=columns):
                    yield self._cast(pyarrow.Table.from_batches([batch]).select(columns)), {}
        elif self.format == "feather":
            for block in self._list_blocks(path, columns[0]):
                yield self._cast(self._read_as_declared(block, columns, None)), {}
        else:
            for _, table, malformed in self._read_text(path, columns):
                yield table, malformed

    def _read_text(self, path: str, columns: list[str]) -> Iterator[tuple[tuple[int, int], Any, dict[int, str]]]:
        """Yields (first byte, end) of the blocks of a text file, and what `_read_pieces` does."""
        for first, text in self._split_text(path):
            malformed: dict[int, str] = {}
            if self.format == "json":
                table = self._parse_json(io.BytesIO(text), columns)
            else:
                lines = text if text.endswith(b"\n") else text + b"\n"  # pyarrow reads no header without one
                table = self._parse_csv(io.BytesIO(lines), path, not first, columns=columns, malformed=malformed)
            yield (first, first + len(text)), table, malformed

    def _add_partitions(self, path: str, table: Any, columns: Sequence[str], numbers: Sequence[str] = ()) -> Any:
        """Returns the columns, those that the names of the file's folders give included."""
        import pyarrow

        values = self.partitions.get(path, {})
        if not any(name in values for name in columns):
            return table
        parts = {name: pyarrow.repeat(values[name], len(table)) for name in columns if name in values}
        for name, part in parts.items():
            if self.format != "csv":
                parts[name] = part.cast(self.used.field(name).type)
            elif name in numbers:
                with contextlib.suppress(pyarrow.ArrowInvalid):  # it stays text, as in a file
                    parts[name] = part.cast(pyarrow.float64())
        return pyarrow.table({name: parts[name] if name in parts else table[name] for name in columns})

    def _read_columns(self, block: Block, columns: Sequence[str], rows: int | None, numbers: Sequence[str]) -> Any:
        import pyarrow

        with refuse_unreadable_file(f"{self.key}: {block.path}"):
            if self.format == "csv":
                try:
                    types = {name: pyarrow.float64() for name in numbers if name in columns}
                    return self._read_csv(block, columns, types, rows=rows)
                except pyarrow.ArrowInvalid:
                    return self._read_csv(block, columns, {}).slice(0, rows)
            return self._cast(self._read_as_declared(block, list(columns), rows).slice(0, rows))

    def _cast(self, table: Any) -> Any:
        """Returns columns of a file with the types that all files have in common."""
        import pyarrow

        return table.cast(pyarrow.schema([self.used.field(name) for name in table.schema.names]))

    def _own_names(self, path: str) -> list[str]:
        """The columns that are in a file."""
        return [name for name in self.schemas[path].names if name not in self.partitions.get(path, {})]

    @property
    def names(self) -> list[str]:
        """The columns of the first file."""
        return list(next(iter(self.schemas.values())).names)

    def name_columns(self, schemas: Sequence[Any]) -> None:
        """Takes the schemas of the files. Raises ConfigError if a file has two columns of one name."""
        import pyarrow

        for (path, values), schema in zip(self.partitions.items(), schemas, strict=True):
            whole = pyarrow.schema([*schema, *((name, value.type) for name, value in values.items())], schema.metadata)
            self.schemas[path] = whole
            if double := next((name for name, count in Counter(whole.names).items() if name and count > 1), None):
                raise ConfigError(f"{self.key}: {path}: two columns have the name {double!r}; rename one of them")

    def use(self, columns: Sequence[str]) -> None:
        """Checks that all files have these columns, with types that have one in common."""
        import pyarrow

        (first, schema), *others = self.schemas.items()
        way = ", or leave the column out with dataset.drop" if self.key == DATA_DIR else ""
        self.used = pyarrow.schema([schema.field(name) for name in columns])
        for path, other in others:
            if missing := [name for name in columns if name not in other.names]:
                raise ConfigError(
                    f"{self.key}: {path} and {first} have different columns: {', '.join(missing)} is in one of them "
                    f"only; write it to both{way}"
                )
            try:
                fields = pyarrow.schema([other.field(name) for name in columns])
                self.used = unify_types(self.used, fields)
            except pyarrow.ArrowException as error:
                raise ConfigError(
                    f"{self.key}: {path} and {first} have different columns: {explain_arrow_error(error)}; write both "
                    f"with the same types{way}"
                ) from error

    def read_schemas(self, paths: Sequence[str]) -> list[Any]:
        """Returns the schema of each file, as `read_schema` reads it, or as an earlier run has read it."""
        import pyarrow
        from pyarrow import ipc

        def learn() -> list[Any]:
            numbers: dict[str, int] = {}  # most files have the same one
            encoded = (base64.b64encode(self.read_schema(path).serialize()).decode() for path in paths)
            found = [numbers.setdefault(each, len(numbers)) for each in encoded]
            return [list(numbers), found]

        encoded, numbers = self.cache.recall("columns", paths, self.form, learn=learn)
        schemas = [ipc.read_schema(pyarrow.py_buffer(base64.b64decode(each))) for each in encoded]
        return [schemas[number] for number in numbers]

    def read_names(self) -> list[str]:
        """Returns the names of the columns of the first file, without the schemas of the others."""
        path, partitions = next(iter(self.partitions.items()))
        return [*self.read_schema(path).names, *partitions]

    def read_schema(self, path: str) -> Any:
        """Returns the names and the types of the columns of a file."""
        import pyarrow
        from pyarrow import ipc, parquet

        with refuse_unreadable_file(f"{self.key}: {path}"), open_file(path) as opened:
            if self.format == "parquet":
                return parquet.ParquetFile(opened).schema_arrow.remove_metadata()
            if self.format == "feather":
                return ipc.open_file(opened).schema.remove_metadata()
            if self.format == "json":
                schema = pyarrow.schema([])
                for _, text in self._split_text(path):  # a key may come late, and its type may widen
                    schema = unify_types(schema, keep_texts(parse_lines(io.BytesIO(text)).schema))
                return schema
            names = self.csv.read_first_fields(decompress(path, opened), path)
            has_header = set(self.csv.header) <= set(names)
            texts = [(name, pyarrow.string()) for name in (names if has_header else self.csv.header)]
            return pyarrow.schema(texts, None if has_header else NO_HEADER)

    def count_rows(self, path: str) -> int | None:
        """Returns the number of rows of a file; None for a text file, which has to be read for it."""
        return None if self.is_text else sum(block.rows for block in self._list_blocks(path, self._own_names(path)[0]))

    def _list_blocks(self, path: str, column: str) -> Iterator[Block]:
        from pyarrow import ipc, parquet

        if column in self.partitions.get(path, {}):
            column = self._own_names(path)[0]
        with refuse_unreadable_file(f"{self.key}: {path}"):
            if self.format == "parquet":
                with parquet.ParquetFile(open_file(path)) as file:
                    for n in range(file.num_row_groups):
                        yield Block(path, n, file.metadata.row_group(n).num_rows)
            elif self.format == "feather":
                place = self.schemas[path].names.index(column)
                with ipc.open_file(open_file(path), options=ipc.IpcReadOptions(included_fields=[place])) as file:
                    for n in range(file.num_record_batches):
                        yield Block(path, n, file.get_batch(n).num_rows)
            else:
                is_whole, rows, found = path.lower().endswith(COMPRESSED), 0, self.malformed.setdefault(path, [])
                for place, table, malformed in self._read_text(path, [column]):
                    first = rows + len(found)
                    found += [(first + row, why) for row, why in malformed.items()]
                    rows += len(table)
                    if not is_whole:
                        yield Block(path, place, len(table))
                if is_whole:
                    yield Block(path, (0, None), rows)

    def _split_text(self, path: str) -> Iterator[tuple[int, bytes]]:
        """Yields the first byte and the text of blocks of whole rows. A line break between quotes is in a row.

        Raises ConfigError if quotes of a CSV file are not closed.
        """
        first, line, rest, is_open = 0, 1, b"", False
        with decompress(path, open_file(path)) as file:
            while not (is_open and len(rest) > TEXT_BLOCK) and (part := file.read(TEXT_BLOCK)):
                rest += part
                end = rest.rfind(b"\n") + 1
                if self.format == "csv":
                    end, is_open = find_last_row_end(rest, self.csv.delimiter_of(path))
                if end:
                    yield first, rest[:end]
                first, line, rest = first + end, line + rest.count(b"\n", 0, end), rest[end:]
        if is_open:
            raise ConfigError(
                f'{self.key}: {path}: the row at line {line} has a field that begins with " and never ends with '
                'one; close it, or write """" for a field that is a quote'
            )
        if rest.strip():
            yield first, rest

    def _read_csv(self, block: Block, columns: Sequence[str], types: Mapping[str, Any], rows: int | None = None) -> Any:
        text, is_first = read_text(block), not block.place[0]
        return self._parse_csv(text, block.path, is_first, columns=columns, types=types, rows=rows)

    def _parse_csv(
        self,
        text: Any,
        path: str,
        is_first: bool,
        columns: Sequence[str],
        types: Mapping[str, Any] = {},
        malformed: dict[int, str] | None = None,
        rows: int | None = None,
    ) -> Any:
        """Reads a block, of which `text` yields the bytes, without the rows that have a wrong number of fields.

        `malformed` gets what is wrong with these, by their numbers in the block, counted from 0. Of a block of which
        only the first `rows` are needed, the rest is not parsed.
        """
        import pyarrow
        from pyarrow import csv

        has_header = is_first and self.schemas[path].metadata != NO_HEADER

        def note(number: int | None, reason: str) -> None:
            if malformed is not None and number is not None:
                malformed[number - 1 - has_header] = reason

        convert = csv.ConvertOptions(
            include_columns=list(columns),
            column_types=dict.fromkeys(columns, pyarrow.string()) | dict(types),
            null_values=list(self.csv.missing),
        )
        read = csv.ReadOptions(
            column_names=None if has_header else self._own_names(path),
            encoding=self.csv.encoding,
            use_threads=malformed is None,  # with threads, rows have no numbers
            skip_rows=int(self.csv.has_separator_line and is_first),
        )
        parse = self.csv.parse_options(path, note)
        if rows is None:
            return csv.read_csv(text, read_options=read, parse_options=parse, convert_options=convert)
        read.block_size, read.use_threads = PARSED_AT_ONCE, False
        batches: list[Any] = []
        with csv.open_csv(text, read_options=read, parse_options=parse, convert_options=convert) as reader:
            while sum(map(len, batches)) < rows and (batch := next(reader, None)) is not None:
                batches.append(batch)
        return pyarrow.Table.from_batches(batches, reader.schema).slice(0, rows)

    def _read_as_declared(self, block: Block, columns: list[str], rows: int | None) -> Any:
        import pyarrow
        from pyarrow import ipc, parquet

        if self.format == "parquet":
            with parquet.ParquetFile(open_file(block.path), pre_buffer=True) as file:
                if rows is None or rows >= block.rows:
                    return file.read_row_group(block.place, columns=columns)
                return pyarrow.Table.from_batches(
                    [next(file.iter_batches(batch_size=rows, row_groups=[block.place], columns=columns))]
                )
        if self.format == "feather":
            places = [self.schemas[block.path].names.index(name) for name in columns]
            with ipc.open_file(open_file(block.path), options=ipc.IpcReadOptions(included_fields=places)) as f:
                return pyarrow.Table.from_batches([f.get_batch(block.place)]).select(columns)
        return self._parse_json(read_text(block), columns)

    def _parse_json(self, text: Any, columns: list[str]) -> Any:
        from pyarrow import json

        options = json.ParseOptions(explicit_schema=self.used, unexpected_field_behavior="ignore")
        return parse_lines(text, options).select(columns)


def parse_lines(text: Any, options: Any = None) -> Any:
    """Reads JSON lines of any length: pyarrow's reader takes only those that fit in one of its blocks."""
    import pyarrow
    from pyarrow import json

    content = text.read()
    for read in (None, json.ReadOptions(block_size=len(content) + 1)):
        try:
            return json.read_json(io.BytesIO(content), read, options)
        except pyarrow.ArrowInvalid as error:
            if read is not None or "straddling" not in str(error):
                raise
    raise AssertionError


def unify_types(first: Any, second: Any) -> Any:
    """Returns a schema of the fields of two, with types that both have. Raises ArrowTypeError if there is none."""
    import pyarrow

    return pyarrow.unify_schemas([first, second], promote_options="permissive")


def keep_texts(schema: Any) -> Any:
    """Returns the schema of JSON lines with strings in place of the dates that pyarrow infers: JSON has no dates."""
    import pyarrow
    from pyarrow import types

    fields = [field.with_type(pyarrow.string()) if types.is_timestamp(field.type) else field for field in schema]
    return pyarrow.schema(fields)


def insert_malformed(table: Any, malformed: Mapping[int, str]) -> Any:
    """Inserts an empty row in place of each malformed one; they are counted from 0, with themselves."""
    import pyarrow

    is_malformed = np.zeros(len(table) + len(malformed), bool)
    is_malformed[list(malformed)] = True
    return table.take(pyarrow.array(np.cumsum(~is_malformed) - 1, mask=is_malformed))


def find_tables(data_dir: Any, form: CsvForm, cache: LearnedCache) -> TableFiles:
    """Finds the files, and checks the options of their format. It opens the first of CSV files."""
    find = find_in_store if is_store_address(data_dir) else find_files
    return prepare_tables(find(data_dir, tuple(FORMATS)), data_dir, form, cache=cache)


def prepare_tables(
    by_split: dict[str, list[str]], data_dir: Any, form: CsvForm, cache: LearnedCache, key: str = DATA_DIR
) -> TableFiles:
    """Does what `find_tables` does with files that are found."""
    first, *others = paths = [path for paths in by_split.values() for path in paths]
    files = TableFiles(by_split, find_format(first, key), form, cache=cache, key=key)
    for path in others:
        if find_format(path, key) != files.format:
            raise ConfigError(f"{key}: {path} and {first} have different formats; use one of them")
    form.check(first, files.format)
    if files.format == "csv":
        with refuse_unreadable_file(f"{key}: {first}"), open_file(first) as opened:
            files.csv = form.recognise(decompress(first, opened), first)
    files.partitions = read_partitions(data_dir, paths, files.format)
    return files


def open_tables(data_dir: Any, form: CsvForm, cache: LearnedCache) -> TableFiles:
    """Finds the files and checks that they have one format, and names of columns that can be told apart."""
    files = find_tables(data_dir, form, cache)
    files.name_columns(files.read_schemas([*files.partitions]))
    return files


def read_partitions(data_dir: Any, paths: Sequence[str], format_name: str) -> dict[str, dict[str, Any]]:
    """Reads columns from the names of the folders below the data folder, as Hive and Spark write them.

    `year=2024/town=Ulm` gives each row the columns `year` and `town`. A column is int64 if all of its values are whole
    numbers, and strings otherwise; of CSV files, all are strings, whose type is found as that of other columns.

    Returns:
        The values as pyarrow scalars, by path and column.
    """
    import pyarrow

    root = str(data_dir) if is_store_address(data_dir) else str(expand_data_dir(data_dir))
    if glob.has_magic(root):
        root = re.split(r"[*?\[]", root, maxsplit=1)[0].rpartition("/")[0]
    texts: dict[str, dict[str, str | None]] = {}
    for path in paths:
        folders = [part.partition("=") for part in path.removeprefix(root).split("/")[:-1]]
        pairs = ((unquote(name), unquote(value)) for name, equals, value in folders if name and equals)
        texts[path] = {name: None if value == MISSING_PARTITION else value for name, value in pairs}
    names = dict.fromkeys(name for each in texts.values() for name in each)
    types = {}
    for name in names:
        values = [each[name] for each in texts.values() if each.get(name) is not None]
        is_whole = format_name != "csv" and all(re.fullmatch(r"-?\d{1,18}", str(value)) for value in values)
        types[name] = pyarrow.int64() if is_whole else pyarrow.string()

    def convert(name: str, text: str | None) -> Any:
        is_number = text is not None and types[name] == pyarrow.int64()
        return pyarrow.scalar(int(str(text)) if is_number else text, types[name])

    return {path: {name: convert(name, text) for name, text in each.items()} for path, each in texts.items()}


def open_file(path: str) -> Any:
    """Opens a file, or an address in an object store, for reading at any position."""
    import pyarrow

    if is_store_address(path):
        return open_in_store(path)
    return pyarrow.memory_map(path) if Path(path).stat().st_size else pyarrow.BufferReader(b"")


def find_last_row_end(text: bytes, delimiter: str) -> tuple[int, bool]:
    """Returns the end of the last whole row in text that begins with a row, and whether the text ends between quotes.

    As for pyarrow and Python's csv, a quote opens a field only as its first character, and is text in other fields.
    """
    characters = np.frombuffer(text, np.uint8)
    quotes = np.flatnonzero(characters == ord('"'))
    opening, before = quotes[::2], np.frombuffer(f'{delimiter}\r\n"'.encode(), np.uint8)
    if np.isin(characters[opening - 1], before)[opening > 0].all():  # no quote is in a field that it does not open
        is_open = len(quotes) % 2 == 1
        spans = np.stack([opening, np.append(quotes[1::2] + 1, len(text))[: len(opening)]], axis=1)
    else:
        pattern = rb'(?:\A(?:\xef\xbb\xbf)?|(?<=[\r\n%b]))"(?:[^"]++|"")*+("|\Z)' % re.escape(delimiter.encode())
        fields = list(re.finditer(pattern, text))
        is_open = bool(fields) and not fields[-1][1]
        spans = np.array([field.span() for field in fields], int).reshape(-1, 2)
    rest = len(text)
    for start, end in spans[::-1]:
        if (found := text.rfind(b"\n", end, rest)) >= 0:
            return found + 1, is_open
        rest = start
    return text.rfind(b"\n", 0, rest) + 1, is_open


def decompress(path: str, file: Any) -> Any:
    """Returns the contents of a file, decompressed if its name ends so."""
    import pyarrow

    if not path.lower().endswith(COMPRESSED):
        return file
    return pyarrow.CompressedInputStream(file, pyarrow.Codec.detect(path.lower()).name)


def read_text(block: Block) -> Any:
    """Opens the bytes of a block of a text file."""
    file = open_file(block.path)
    first, end = block.place
    if end is None:
        return decompress(block.path, file)
    with file:
        file.seek(first)
        return io.BytesIO(file.read(end - first))
