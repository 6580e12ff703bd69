"""Dataset source: rows of CSV files."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.columns import Columns, are_numbers, as_numbers, is_missing, is_number
from scaleflow.dataset.files import (
    ALL,
    TEST_FRACTION,
    divide_records,
    find_files,
    interleave_files,
    list_splits,
    parse_choice,
    parse_count,
    parse_fraction,
    parse_words,
)
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Kind, Outputs, Stream

SUFFIXES = (".csv", ".tsv")
KINDS = ("auto", "classification", "binary", "regression")
MISSING = ("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?")

#: `kind: auto` treats whole numbers as classes up to this many distinct values.
FEW = 20

#: A column with at least this fraction of numbers, but also other values, is rejected as ambiguous.
MOSTLY = 0.9

#: Replaces each quoted field while the fields of a line are counted.
QUOTED = "\x01"

#: Up to this many columns, one regular expression checks a whole line. For more it would become too large.
MOST_IN_PATTERN = 200

#: Maximum number of faults that are recorded with file and line.
NAMED = 10

#: Lines per batch when reading a file, and rows per call of `decode`.
FILES_IN_PARALLEL = 1024
DECODE_BATCH_SIZE = 256


class Csv:
    """Reads CSV files with the same header, one example per row. Quoted fields must not contain line breaks.

    An input is a row of strings: the fields of the used columns without surrounding blanks. `Columns` converts them
    to numbers inside the saved model. A column is numeric if all its fields are numbers or missing. A first pass over
    the files counts and checks the rows and determines the types of the columns; it stores no rows.

    With `kind: auto`, words and whole numbers of at most 20 distinct values are classes (binary if there are two),
    listed in `outputs.names` in sorted order. Other numbers are regression targets without scaling: large values need
    a suitable learning rate, or scaling in the file.

    Args:
        data_dir: a file, a glob, or a folder. In a folder, subfolders `train`, `validation`, `test`, or files whose
            names begin with these words, are the splits.
        target: the column to predict.
        kind: `auto`, `classification`, `binary` or `regression`.
        columns: input columns; null means all but the target.
        drop: columns to leave out of those.
        numeric, categorical: columns to treat as numbers, or words, whatever they contain.
        missing: strings that mean a missing value.
        delimiter: character between fields.
        header: names of the columns, if the files have no header line.
        most_values: maximum number of distinct words in a column, and of classes.
        test: fraction of the rows in the test split, if file names denote no splits.
        split_seed: selects the test rows.

    Raises:
        ConfigError: if files or columns are missing, headers differ, or an option is invalid.
    """

    def __init__(
        self,
        data_dir: str,
        target: str,
        kind: str = "auto",
        columns: Sequence[str] | None = None,
        drop: Sequence[str] | None = None,
        numeric: Sequence[str] | None = None,
        categorical: Sequence[str] | None = None,
        missing: Sequence[str] = MISSING,
        delimiter: str = ",",
        header: Sequence[str] | None = None,
        most_values: int = 1000,
        test: float = TEST_FRACTION,
        split_seed: int = 0,
    ) -> None:
        parse_choice(kind, "dataset.kind", KINDS)
        self._part = parse_fraction(test)
        self._seed = parse_count(split_seed, "dataset.split_seed")
        self._most = parse_count(most_values, "dataset.most_values", 2)
        self._files = find_files(data_dir, SUFFIXES)
        form = CsvFormat(
            parse_delimiter(delimiter),
            tuple(parse_words(header, "dataset.header")),
            tuple(parse_words(missing, MISSING_KEY)),
        )
        self._table = CsvTable(form, read_header(self._files, form), target)
        self._columns = self._table.choose_inputs(columns, drop)
        as_numeric = self._table.find_columns(numeric, "dataset.numeric", self._columns)
        as_words = self._table.find_columns(categorical, "dataset.categorical", self._columns)
        if conflicts := set(as_numeric) & set(as_words):
            raise ConfigError(
                f"dataset.numeric: {self._table.names[min(conflicts)]} is in dataset.categorical, too; name it in one "
                "of the two"
            )
        learned_on = "train" if "train" in self._files else ALL
        survey = Survey(self._table, self._files[learned_on], self._most)
        self._numeric = [n for n in self._columns if n in as_numeric or (n not in as_words and survey.is_numeric(n))]
        self.outputs = survey.outputs(kind)
        self._surveys = {learned_on: survey}
        self.inputs = Inputs((len(self._columns),), "string")
        names = [self._table.names[n] for n in self._columns]
        numeric_indices = [self._columns.index(n) for n in self._numeric]
        self.preprocessing = Columns(names, numeric_indices, form.missing, self._most)

    @property
    def splits(self) -> Collection[str]:
        return list_splits(self._files, self._part)

    def load(self, split: str) -> Stream:
        """Returns records (file index, line number, line)."""
        group = split if split in self._files else ALL
        if group not in self._surveys:
            self._surveys[group] = Survey(self._table, self._files[group], self._most)
        survey, files = self._surveys[group], self._files[group]
        records, length = self._table.lines(files).unbatch(), survey.count
        records = records.apply(tf.data.experimental.assert_cardinality(length))
        if group == ALL:
            records, length = divide_records(records, length, split, self._part, self._seed)

        def name(file: Any, line: Any, text: Any) -> str:
            return f"{files[int(file)]}, line {int(line)}"

        faults = survey.faults(self._numeric, self.outputs)
        return Stream(records, length, self._decode, name, faults, at_once=DECODE_BATCH_SIZE)

    def _decode(self, file: tf.Tensor, line: tf.Tensor, text: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Decodes lines [b] to (rows [b, columns] of strings, targets [b] or [b, 1]). Traced."""
        table, outputs = self._table, self.outputs
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(is_utf8(text)), [NOT_UTF8])]):
            fields = table.fields(text)
        missing = is_missing(fields, table.form.missing)
        target = fields[:, table.target]
        numbers = [*self._numeric, *([table.target] if outputs.kind == "regression" else [])]
        checks = [tf.debugging.Assert(~tf.reduce_any(missing[:, table.target]), ["its target is missing"])]
        if numbers:
            is_invalid = ~are_numbers(tf.gather(fields, numbers, axis=1)) & ~tf.gather(missing, numbers, axis=1)
            checks.append(
                tf.debugging.Assert(~tf.reduce_any(is_invalid), ["a numeric column has a value that is not a number"])
            )
        with tf.control_dependencies(checks):
            return tf.gather(fields, self._columns, axis=1), parse_target_field(outputs, target)


