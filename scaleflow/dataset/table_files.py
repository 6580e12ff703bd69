"""Reads tables from files with pyarrow: CSV, TSV, Parquet, Feather, Arrow and JSON lines.

pyarrow is imported inside the functions, because only this dataset needs it.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaleflow.dataset.files import find_files
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

#: A column of a CSV file with at least this fraction of numbers, but also other values, is rejected as ambiguous.
MOSTLY = 0.9

#: A whole field that is a number, and one that is a whole number.
IS_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?$"
IS_WHOLE = r"^[+-]?[0-9]{1,18}$"


@dataclass(frozen=True)
class CsvForm:
    """The form of CSV files.

    Attributes:
        delimiter: between the fields; None: a tab in `.tsv` files, a comma in others.
        header: names of the columns, if the files have no header line.
        encoding: of the text.
    """

    delimiter: str | None
    header: tuple[str, ...]
    encoding: str

    def check(self, path: str, format_name: str) -> None:
        """Rejects options that are wrong, or that a file does not need."""
        delimiter, encoding = self.delimiter, self.encoding
        if delimiter is not None and not (isinstance(delimiter, str) and re.fullmatch(r'[^"\n\r]', delimiter, re.A)):
            raise ConfigError(f'dataset.delimiter={delimiter}: expected a single character, such as ; or "\\t"')
        try:
            codecs.lookup(encoding)
        except (LookupError, TypeError) as error:
            raise ConfigError(f"dataset.encoding={encoding}: expected an encoding such as latin-1") from error
        for key in ("delimiter", "header", "encoding"):
            if format_name != "csv" and getattr(self, key) != getattr(PLAIN_CSV, key):
                raise ConfigError(f"dataset.{key}={getattr(self, key)}: {path} is no CSV file; leave it out")

    def options(self, path: str) -> dict[str, Any]:
        """Returns pyarrow's options for a file."""
        from pyarrow import csv

        delimiter = self.delimiter or ("\t" if ".tsv" in Path(path).name.lower() else ",")
        return {
            "read_options": csv.ReadOptions(column_names=list(self.header) or None, encoding=self.encoding),
            "parse_options": csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        }


PLAIN_CSV = CsvForm(None, (), "utf8")


@dataclass(frozen=True)
class TableFiles:
    """Files with the same columns.

    Attributes:
        by_split: the files of each split, or all of them as `all`.
        format: pyarrow's name of their format.
        csv: the form of CSV files.
        names: of the columns.
    """

    by_split: dict[str, list[str]]
    format: str
    csv: CsvForm
    names: tuple[str, ...]

    def read(self, split: str, columns: Sequence[str]) -> tuple[Any, list[tuple[str, int]]]:
        """Returns the columns of a split as a `pyarrow.Table`, and each file with its number of rows.

        The columns of a CSV file are strings.
        """
        import pyarrow

        read = [(path, read_file(path, self.format, self.csv, columns)) for path in self.by_split[split]]
        first, *others = read
        table = first[1]
        for path, other in others:
            try:
                table = pyarrow.concat_tables([table, other], promote_options="permissive")
            except pyarrow.ArrowException as error:
                raise ConfigError(
                    f"dataset.data_dir: {path} and {first[0]} have different columns: {explain(error)}; write both "
                    "with the same types, or leave the column out with dataset.drop"
                ) from error
        return table, [(path, part.num_rows) for path, part in read]


def open_tables(data_dir: Any, form: CsvForm) -> TableFiles:
    """Finds the files and checks that they have one format and the same columns."""
    by_split = find_files(data_dir, tuple(FORMATS))
    first, *others = [path for paths in by_split.values() for path in paths]
    format_name = format_of(first)
    form.check(first, format_name)
    names = read_names(first, format_name, form)
    for path in others:
        if format_of(path) != format_name:
            raise ConfigError(f"dataset.data_dir: {path} and {first} have different formats; use one of them")
        other_names = read_names(path, format_name, form)
        if sorted(other_names) != sorted(names):
            only = sorted(set(other_names) ^ set(names))
            raise ConfigError(
                f"dataset.data_dir: {path} and {first} have different columns: {', '.join(only)} is in one of them only"
            )
    return TableFiles(by_split, format_name, form, names)


def format_of(path: str) -> str:
    """Returns the format by the last suffix that denotes one, as of `a.csv.gz` or `train.parquet-00000`."""
    for suffix in reversed(Path(path).suffixes):
        if name := FORMATS.get(suffix.lower().partition("-")[0]):
            return name
    raise ConfigError(f"dataset.data_dir: {path} does not end in {', '.join(FORMATS)}; rename it")


