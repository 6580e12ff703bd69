"""The formats of table files by suffix, and the form of CSV files. Imports pyarrow only if needed, TensorFlow never."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError

#: Suffix of a file -> pyarrow's name of its format.
FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".feather": "feather",
    ".arrow": "feather",
    ".jsonl": "json",
    ".ndjson": "json",
}


#: Delimiters that are recognised, and the number of lines and bytes at the start of a file that are examined.
DELIMITERS = ";\t|"
FIRST_LINES = 20
SAMPLE = 1 << 16

#: The first line of some CSV files from Excel, which declares the delimiter.
SEPARATOR_LINE = re.compile(r'"?sep=([^"\n\r])"?', re.IGNORECASE)


def find_format(path: str, key: str) -> str:
    """Returns the format of a file from its last known suffix, also for `a.csv.gz` or `train.parquet-00000`.

    Raises ConfigError if it has no known suffix. `key` starts the message.
    """
    for suffix in reversed(Path(path).suffixes):
        name = FORMATS.get(suffix.lower().partition("-")[0])
        if name:
            return name
    raise ConfigError(
        f"{key}: {path} does not end in {', '.join(FORMATS)}; save a table in one of these formats, other data, such "
        "as sound, as arrays in an .npz file"
    )


@dataclass(frozen=True)
class CsvForm:
    """The form of CSV files."""

    delimiter: str | None = None  # between the fields; None: a tab in `.tsv` files, a comma in others
    #: Names of the columns of files without a header line. A header line with all of these names is recognised.
    header: tuple[str, ...] = ()
    encoding: str = "utf8"
    missing: tuple[str, ...] = ()  # the strings that mean a missing value
    has_separator_line: bool = False  # whether Excel's line, such as `sep=;`, precedes the header

    def delimiter_of(self, path: str) -> str:
        return self.delimiter or ("\t" if ".tsv" in Path(path).name.lower() else ",")

    def recognise(self, stream: Any, path: str) -> CsvForm:
        """Returns the form with the delimiter of the file's first lines, and detects a first line such as `sep=;`.

        A delimiter that the user set stays. Otherwise the suffix's usual delimiter stays, unless another one divides
        all examined lines into the same, larger number of fields. `stream` has the bytes of the file. Raises
        ValueError for UTF-16.
        """
        start = stream.read(SAMPLE)
        if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise ValueError("it is UTF-16, which pyarrow cannot read in parts; save it as UTF-8")
        text = start.decode(self.encoding, "replace").removeprefix("\ufeff")
        lines = (text.rpartition("\n")[0] or text).splitlines()
        separator = SEPARATOR_LINE.fullmatch(lines[0]) if lines else None
        if separator is not None:
            return replace(self, delimiter=self.delimiter or separator[1], has_separator_line=True)
        if self.delimiter is not None:
            return self

        def count_fields(delimiter: str) -> int:
            counts = {len(row) for row in csv.reader(lines[:FIRST_LINES], delimiter=delimiter) if row}
            if len(counts) == 1 or delimiter == usual:
                return min(counts, default=1)
            return 1

        usual = self.delimiter_of(path)
        best = max((usual, *DELIMITERS), key=count_fields)
        return self if best == usual else replace(self, delimiter=best)

    def read_first_fields(self, stream: Any, path: str) -> list[str]:
        """Returns the fields of the first row of a file. `stream` has its bytes.

        Does not use pyarrow's reader, which reads ahead and can abort or hang if it is closed before the end. Raises
        ValueError if the file is empty, or is not text in this form.
        """
        is_utf8 = codecs.lookup(self.encoding).name == "utf-8"
        text = io.TextIOWrapper(stream, "utf-8-sig" if is_utf8 else self.encoding, newline="")
        if self.has_separator_line:
            text.readline()
        rows = csv.reader(text, delimiter=self.delimiter_of(path))
        try:
            first = next((row for row in rows if row), None)
        except csv.Error as error:
            raise ValueError(str(error)) from error
        except UnicodeDecodeError as error:
            raise ValueError(f"invalid {self.encoding.upper()} at byte {error.start}") from error
        if first is None:
            raise ValueError("the file is empty")
        return first

    def parse_options(self, path: str, note: Callable[[Any, str], None]) -> Any:
        """Returns pyarrow's options for a file, which leave out rows with a wrong number of fields.

        `note` gets the number of each such row, counted from 1 with the header line, and the reason.
        """
        from pyarrow.csv import ParseOptions

        def leave_out(row: Any) -> str:
            note(row.number, f"it has {row.actual_columns} field(s), expected {row.expected_columns}")
            return "skip"

        return ParseOptions(delimiter=self.delimiter_of(path), newlines_in_values=True, invalid_row_handler=leave_out)

    def check(self, path: str, format_name: str) -> None:
        """Raises ConfigError for invalid options, and for options of CSV if the file has another format."""
        delimiter = self.delimiter
        encoding = self.encoding
        if delimiter is not None and not (isinstance(delimiter, str) and re.fullmatch(r'[^"\n\r]', delimiter, re.A)):
            raise ConfigError(f'dataset.delimiter={delimiter}: expected a single character, such as ; or "\\t"')
        try:
            is_known = codecs.encode('a\n"', encoding) == b'a\n"'
        except (LookupError, TypeError):
            is_known = False
        if not is_known:
            raise ConfigError(f"dataset.encoding={encoding}: expected an encoding that contains ASCII, such as latin-1")
        for key in ("delimiter", "header", "encoding"):
            if format_name != "csv" and getattr(self, key) != getattr(CsvForm(), key):
                raise ConfigError(f"dataset.{key}={getattr(self, key)}: {path} is no CSV file; leave it out")


@contextlib.contextmanager
def refuse_unreadable_file(label: str) -> Iterator[None]:
    """Converts pyarrow's errors in a `with` block to ConfigError. `label` starts the message."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{label} cannot be read: {explain_arrow_error(error)}") from error


def explain_arrow_error(error: Exception) -> str:
    """Returns the reason in a pyarrow error, without the surrounding path and advice."""
    line = str(error).strip().partition("\n")[0]
    reason = re.split(r"Invalid: |'\): ", line)[-1].strip() or "pyarrow gives no reason"
    return reason + ("; name its encoding, such as dataset.encoding=latin-1" if "invalid UTF" in reason else "")