MISSING_KEY = "dataset.missing"
NOT_UTF8 = "it is not UTF-8"


def parse_target_field(outputs: Outputs, target: tf.Tensor) -> tf.Tensor:
    """Converts target fields [b] to values [b, 1] (regression, binary) or class indices [b]. Traced."""
    if outputs.kind == "regression":
        return tf.cast(as_numbers(target), tf.float32)[:, None]
    is_class = tf.equal(target[:, None], tf.constant(outputs.names))
    is_known = tf.reduce_any(is_class, axis=1)
    message = ["its target is not a class of the training split:", tf.boolean_mask(target, ~is_known)]
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(is_known), message)]):
        label = tf.argmax(tf.cast(is_class, tf.int32), axis=1, output_type=tf.int32)
    return tf.cast(label, tf.float32)[:, None] if outputs.kind == "binary" else label


# ---------------------------------------------------------------------------------------------
# The form of the files
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CsvFormat:
    """Format of the files.

    Attributes:
        delimiter: character between fields.
        header: names of the columns; empty if each file begins with a header line.
        missing: strings that mean a missing value.
    """

    delimiter: str
    header: tuple[str, ...]
    missing: tuple[str, ...]


def parse_delimiter(delimiter: Any) -> str:
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\n\r' or not delimiter.isascii():
        raise ConfigError(f'dataset.delimiter={delimiter}: expected a single character, such as ; or "\\t"')
    return delimiter


def read_header(files: dict[str, list[str]], form: CsvFormat) -> tuple[str, ...]:
    """Returns the names of the columns, which must be the same in all files."""
    if form.header:
        return form.header
    first, *others = [path for group in files.values() for path in group]
    names = first_line(first, form)
    for path in others:
        other_names = first_line(path, form)
        if other_names != names:
            difference = next((f"{b} instead of {a}" for a, b in zip(names, other_names, strict=False) if a != b), None)
            detail = difference or f"{len(other_names)} columns instead of {len(names)}"
            raise ConfigError(f"dataset.data_dir: {path} and {first} have different headers: {detail}")
    return names


