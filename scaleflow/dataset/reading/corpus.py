"""Reads the documents of a text corpus: text files, JSON lines, Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaleflow.dataset.reading.files import ALL
from scaleflow.dataset.reading.learned_cache import LearnedCache
from scaleflow.dataset.tables.files import prepare_tables
from scaleflow.errors import ConfigError
from scaleflow.files.table_formats import CsvForm, refuse_unreadable_file

TEXT_SUFFIXES, JSON_SUFFIXES, PARQUET_SUFFIXES = (".txt", ".md"), (".jsonl", ".ndjson"), (".parquet",)
SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES, *PARQUET_SUFFIXES)

#: A document comes in blocks of about so many bytes, which end at the end of a line.
BLOCK_BYTES = 1 << 20

#: Number of rows of a Parquet file that are read at a time.
ROWS = 1024


def read_documents(path: str, column: str, is_bytes: bool) -> Iterator[Iterator[bytes]]:
    """Yields the documents of a file as blocks of UTF-8; a text file is one, in JSON lines and Parquet each row.

    Args:
        path: of the file; its suffix tells the format, and other files are text.
        column: the column with the text.
        is_bytes: whether text files may be other than UTF-8.

    Raises:
        ConfigError: if the file cannot be read, is not UTF-8, or a row has no text in the column.
    """
    suffix = Path(path).suffix.lower()
    try:
        if suffix in JSON_SUFFIXES:
            yield from (iter([text.encode()]) for text in read_json_lines(path, column))
        elif suffix in PARQUET_SUFFIXES:
            yield from (iter([text.encode()]) for text in read_parquet(path, column))
        else:
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


def read_json_lines(path: str, column: str) -> Iterator[str]:
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"dataset.data_dir: {path}, line {number}: is not JSON ({error})") from error
            if not isinstance(row, dict) or column not in row:
                has = f"it has {', '.join(map(str, row))}" if isinstance(row, dict) else "it is no object"
                raise ConfigError(f"dataset.column={column}: {path}, line {number} has no such column; {has}")
            yield check_text(row[column], column, f"{path}, line {number}")


def read_parquet(path: str, column: str) -> Iterator[str]:
    table = prepare_tables({ALL: [path]}, path, CsvForm(), LearnedCache(None, path))
    table.name_columns([table.read_schema(path)])
    if column not in table.names:
        raise ConfigError(f"dataset.column={column}: {path} has no such column; it has {', '.join(table.names)}")
    table.use([column])
    number = 0
    with refuse_unreadable_file(f"dataset.data_dir: {path}"):
        for part, _ in table.read_in_order(path, [column], ROWS):
            for value in part[column].to_pylist():
                number += 1
                yield check_text(value, column, f"{path}, row {number}")


def check_text(value: Any, column: str, where: str) -> str:
    """Returns a text; "" for a missing one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConfigError(f"dataset.column={column}: {where} has a value of type {type(value).__name__}, expected text")
    return value
