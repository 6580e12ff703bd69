"""The formats of table files, by their suffixes, and the form of CSV files. Imports neither TensorFlow nor pyarrow."""

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


#: Delimiters that are recognised, in so many of the first lines, in so many bytes.
DELIMITERS = ";\t|"
FIRST_LINES = 20
SAMPLE = 1 << 16

#: What Excel writes in the first line to name the delimiter.
SEPARATOR_LINE = re.compile(r'"?sep=([^"\n\r])"?', re.IGNORECASE)


def find_format(path: str, key: str) -> str:
    """Returns the format by the last suffix that denotes one, as of `a.csv.gz` or `train.parquet-00000`.

    Raises ConfigError, which names `key`, if no suffix does.
    """
    for suffix in reversed(Path(path).suffixes):
        if name := FORMATS.get(suffix.lower().partition("-")[0]):
            return name
    raise ConfigError(
        f"{key}: {path} does not end in {', '.join(FORMATS)}; save a table in one of these formats, other data, such "
        "as sound, as arrays in an .npz file"
    )


@dataclass(frozen=True)
class CsvForm:
    """The form of CSV files."""

    delimiter: str | None = None  # between the fields; None: a tab in `.tsv` files, a comma in others
    #: Names of the columns, if the files have no header line. A header line with all of these names is recognised.
    header: tuple[str, ...] = ()
    encoding: str = "utf8"
    missing: tuple[str, ...] = ()  # the strings that mean a missing value
    has_separator_line: bool = False  # whether a line such as `sep=;`, which Excel writes, is before the header

    def delimiter_of(self, path: str) -> str:
        return self.delimiter or ("\t" if ".tsv" in Path(path).name.lower() else ",")

    def recognise(self, stream: Any, path: str) -> CsvForm:
        """Returns the form with the delimiter that the first lines have, if none is given, and whether a line `sep=;`
        is the first. `stream` has the bytes of the file. The usual delimiter is not replaced unless another one fits.
        """
        start = stream.read(SAMPLE)
        if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise ValueError("it is UTF-16, which pyarrow cannot read in parts; save it as UTF-8")
        text = start.decode(self.encoding, "replace").removeprefix("\ufeff")
        lines = (text.rpartition("\n")[0] or text).splitlines()
        if lines and (found := SEPARATOR_LINE.fullmatch(lines[0])):
            return replace(self, delimiter=self.delimiter or found[1], has_separator_line=True)
        if self.delimiter is not None:
            return self

        def count_fields(delimiter: str) -> int:
            counts = {len(row) for row in csv.reader(lines[:FIRST_LINES], delimiter=delimiter) if row}
            return min(counts) if len(counts) == 1 else min(counts, default=1) if delimiter == usual else 1

        usual = self.delimiter_of(path)
        best = max((usual, *DELIMITERS), key=count_fields)
        return self if best == usual else replace(self, delimiter=best)

    def read_first_fields(self, stream: Any, path: str) -> list[str]:
        """Returns the fields of the first row of a file, of which `stream` yields the bytes.

        pyarrow's reader is not used: it reads ahead, and can abort or hang if it is closed before the end.

        Raises ValueError if the file is empty, or is not text in this form.
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
        """Returns pyarrow's options for a file. Rows with a wrong number of fields are left out; `note` gets the number
        of each, counted from 1 with the header line, and what is wrong with it.
        """
        from pyarrow.csv import ParseOptions

        def leave_out(row: Any) -> str:
            note(row.number, f"it has {row.actual_columns} field(s), expected {row.expected_columns}")
            return "skip"

        return ParseOptions(delimiter=self.delimiter_of(path), newlines_in_values=True, invalid_row_handler=leave_out)

    def check(self, path: str, format_name: str) -> None:
        """Rejects options that are wrong, or that a file does not need."""
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
    """Raises pyarrow's errors as ConfigError, whose message begins with `label`."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{label} cannot be read: {explain_arrow_error(error)}") from error


def explain_arrow_error(error: Exception) -> str:
    """Returns pyarrow's reason, without the path and the advice that it puts around it."""
    line = str(error).strip().partition("\n")[0]
    reason = re.split(r"Invalid: |'\): ", line)[-1].strip() or "pyarrow gives no reason"
    return reason + ("; name its encoding, such as dataset.encoding=latin-1" if "invalid UTF" in reason else "")