def first_line(path: str, form: CsvFormat) -> tuple[str, ...]:
    try:
        with Path(path).open("rb") as file:
            line = file.readline().decode("utf-8-sig").rstrip("\r\n")
        names = tuple(name.strip() for name in next(csv.reader([line], delimiter=form.delimiter, strict=True), ()))
    except csv.Error as error:
        raise ConfigError(f"dataset.data_dir: {path}, line 1: {UNCLOSED}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"dataset.data_dir: {path}, line 1: {NOT_UTF8}") from error
    except OSError as error:
        raise ConfigError(f"dataset.data_dir: {path} cannot be read ({error.strerror})") from error
    if not names:
        raise ConfigError(f"dataset.data_dir: {path} is empty, expected a header in its first line")
    return names


class CsvTable:
    """The columns of the files, and how lines are split into them."""

    def __init__(self, form: CsvFormat, names: Sequence[str], target: Any) -> None:
        self.form = form
        self.names = tuple(names)
        duplicate = next((name for n, name in enumerate(names) if name in names[:n]), None)
        if duplicate is not None:
            raise ConfigError(f"dataset.data_dir: two columns have the name {duplicate!r}; rename one of them")
        self.target = self.find_column(target, "dataset.target")

    def find_column(self, name: Any, key: str) -> int:
        if name not in self.names:
            raise ConfigError(f"{key}={name}: there is no such column; the columns are {', '.join(self.names)}")
        return self.names.index(name)

    def choose_inputs(self, columns: Any, drop: Any) -> list[int]:
        """Returns the indices of the input columns."""
        selected = [self.find_column(name, "dataset.columns") for name in parse_words(columns, "dataset.columns")]
        dropped = {self.find_column(name, "dataset.drop") for name in parse_words(drop, "dataset.drop")}
        if self.target in selected:
            raise ConfigError(
                f"dataset.columns: {self.names[self.target]} is the target, which cannot be an input; remove it"
            )
        inputs = [n for n in selected or range(len(self.names)) if n != self.target and n not in dropped]
        if not inputs:
            raise ConfigError("dataset.columns: no column is left besides the target")
        return inputs

    def find_columns(self, given: Any, key: str, among: Sequence[int]) -> list[int]:
        """Returns the indices of the columns that an option names; all of them must be in `among`."""
        indices = [self.find_column(name, key) for name in parse_words(given, key)]
        for n in indices:
            if n not in among:
                raise ConfigError(f"{key}: {self.names[n]} is not an input column")
        return indices

    def lines(self, files: Sequence[str]) -> tf.data.Dataset:
        """Reads all lines that are not blank, without headers, as (file int64, line number int64, line), each [b].

        They are yielded in batches of up to `FILES_IN_PARALLEL`: a call per line would dominate the run time.
        """
        header_lines = 0 if self.form.header else 1

        def read_file(file: tf.Tensor, path: tf.Tensor) -> tf.data.Dataset:
            def number_lines(batch: tf.Tensor, texts: tf.Tensor) -> Any:
                numbers = batch * FILES_IN_PARALLEL + tf.range(tf.shape(texts, tf.int64)[0]) + 1
                is_row = (numbers > header_lines) & (tf.strings.length(tf.strings.strip(texts)) > 0)
                return file + tf.zeros_like(numbers[is_row]), numbers[is_row], texts[is_row]

            return tf.data.TextLineDataset(path).batch(FILES_IN_PARALLEL).enumerate().map(number_lines)

        return interleave_files(files, read_file, block=1)

    def fields(self, lines: tf.Tensor) -> tf.Tensor:
        """Splits lines [...] into fields [..., columns] without surrounding blanks. Traced."""
        columns = tf.io.decode_csv(lines, [[""]] * len(self.names), field_delim=self.form.delimiter)
        return tf.strings.strip(tf.stack(columns, axis=-1))

    def is_well_formed(self, lines: tf.Tensor) -> tf.Tensor:
        """Returns which lines [b] are UTF-8, with closed quotes and one field per column. Traced."""
        if len(self.names) > MOST_IN_PATTERN:
            return self._has_closed_fields(lines) & is_utf8(lines)
        plain_field = rf'[^"{re.escape(self.form.delimiter)}\x{{80}}-\x{{10FFFF}}]*'
        pattern = f"(?s)(?:{plain_field}{re.escape(self.form.delimiter)}){{{len(self.names) - 1}}}{plain_field}"
        is_plain = tf.strings.regex_full_match(lines, pattern)
        return check_slowly(is_plain, lines, lambda rest: self._has_closed_fields(rest) & is_utf8(rest))

    def _has_closed_fields(self, lines: tf.Tensor) -> tf.Tensor:
        """Returns which lines have closed quotes and one field per column; lines may contain quotes. Traced."""
        delimiter = re.escape(self.form.delimiter)
        bare = tf.strings.regex_replace(lines, f'(^|{delimiter})"(?:[^"]|"")*"', rf"\1{QUOTED}")
        closed = ~tf.strings.regex_full_match(bare, f'(?s).*(?:"|{QUOTED}[^{delimiter}]).*')
        delimiters = tf.strings.length(bare) - tf.strings.length(tf.strings.regex_replace(bare, delimiter, ""))
        return closed & (delimiters == len(self.names) - 1)

    def reason(self, line: bytes) -> str:
        """Explains why a line is not well formed."""
        try:
            text = line.decode()
            fields = next(csv.reader([text], delimiter=self.form.delimiter, strict=True))
        except UnicodeDecodeError:
            return NOT_UTF8
        except csv.Error:
            return UNCLOSED
        if len(fields) == len(self.names):
            return UNCLOSED
        return f"it has {len(fields)} column(s), expected {len(self.names)}"


UNCLOSED = "its quotes do not match; a field cannot contain a line break, and a quote in a field is written twice"


def is_utf8(strings: tf.Tensor) -> tf.Tensor:
    """Returns which strings are valid UTF-8, with a fast path for ASCII. Traced."""
    return check_slowly(tf.strings.regex_full_match(strings, r"[\x00-\x7F]*"), strings, is_transcoded)


def is_transcoded(strings: tf.Tensor) -> tf.Tensor:
    """Returns which strings are valid UTF-8, without the fast path. Traced."""
    return tf.equal(tf.strings.unicode_transcode(strings, "UTF-8", "UTF-8", errors="replace"), strings)


def check_slowly(found: tf.Tensor, strings: tf.Tensor, check: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Returns `found` [b], after a slower check of the strings for which it is False. Traced."""
    rest = tf.where(~found)
    return tf.tensor_scatter_nd_update(found, rest, check(tf.gather_nd(strings, rest)))


# ---------------------------------------------------------------------------------------------
# The first pass
# ---------------------------------------------------------------------------------------------


@dataclass
class ColumnSurvey:
    """Counts of the fields of one column, over all well-formed rows.

    Attributes:
        numbers, others: fields that are numbers, and fields that are neither numbers nor missing.
        missing: missing fields.
        first_others, first_missing: the first of these, as (file and line, field).
    """

    numbers: int = 0
    others: int = 0
    missing: int = 0
    first_others: list[tuple[str, str]] = field(default_factory=list)
    first_missing: list[tuple[str, str]] = field(default_factory=list)


class Survey:
    """One pass over the files of a split: counts the rows, finds faults, and determines what the columns contain.

    Args:
        table: the columns.
        files: of the split.
        most: once there are more distinct targets than this, no more are recorded.
    """

    def __init__(self, table: CsvTable, files: Sequence[str], most: int) -> None:
        self.count = 0
        self._table = table
        self._files = files
        self._most = most
        self._columns = [ColumnSurvey() for _ in table.names]
        self._malformed: list[str] = []
        self._targets: dict[bytes, str] = {}  # -> file and line of the first occurrence
        for batch in table.lines(files).map(self._inspect, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True):
            self._add(*batch)

    def _inspect(self, file: tf.Tensor, line: tf.Tensor, text: tf.Tensor) -> Any:
        """Checks lines [b]. Traced.

        Returns:
            (file, line, text, is well formed) [b], and (fields, is missing, is a number) [well-formed lines,
                columns].
        """
        good = self._table.is_well_formed(text)
        fields = self._table.fields(tf.boolean_mask(text, good))
        return file, line, text, good, fields, is_missing(fields, self._table.form.missing), are_numbers(fields)

    def _add(self, file: Any, line: Any, text: Any, good: Any, fields: Any, missing: Any, numbers: Any) -> None:
        good, missing, numbers = good.numpy(), missing.numpy(), numbers.numpy()
        self.count += len(good)
        file, line = file.numpy(), line.numpy()

        def place(row: int) -> str:
            return f"{self._files[file[row]]}, line {line[row]}"

        for row in (~good).nonzero()[0][: NAMED - len(self._malformed)]:
            self._malformed.append(f"{place(row)}: {self._table.reason(text[int(row)].numpy())}")
        rows = good.nonzero()[0]
        others = ~missing & ~numbers
        for n, column in enumerate(self._columns):
            column.missing += int(missing[:, n].sum())
            column.others += int(others[:, n].sum())
            column.numbers += int((numbers[:, n] & ~missing[:, n]).sum())
            collect_first(column.first_others, others[:, n], rows, place, fields[:, n])
            collect_first(column.first_missing, missing[:, n], rows, place, fields[:, n])
        self._add_targets(fields[:, self._table.target], missing[:, self._table.target], rows, place)

    def _add_targets(self, targets: Any, missing: Any, rows: Any, place: Any) -> None:
        if len(self._targets) > self._most:
            return
        values, occurrences = tf.unique(targets)
        _, first = np.unique(occurrences, return_index=True)
        for value, index in zip(values.numpy().tolist(), first, strict=True):
            if value not in self._targets and not missing[index]:
                self._targets[value] = place(rows[index])

    def is_numeric(self, n: int) -> bool:
        """Returns whether all fields of a column are numbers or missing.

        Raises:
            ConfigError: if nearly all of them are numbers, but not all.
        """
        column = self._columns[n]
        if column.others and column.numbers >= MOSTLY * (column.numbers + column.others):
            name = self._table.names[n]
            (where, value), key = column.first_others[0], "kind" if n == self._table.target else "numeric"
            raise ConfigError(
                f"dataset.{key}: the column {name} has {value!r} ({where}), and {column.numbers} of its "
                f"{column.numbers + column.others} values are numbers; add this value to dataset.missing, or "
                + (
                    "set dataset.kind"
                    if key == "kind"
                    else f"add {name} to dataset.numeric (the value is then a bad example) or dataset.categorical"
                )
            )
        return not column.others and bool(column.numbers)

    def outputs(self, kind: str) -> Outputs:
        """Describes the target; raises `ConfigError` if its values do not fit `kind`."""
        target = self._table.target
        if kind == "regression":
            return Outputs("regression", (1,))
        if kind == "auto" and self.is_numeric(target) and not self._has_few_whole_numbers():
            return Outputs("regression", (1,))
        name = self._table.names[target]
        if len(self._targets) > self._most:
            raise ConfigError(
                f"dataset.target={name}: has more than {self._most} classes; raise dataset.most_values, or choose "
                "another target"
            )
        if len(self._targets) < 2 or (kind == "binary" and len(self._targets) != 2):
            expected = "2" if kind == "binary" else "at least 2"
            raise ConfigError(
                f"dataset.target={name}: has {len(self._targets)} different value(s), expected {expected} classes"
            )
        is_binary = kind == "binary" or (kind == "auto" and len(self._targets) == 2)
        names = tuple(sorted((value.decode() for value in self._targets), key=number_sort_key))
        resolved_kind: Kind = "binary" if is_binary else "classification"
        return Outputs(resolved_kind, (1,) if is_binary else (len(names),), names)

    def _has_few_whole_numbers(self) -> bool:
        return len(self._targets) <= FEW and all(re.fullmatch(rb"[+-]?\d+", value) for value in self._targets)

    def faults(self, numeric: Sequence[int], outputs: Outputs) -> tuple[str, ...]:
        """Describes the first rows that are bad examples."""
        target = self._table.target
        name = self._table.names[target]
        messages = list(self._malformed)
        messages += [f"{where}: its target {name} is missing" for where, _ in self._columns[target].first_missing]
        for n in [*numeric, *([target] if outputs.kind == "regression" else [])]:
            others = self._columns[n].first_others
            messages += [f"{where}: {self._table.names[n]} is {value!r}, expected a number" for where, value in others]
        if outputs.names:
            unknown = {value: where for value, where in self._targets.items() if value.decode() not in outputs.names}
            messages += [
                f"{where}: its target {name} is {value.decode()!r}, which is not a class of the training split"
                for value, where in unknown.items()
            ]
        return tuple(messages[:NAMED])


def collect_first(first: list[tuple[str, str]], chosen: Any, rows: Any, place: Any, fields: Any) -> None:
    """Appends the first of the chosen fields, with file and line, up to `NAMED` in all."""
    for index in chosen.nonzero()[0][: NAMED - len(first)]:
        first.append((place(rows[index]), fields[int(index)].numpy().decode(errors="replace")))


def number_sort_key(name: str) -> tuple[bool, float, str]:
    """Returns a sort key: numbers by value, then words."""
    return (False, float(name), name) if is_number(name) else (True, 0.0, name)
