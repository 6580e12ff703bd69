"""Reads the documents of a text corpus: text files, JSON lines, Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scaleflow.dataset.reading.files import ALL
from scaleflow.dataset.reading.learned_cache import LearnedCache
from scaleflow.dataset.tables.files import prepare_tables
from scaleflow.errors import ConfigError
from scaleflow.files.table_formats import CsvForm, explain_arrow_error

TABLE_SUFFIXES = (".jsonl", ".ndjson", ".parquet")
SUFFIXES = (".txt", ".md", *TABLE_SUFFIXES)

#: Size of the blocks of a document, in bytes. They end at the end of a line.
BLOCK_BYTES = 1 << 20

#: Rows that are read at a time.
ROWS = 1024


def read_documents(path: str, column: str, is_bytes: bool) -> Iterator[Iterator[bytes]]:
    """Yields the documents of a file as blocks of UTF-8. A text file is one document. In tables, each row is one.

    Args:
        path: of the file. Its suffix decides on the format. Files with other suffixes are text.
        column: the column with the text.
        is_bytes: whether text files may be other than UTF-8.

    Raises:
        ConfigError: if the file cannot be read, is not UTF-8, or has no such column of texts.
    """
    if Path(path).suffix.lower() in TABLE_SUFFIXES:
        yield from (iter([text.encode()]) for text in read_rows(path, column))
        return
    try:
        yield read_lines(path, is_bytes)
    except OSError as error:
        raise ConfigError(f"dataset.data_dir: {path}: {error.strerror or error}") from error


def read_lines(path: str, is_bytes: bool) -> Iterator[bytes]:
    with Path(path).open("rb") as file:
        while lines := file.readlines(BLOCK_BYTES):
            block = b"".join(lines)
            if not is_bytes:
                try:
                    block.decode()
                except UnicodeDecodeError as error:
                    place = file.tell() - len(block) + error.start
                    raise ConfigError(
                        f"dataset.data_dir: {path} is not UTF-8 at byte {place}; convert it, or use "
                        "dataset.tokenizer=bytes"
                    ) from error
            yield block


def read_rows(path: str, column: str) -> Iterator[str]:
    """Yields a column of texts of JSON lines or of a Parquet file. "" is missing."""
    import pyarrow

    files = prepare_tables({ALL: [path]}, path, CsvForm(), cache=LearnedCache(None, path))
    number = 0
    has_text = False
    try:
        if files.format == "json":  # other fields may have values of any types
            files.used = pyarrow.schema([(column, pyarrow.string())])
        else:
            files.name_columns([files.read_schema(path)])
            check_text_column(path, column, files.names)
            files.use([column])
        for part, _ in files.read_in_order(path, [column], ROWS):
            for value in part[column].to_pylist():
                number += 1
                has_text = has_text or value is not None
                yield check_text(value, column, f"{path}, row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"dataset.data_dir: {path} cannot be read after row {number}: {explain_arrow_error(error)}; expected rows "
            f"with a text in the column {column}"
        ) from error
    if number and not has_text:
        check_text_column(path, column, files.read_schema(path).names)


def check_text_column(path: str, column: str, names: Sequence[str]) -> None:
    if column not in names:
        raise ConfigError(f"dataset.column={column}: {path} has no such column; it has {', '.join(names)}")


def check_text(value: Any, column: str, where: str) -> str:
    """Returns a text; "" for a missing one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConfigError(f"dataset.column={column}: {where} has a value of type {type(value).__name__}, expected text")
    return value
