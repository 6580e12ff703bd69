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

#: This value in the name of a folder means a missing value.
MISSING_PARTITION = "__HIVE_DEFAULT_PARTITION__"

#: The metadata of the schema of a CSV file without a header line.
NO_HEADER = {b"header": b"none"}

#: Bytes of a block of a text file.
TEXT_BLOCK = 4 << 20

#: Bytes that are parsed at once if only the first rows of a text block are needed.
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
        by_split: the files of each split. Files that are not divided into splits are in `all`.
        format: the name of their format.
        csv: the form of CSV files.
        cache: the facts that earlier runs learned about the files.
        schemas: the names and types of the columns of each file. In a CSV file, the types are strings.
        used: the names and types of the used columns, which all files have.
        partitions: for each file, the columns and values in the names of its folders, such as `year=2024`. In the
            file's schema they are the last columns.
        malformed: for each file, the rows with too few or too many fields, with a message. They are left out. The
            rows are counted from 0 among all rows of the file.
        key: the config key that names the files, for messages.
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
        """Whether a block has to be parsed from its beginning."""
        return self.format in ("csv", "json")

    @property
    def form(self) -> list[Any]:
        """The options that divide the files into rows. They are part of the cache's fingerprint."""
        block = TEXT_BLOCK if self.is_text else None
        return [self.format, self.csv.delimiter, self.csv.header, self.csv.encoding, self.csv.has_separator_line, block]

    def list_blocks(self, split: str, column: str) -> list[Block]:
        """Returns the blocks of a split.

        Text files are parsed for this, up to `column`, unless an earlier run has done so.
        """
        paths = self.by_split[split]

        def learn() -> list[Any]:
            """Returns for each file the place and rows of its blocks, and its malformed rows."""
            facts: list[Any] = []
            for path in paths:
                blocks = [(block.place, block.rows) for block in self._list_blocks(path, column)]
                facts.append((blocks, self.malformed.get(path, [])))
            return facts

        parsed = str(self.used) if self.format == "json" else column
        facts = self.cache.recall("rows", paths, [self.form, parsed], learn=learn)
        blocks: list[Block] = []
        for path, (places_and_rows, malformed) in zip(paths, facts, strict=True):
            self.malformed[path] = malformed
            for place, rows in places_and_rows:
                # JSON has turned the tuples into lists
                blocks.append(Block(path, tuple(place) if isinstance(place, list) else place, rows))
        return blocks

    def describe_malformed(self, split: str) -> list[str]:
        """Returns messages about the malformed rows of a split."""
        messages: list[str] = []
        for path in self.by_split[split]:
            for row, reason in self.malformed.get(path, ()):
                messages.append(f"{path}, row {row + 1}: {reason}")
        return messages

    def number_rows(self, path: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the numbers of rows in a file, from 1: [n].

        Args:
            path: of the file.
            rows: the rows, [n], counted from 0 without the malformed ones.
        """
        malformed = np.array([row for row, _ in self.malformed.get(path, ())], np.int64)
        good_rows_before = malformed - np.arange(len(malformed))
        malformed_before = np.searchsorted(good_rows_before, rows, side="right")
        return rows + 1 + malformed_before

    def read(self, block: Block, columns: Sequence[str], rows: int | None = None, numbers: Sequence[str] = ()) -> Any:
        """Returns columns of the first rows of a block, or of all of them, as a `pyarrow.Table`.

        Args:
            block: of a file.
            columns: their names.
            rows: how many rows are read. None: all.
            numbers: columns of a CSV file that become float64 if all of their values in the block are numbers. The
                others are strings.
        """
        table = self._read_columns(block, self._choose_file_columns(block.path, columns), rows, numbers=numbers)
        return self._add_partitions(block.path, table, columns, numbers=numbers)

    def _choose_file_columns(self, path: str, columns: Sequence[str]) -> list[str]:
        """Returns the columns that are in a file, not in the names of its folders. They are one at least."""
        partitions = self.partitions.get(path, {})
        return [name for name in columns if name not in partitions] or self._list_file_columns(path)[:1]

    def read_in_order(self, path: str, columns: Sequence[str], at_once: int) -> Iterator[tuple[Any, dict[int, str]]]:
        """Yields columns of a file in pieces, with messages about the malformed rows of each piece.

        The malformed rows are empty. Their numbers are counted from 0 in the piece. `list_blocks` need not be called
        before.

        Args:
            path: of the file.
            columns: their names.
            at_once: the maximum number of rows of a piece of a Parquet file. In other files, a block is a piece.

        Raises:
            ConfigError, OSError, or an error of pyarrow: if the file cannot be read.
        """
        file_columns = self._choose_file_columns(path, columns)
        for table, malformed in self._read_pieces(path, file_columns, at_once):
            whole = insert_malformed(table, malformed) if malformed else table
            yield self._add_partitions(path, whole, columns), malformed

    def _read_pieces(self, path: str, columns: list[str], at_once: int) -> Iterator[tuple[Any, dict[int, str]]]:
        """Yields columns of a file without the malformed rows, and messages about these."""
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
        """Yields (first byte, end) of each block of a text file, then the values that `_read_pieces` yields."""
        for first, text in self._split_text(path):
            malformed: dict[int, str] = {}
            if self.format == "json":
                table = self._parse_json(io.BytesIO(text), columns)
            else:
                lines = text if text.endswith(b"\n") else text + b"\n"  # pyarrow reads no header without one
                table = self._parse_csv(io.BytesIO(lines), path, not first, columns=columns, malformed=malformed)
            yield (first, first + len(text)), table, malformed

    def _add_partitions(self, path: str, table: Any, columns: Sequence[str], numbers: Sequence[str] = ()) -> Any:
        """Returns the columns in their order, with those that are in the names of the file's folders."""
        import pyarrow

        partitions = self.partitions.get(path, {})
        if not any(name in partitions for name in columns):
            return table
        whole: dict[str, Any] = {}
        for name in columns:
            if name not in partitions:
                whole[name] = table[name]
                continue
            values = pyarrow.repeat(partitions[name], len(table))
            if self.format != "csv":
                values = values.cast(self.used.field(name).type)
            elif name in numbers:
                with contextlib.suppress(pyarrow.ArrowInvalid):  # it stays text, as in a file
                    values = values.cast(pyarrow.float64())
            whole[name] = values
        return pyarrow.table(whole)

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
        """Returns columns of a file with the types that they have in all files."""
        import pyarrow

        return table.cast(pyarrow.schema([self.used.field(name) for name in table.schema.names]))

    def _list_file_columns(self, path: str) -> list[str]:
        """Returns the columns that are in a file, not in the names of its folders."""
        return [name for name in self.schemas[path].names if name not in self.partitions.get(path, {})]

    @property
    def names(self) -> list[str]:
        """The columns of the first file."""
        return list(next(iter(self.schemas.values())).names)

    def name_columns(self, schemas: Sequence[Any]) -> None:
        """Sets the schemas of the files. Raises ConfigError if a file has two columns of one name."""
        import pyarrow

        for (path, partitions), schema in zip(self.partitions.items(), schemas, strict=True):
            fields = list(schema)
            for name, value in partitions.items():
                fields.append(pyarrow.field(name, value.type))
            whole = pyarrow.schema(fields, schema.metadata)
            self.schemas[path] = whole
            for name, count in Counter(whole.names).items():
                if name and count > 1:
                    raise ConfigError(f"{self.key}: {path}: two columns have the name {name!r}; rename one of them")

    def use(self, columns: Sequence[str]) -> None:
        """Chooses the columns to read.

        Raises:
            ConfigError: if a file lacks one, or two files have a column with types that cannot be unified.
        """
        import pyarrow

        (first, schema), *others = self.schemas.items()
        way = ", or leave the column out with dataset.drop" if self.key == DATA_DIR else ""
        self.used = pyarrow.schema([schema.field(name) for name in columns])
        for path, other in others:
            missing = [name for name in columns if name not in other.names]
            if missing:
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
        """Returns the schema of each file: see `read_schema`. The cache keeps schemas of an earlier run."""
        import pyarrow
        from pyarrow import ipc

        def learn() -> list[Any]:
            """Returns the different schemas, encoded, and for each file the number of its schema."""
            numbers: dict[str, int] = {}  # nearly all files have the same schema
            number_of_file: list[int] = []
            for path in paths:
                encoded = base64.b64encode(self.read_schema(path).serialize()).decode()
                number_of_file.append(numbers.setdefault(encoded, len(numbers)))
            return [list(numbers), number_of_file]

        different, number_of_file = self.cache.recall("columns", paths, self.form, learn=learn)
        schemas = [ipc.read_schema(pyarrow.py_buffer(base64.b64decode(encoded))) for encoded in different]
        return [schemas[number] for number in number_of_file]

    def read_names(self) -> list[str]:
        """Returns the names of the columns of the first file, without the schemas of the others."""
        path, partitions = next(iter(self.partitions.items()))
        return [*self.read_schema(path).names, *partitions]

    def read_schema(self, path: str) -> Any:
        """Returns the names and the types of the columns of a file."""
        from pyarrow import ipc, parquet

        with refuse_unreadable_file(f"{self.key}: {path}"), open_file(path) as opened:
            if self.format == "parquet":
                return parquet.ParquetFile(opened).schema_arrow.remove_metadata()
            if self.format == "feather":
                return ipc.open_file(opened).schema.remove_metadata()
            if self.format == "json":
                return self._infer_json_schema(path)
            return self._read_csv_schema(path, opened)

    def _infer_json_schema(self, path: str) -> Any:
        """Returns the schema of all lines: a key may come late, and its type may widen."""
        import pyarrow

        schema = pyarrow.schema([])
        for _, text in self._split_text(path):
            schema = unify_types(schema, keep_texts(parse_lines(io.BytesIO(text)).schema))
        return schema

    def _read_csv_schema(self, path: str, opened: Any) -> Any:
        """Returns a schema of strings, with the names of the header line or of `dataset.header`."""
        import pyarrow

        first_fields = self.csv.read_first_fields(decompress(path, opened), path)
        has_header = set(self.csv.header) <= set(first_fields)
        names = first_fields if has_header else self.csv.header
        fields = [(name, pyarrow.string()) for name in names]
        return pyarrow.schema(fields, None if has_header else NO_HEADER)

    def count_rows(self, path: str) -> int | None:
        """Returns the number of rows of a file. It is None for a text file, because it would have to be parsed."""
        if self.is_text:
            return None
        return sum(block.rows for block in self._list_blocks(path, self._list_file_columns(path)[0]))

    def _list_blocks(self, path: str, column: str) -> Iterator[Block]:
        from pyarrow import ipc, parquet

        if column in self.partitions.get(path, {}):
            column = self._list_file_columns(path)[0]
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
                yield from self._list_text_blocks(path, column)

    def _list_text_blocks(self, path: str, column: str) -> Iterator[Block]:
        """Yields the blocks of a text file, and notes its malformed rows. A compressed file is one block."""
        is_compressed = path.lower().endswith(COMPRESSED)
        noted = self.malformed.setdefault(path, [])
        rows = 0
        for place, table, malformed in self._read_text(path, [column]):
            first = rows + len(noted)
            noted += [(first + row, reason) for row, reason in malformed.items()]
            rows += len(table)
            if not is_compressed:
                yield Block(path, place, len(table))
        if is_compressed:
            yield Block(path, (0, None), rows)

    def _split_text(self, path: str) -> Iterator[tuple[int, bytes]]:
        """Yields the first byte and the text of blocks of whole rows. A line break between quotes is in a row.

        Raises ConfigError if quotes of a CSV file are not closed.
        """
        first = 0
        line = 1
        rest = b""
        is_open = False  # whether `rest` ends between quotes
        with decompress(path, open_file(path)) as file:
            while not (is_open and len(rest) > TEXT_BLOCK):
                part = file.read(TEXT_BLOCK)
                if not part:
                    break
                rest += part
                end = rest.rfind(b"\n") + 1
                if self.format == "csv":
                    end, is_open = find_last_row_end(rest, self.csv.delimiter_of(path))
                if end:
                    yield first, rest[:end]
                first += end
                line += rest.count(b"\n", 0, end)
                rest = rest[end:]
        if is_open:
            raise ConfigError(
                f'{self.key}: {path}: the row at line {line} has a field that begins with " and never ends with '
                'one; close it, or write """" for a field that is a quote'
            )
        if rest.strip():
            yield first, rest

    def _read_csv(self, block: Block, columns: Sequence[str], types: Mapping[str, Any], rows: int | None = None) -> Any:
        is_first = block.place[0] == 0
        return self._parse_csv(read_text(block), block.path, is_first, columns=columns, types=types, rows=rows)

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
        """Reads a block without the rows that have a wrong number of fields.

        Args:
            text: the bytes of the block, as a file.
            path: of the whole file.
            is_first: whether the block is the first of the file. A header line is in that one.
            columns: the columns to read.
            types: the types of columns that are not read as strings.
            malformed: receives messages about the rows left out, by their numbers in the block, counted from 0.
            rows: how many rows are needed. The rest of the block is not parsed.
        """
        import pyarrow
        from pyarrow import csv

        has_header = is_first and self.schemas[path].metadata != NO_HEADER

        def note_malformed(number: int | None, reason: str) -> None:
            if malformed is not None and number is not None:
                malformed[number - 1 - has_header] = reason

        convert_options = csv.ConvertOptions(
            include_columns=list(columns),
            column_types=dict.fromkeys(columns, pyarrow.string()) | dict(types),
            null_values=list(self.csv.missing),
        )
        read_options = csv.ReadOptions(
            column_names=None if has_header else self._list_file_columns(path),
            encoding=self.csv.encoding,
            use_threads=malformed is None and rows is None,  # with threads, rows have no numbers
            skip_rows=int(self.csv.has_separator_line and is_first),
        )
        options = {
            "read_options": read_options,
            "parse_options": self.csv.parse_options(path, note_malformed),
            "convert_options": convert_options,
        }
        if rows is None:
            return csv.read_csv(text, **options)
        read_options.block_size = PARSED_AT_ONCE
        batches: list[Any] = []
        parsed = 0
        with csv.open_csv(text, **options) as reader:
            for batch in reader:
                batches.append(batch)
                parsed += len(batch)
                if parsed >= rows:
                    break
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
    """Reads JSON lines of any length. pyarrow's reader takes only lines that fit in one of its blocks."""
    import pyarrow
    from pyarrow import json

    content = text.read()
    try:
        return json.read_json(io.BytesIO(content), None, options)
    except pyarrow.ArrowInvalid as error:
        if "straddling" not in str(error):
            raise
    one_block = json.ReadOptions(block_size=len(content) + 1)
    return json.read_json(io.BytesIO(content), one_block, options)


def unify_types(first: Any, second: Any) -> Any:
    """Returns a schema with the fields of both, in types that fit both. Raises ArrowTypeError if no type does."""
    import pyarrow

    return pyarrow.unify_schemas([first, second], promote_options="permissive")


def keep_texts(schema: Any) -> Any:
    """Returns the schema of JSON lines with strings instead of the dates that pyarrow infers: JSON has no dates."""
    import pyarrow
    from pyarrow import types

    fields = [field.with_type(pyarrow.string()) if types.is_timestamp(field.type) else field for field in schema]
    return pyarrow.schema(fields)


def insert_malformed(table: Any, malformed: Mapping[int, str]) -> Any:
    """Inserts an empty row for each malformed one. Their numbers count all rows, from 0."""
    import pyarrow

    is_malformed = np.zeros(len(table) + len(malformed), bool)
    is_malformed[list(malformed)] = True
    return table.take(pyarrow.array(np.cumsum(~is_malformed) - 1, mask=is_malformed))


def find_tables(data_dir: Any, form: CsvForm, cache: LearnedCache) -> TableFiles:
    """Finds the files and checks the options of their format. It opens the first CSV file."""
    find = find_in_store if is_store_address(data_dir) else find_files
    return prepare_tables(find(data_dir, tuple(FORMATS)), data_dir, form, cache=cache)


def prepare_tables(
    by_split: dict[str, list[str]], data_dir: Any, form: CsvForm, cache: LearnedCache, key: str = DATA_DIR
) -> TableFiles:
    """Returns the tables of a dataset whose files the caller has found.

    Opens the first file if it is CSV, to recognise its form, and reads the partitions from the paths.

    Raises ConfigError if the files have different formats, or if the options are not for their format.
    """
    paths: list[str] = []
    for paths_of_split in by_split.values():
        paths += paths_of_split
    first = paths[0]
    files = TableFiles(by_split, find_format(first, key), form, cache=cache, key=key)
    for path in paths[1:]:
        if find_format(path, key) != files.format:
            raise ConfigError(f"{key}: {path} and {first} have different formats; use one of them")
    form.check(first, files.format)
    if files.format == "csv":
        with refuse_unreadable_file(f"{key}: {first}"), open_file(first) as opened:
            files.csv = form.recognise(decompress(first, opened), first)
    files.partitions = read_partitions(data_dir, paths, files.format)
    return files


def open_tables(data_dir: Any, form: CsvForm, cache: LearnedCache) -> TableFiles:
    """Finds the files, and checks that they have one format and that no two columns of a file share a name."""
    files = find_tables(data_dir, form, cache)
    files.name_columns(files.read_schemas([*files.partitions]))
    return files


def read_partitions(data_dir: Any, paths: Sequence[str], format_name: str) -> dict[str, dict[str, Any]]:
    """Reads columns from the names of the folders below the data folder, as Hive and Spark write them.

    `year=2024/town=Ulm` gives each row the columns `year` and `town`. A column is int64 if all of its values are whole
    numbers, and strings otherwise. For CSV files, all columns are strings, and their types are inferred later, as for
    other columns.

    Returns:
        For each file, the values as pyarrow scalars, by column.
    """
    import pyarrow

    root = find_root(data_dir)
    texts = {path: read_folder_names(path, root) for path in paths}
    values_by_name: dict[str, list[str]] = {}
    for pairs in texts.values():
        for name, text in pairs.items():
            values = values_by_name.setdefault(name, [])
            if text is not None:
                values.append(text)
    whole_numbers: list[str] = []
    for name, values in values_by_name.items():
        if format_name != "csv" and all(re.fullmatch(r"-?\d{1,18}", value) for value in values):
            whole_numbers.append(name)

    def convert(name: str, text: str | None) -> Any:
        if name not in whole_numbers:
            return pyarrow.scalar(text, pyarrow.string())
        return pyarrow.scalar(None if text is None else int(text), pyarrow.int64())

    partitions: dict[str, dict[str, Any]] = {}
    for path, pairs in texts.items():
        partitions[path] = {name: convert(name, text) for name, text in pairs.items()}
    return partitions


def find_root(data_dir: Any) -> str:
    """Returns the folder that a data folder, or a pattern of files, begins with."""
    root = str(data_dir) if is_store_address(data_dir) else str(expand_data_dir(data_dir))
    if glob.has_magic(root):
        return re.split(r"[*?\[]", root, maxsplit=1)[0].rpartition("/")[0]
    return root


def read_folder_names(path: str, root: str) -> dict[str, str | None]:
    """Returns the names and values in the folders of a path below `root`, such as `year=2024`."""
    pairs: dict[str, str | None] = {}
    for folder in path.removeprefix(root).split("/")[:-1]:
        name, equals, value = folder.partition("=")
        if name and equals:
            text = unquote(value)
            pairs[unquote(name)] = None if text == MISSING_PARTITION else text
    return pairs


def open_file(path: str) -> Any:
    """Opens a file, or an address in an object store, for reading at any position."""
    import pyarrow

    if is_store_address(path):
        return open_in_store(path)
    return pyarrow.memory_map(path) if Path(path).stat().st_size else pyarrow.BufferReader(b"")


def find_last_row_end(text: bytes, delimiter: str) -> tuple[int, bool]:
    """Returns the end of the last whole row in text that begins with a row, and whether the text ends between quotes.

    As in pyarrow and Python's csv, a quote opens a field only as its first character. In other fields it is text.
    """
    characters = np.frombuffer(text, np.uint8)
    quotes = np.flatnonzero(characters == ord('"'))
    opening = quotes[::2]
    before_field = np.frombuffer(f'{delimiter}\r\n"'.encode(), np.uint8)
    opens_field = np.isin(characters[opening - 1], before_field) | (opening == 0)
    if opens_field.all():  # no quote is in a field that it does not open
        is_open = len(quotes) % 2 == 1
        closing = np.append(quotes[1::2] + 1, len(text))[: len(opening)]
        spans = np.stack([opening, closing], axis=1)
    else:
        pattern = rb'(?:\A(?:\xef\xbb\xbf)?|(?<=[\r\n%b]))"(?:[^"]++|"")*+("|\Z)' % re.escape(delimiter.encode())
        fields = list(re.finditer(pattern, text))
        is_open = bool(fields) and not fields[-1][1]
        spans = np.array([field.span() for field in fields], int).reshape(-1, 2)
    rest_end = len(text)
    for start, end in spans[::-1]:
        line_break = text.rfind(b"\n", end, rest_end)
        if line_break >= 0:
            return line_break + 1, is_open
        rest_end = start
    return text.rfind(b"\n", 0, rest_end) + 1, is_open


def decompress(path: str, file: Any) -> Any:
    """Returns a file that decompresses another one if the ending of its name says so."""
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