def read_names(path: str, format_name: str, form: CsvForm) -> tuple[str, ...]:
    """Returns the names of the columns of a file."""
    from pyarrow import csv, dataset

    with refuse_unreadable_file(path):
        if format_name == "csv":
            with csv.open_csv(path, **form.options(path)) as file:
                names = tuple(file.schema.names)
        else:
            names = tuple(dataset.dataset(path, format=format_name).schema.names)
    if duplicate := next((name for n, name in enumerate(names) if name in names[:n]), None):
        raise ConfigError(f"dataset.data_dir: {path}: two columns have the name {duplicate!r}; rename one of them")
    return names


def read_file(path: str, format_name: str, form: CsvForm, columns: Sequence[str]) -> Any:
    """Reads columns of a file as a `pyarrow.Table`; those of a CSV file are strings."""
    import pyarrow
    from pyarrow import csv, dataset

    with refuse_unreadable_file(path):
        if format_name != "csv":
            return dataset.dataset(path, format=format_name).to_table(columns=list(columns))
        # Not as a dataset, which does not recognise .zst.
        texts = csv.ConvertOptions(include_columns=list(columns), column_types=dict.fromkeys(columns, pyarrow.string()))
        return csv.read_csv(path, convert_options=texts, **form.options(path))


@contextlib.contextmanager
def refuse_unreadable_file(path: str) -> Iterator[None]:
    """Raises pyarrow's errors as ConfigError."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"dataset.data_dir: {path} cannot be read: {explain(error)}") from error


def explain(error: Exception) -> str:
    """Returns pyarrow's reason, without the path and the advice that it puts around it."""
    line = str(error).strip().partition("\n")[0]
    return re.split(r"Invalid: |'\): ", line)[-1].strip() or "pyarrow gives no reason"


# ---------------------------------------------------------------------------------------------
# Types
# ---------------------------------------------------------------------------------------------


def clean_column(column: Any, missing: Sequence[str]) -> Any:
    """Returns a column without pyarrow's encodings: text is a trimmed `string`, and is null if it means missing."""
    import pyarrow
    from pyarrow import compute, types

    if types.is_dictionary(column.type):
        column = compute.cast(column, column.type.value_type)
    is_text = types.is_string(column.type) or types.is_large_string(column.type) or types.is_string_view(column.type)
    if not is_text:
        return column
    text = compute.utf8_trim_whitespace(compute.cast(column, pyarrow.string()))
    is_missing = compute.is_in(text, value_set=pyarrow.array(list(missing), pyarrow.string()))
    return compute.if_else(is_missing, pyarrow.scalar(None, pyarrow.string()), text)


def infer_type(name: str, text: Any, place: Any, ways: str) -> Any:
    """Converts a clean column of a CSV file to numbers, booleans or dates, if all of its values are; else returns it.

    Args:
        name: of the column.
        text: `string` values; null is missing.
        place: names a row in a message.
        ways: what to do about a column whose values are nearly all numbers, for the message.

    Raises:
        ConfigError: if nearly all values are numbers, but not all.
    """
    import pyarrow
    from pyarrow import compute

    present = compute.drop_null(text)
    if not len(present):
        return text
    is_number = compute.match_substring_regex(present, IS_NUMBER)
    count = compute.sum(is_number).as_py()
    if count == len(present):
        is_whole = compute.all(compute.match_substring_regex(present, IS_WHOLE)).as_py()
        return parse_numbers(text, pyarrow.int64() if is_whole else pyarrow.float64())
    if count >= MOSTLY * len(present):
        value = present[compute.index(is_number, False).as_py()]
        raise ConfigError(
            f"dataset.data_dir: the column {name} has {value.as_py()!r} ({place(compute.index(text, value).as_py())}), "
            f"and {count} of its {len(present)} values are numbers; add this value to dataset.missing, or {ways}"
        )
    for wanted in (pyarrow.bool_(), pyarrow.timestamp("us"), pyarrow.timestamp("us", "UTC")):
        try:
            return compute.cast(text, wanted)
        except pyarrow.ArrowInvalid:
            continue
    return text


def parse_numbers(text: Any, wanted: Any) -> Any:
    """Converts clean text, all of which are numbers or null, to a type."""
    from pyarrow import compute

    return compute.cast(compute.replace_substring_regex(text, r"^\+", ""), wanted)
