"""Rows of CSV files."""

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

#: `kind: auto` takes whole numbers for classes where there are no more different ones.
FEW = 20

#: A column in which so large a part of what is there is numbers is meant to hold numbers.
MOSTLY = 0.9

#: Stands for a quoted field while the fields of a line are counted.
QUOTED = "\x01"

#: A table of more columns has no pattern for a whole line: it would become too large.
MOST_IN_PATTERN = 200

#: Faults that are kept to be named.
NAMED = 10

#: Lines that are read, and rows that are decoded, in one call.
FILES_IN_PARALLEL = 1024
DECODE_BATCH_SIZE = 256


class Csv:
    """One or several CSV files with the same header, a row to an example; quoted fields may not hold line breaks.

    An input is a row of strings, the fields of the columns used with the blanks around them cut off; inside the saved
    model they become numbers (`Columns`). A column is numeric where everything in it is a number or missing. A first
    pass over the files counts the rows, checks them and finds that out, and keeps none of them.

    The target, with `kind: auto`: whole numbers of at most 20 different values, and words, are classes (binary where
    there are two), named in `outputs.names` in their order; other numbers are values to regress to, as they are: a
    target of large numbers needs a learning rate to match, or to be scaled in the file.

    Args:
        data_dir: a file, a glob, or a folder; subfolders `train`, `validation`, `test`, or files whose names begin so,
            are the splits.
        target: the column to predict.
        kind: auto, classification, binary or regression.
        columns: to use as inputs; null means all but the target.
        drop: columns to leave out of those.
        numeric, categorical: columns to take as numbers, or words, whatever they look like.
        missing: what stands for a missing value.
        delimiter: between fields.
        header: the columns' names where the files do not begin with them.
        most_values: how many different words a column, and classes the target, may have.
        test: the part of the rows that is the test split, where names tell of no splits.
        split_seed: decides which part.

    Raises:
        ConfigError: for files or columns that are not there, headers that differ, or an option that makes no sense.
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
        if both := set(as_numeric) & set(as_words):
            raise ConfigError(f"dataset.numeric: {self._table.names[min(both)]} is in dataset.categorical, too")
        learned_on = "train" if "train" in self._files else ALL
        survey = Survey(self._table, self._files[learned_on], self._most)
        self._numeric = [n for n in self._columns if n in as_numeric or (n not in as_words and survey.is_numeric(n))]
        self.outputs = survey.outputs(kind)
        self._surveys = {learned_on: survey}
        self.inputs = Inputs((len(self._columns),), "string")
        names = [self._table.names[n] for n in self._columns]
        places = [self._columns.index(n) for n in self._numeric]
        self.preprocessing = Columns(names, places, form.missing, self._most)

    @property
    def splits(self) -> Collection[str]:
        return list_splits(self._files, self._part)

    def load(self, split: str) -> Stream:
        """Records are (the file's number, the line's in it, the line)."""
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
        """Traced: lines [b] -> (rows [b, columns] of strings, targets [b] or [b, 1])."""
        table, outputs = self._table, self.outputs
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(is_utf8(text)), [NOT_UTF8])]):
            fields = table.fields(text)
        missing = is_missing(fields, table.form.missing)
        target = fields[:, table.target]
        numbers = [*self._numeric, *([table.target] if outputs.kind == "regression" else [])]
        checks = [tf.debugging.Assert(~tf.reduce_any(missing[:, table.target]), ["its target is missing"])]
        if numbers:
            wrong = ~are_numbers(tf.gather(fields, numbers, axis=1)) & ~tf.gather(missing, numbers, axis=1)
            checks.append(tf.debugging.Assert(~tf.reduce_any(wrong), ["a column of numbers has something else"]))
        with tf.control_dependencies(checks):
            return tf.gather(fields, self._columns, axis=1), parse_target_field(outputs, target)


MISSING_KEY = "dataset.missing"
NOT_UTF8 = "it is not UTF-8"


def parse_target_field(outputs: Outputs, target: tf.Tensor) -> tf.Tensor:
    """Traced: the fields [b] of the target -> values [b, 1], or the numbers of their classes."""
    if outputs.kind == "regression":
        return tf.cast(as_numbers(target), tf.float32)[:, None]
    is_class = tf.equal(target[:, None], tf.constant(outputs.names))
    is_known = tf.reduce_any(is_class, axis=1)
    words = ["its target is no class of the training split:", tf.boolean_mask(target, ~is_known)]
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(is_known), words)]):
        label = tf.argmax(tf.cast(is_class, tf.int32), axis=1, output_type=tf.int32)
    return tf.cast(label, tf.float32)[:, None] if outputs.kind == "binary" else label


# ---------------------------------------------------------------------------------------------
# The form of the files
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CsvFormat:
    """How the files are written.

    Attributes:
        delimiter: between fields.
        header: the columns' names; empty where each file begins with them.
        missing: what stands for a missing value.
    """

    delimiter: str
    header: tuple[str, ...]
    missing: tuple[str, ...]


def parse_delimiter(delimiter: Any) -> str:
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\n\r' or not delimiter.isascii():
        raise ConfigError(f'dataset.delimiter={delimiter}: expected a single character, such as ; or "\\t"')
    return delimiter


def read_header(files: dict[str, list[str]], form: CsvFormat) -> tuple[str, ...]:
    """The columns' names, the same in all files."""
    if form.header:
        return form.header
    first, *others = [path for group in files.values() for path in group]
    names = first_line(first, form)
    for path in others:
        found = first_line(path, form)
        if found != names:
            differ = next((f"{b} for {a}" for a, b in zip(names, found, strict=False) if a != b), None)
            said = differ or f"{len(found)} columns for {len(names)}"
            raise ConfigError(f"dataset.data_dir: {path} has another header than {first}: {said}")
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
    """The columns of the files, and how a line is divided into them."""

    def __init__(self, form: CsvFormat, names: Sequence[str], target: Any) -> None:
        self.form = form
        self.names = tuple(names)
        twice = next((name for n, name in enumerate(names) if name in names[:n]), None)
        if twice is not None:
            raise ConfigError(f"dataset.data_dir: two columns are called {twice!r}; name them apart")
        self.target = self.find_column(target, "dataset.target")

    def find_column(self, name: Any, key: str) -> int:
        if name not in self.names:
            raise ConfigError(f"{key}={name}: there is no such column; there is {', '.join(self.names)}")
        return self.names.index(name)

    def choose_inputs(self, columns: Any, drop: Any) -> list[int]:
        """The places of the columns that are inputs."""
        wanted = [self.find_column(name, "dataset.columns") for name in parse_words(columns, "dataset.columns")]
        left = {self.find_column(name, "dataset.drop") for name in parse_words(drop, "dataset.drop")}
        if self.target in wanted:
            raise ConfigError(f"dataset.columns: {self.names[self.target]} is the target")
        found = [n for n in wanted or range(len(self.names)) if n != self.target and n not in left]
        if not found:
            raise ConfigError("dataset.columns: there is no column left beside the target")
        return found

    def find_columns(self, given: Any, key: str, among: Sequence[int]) -> list[int]:
        """The places of columns that an option names."""
        found = [self.find_column(name, key) for name in parse_words(given, key)]
        for n in found:
            if n not in among:
                raise ConfigError(f"{key}: {self.names[n]} is no input column")
        return found

    def lines(self, files: Sequence[str]) -> tf.data.Dataset:
        """(file int64, number of the line int64, line) [b] of all lines that are not blank, the header left out.

        They come as batches of up to `FILES_IN_PARALLEL`: a call to each line would take longer than all else.
        """
        before = 0 if self.form.header else 1

        def read_file(file: tf.Tensor, path: tf.Tensor) -> tf.data.Dataset:
            def number_lines(batch: tf.Tensor, texts: tf.Tensor) -> Any:
                numbers = batch * FILES_IN_PARALLEL + tf.range(tf.shape(texts, tf.int64)[0]) + 1
                is_row = (numbers > before) & (tf.strings.length(tf.strings.strip(texts)) > 0)
                return file + tf.zeros_like(numbers[is_row]), numbers[is_row], texts[is_row]

            return tf.data.TextLineDataset(path).batch(FILES_IN_PARALLEL).enumerate().map(number_lines)

        return interleave_files(files, read_file, block=1)

    def fields(self, lines: tf.Tensor) -> tf.Tensor:
        """Traced: [...] lines -> [..., columns], without the blanks around them."""
        found = tf.io.decode_csv(lines, [[""]] * len(self.names), field_delim=self.form.delimiter)
        return tf.strings.strip(tf.stack(found, axis=-1))

    def is_well_formed(self, lines: tf.Tensor) -> tf.Tensor:
        """Traced: [b] lines -> which of them have a field to each column, their quotes closed, in UTF-8."""
        if len(self.names) > MOST_IN_PATTERN:
            return self._has_closed_fields(lines) & is_utf8(lines)
        letter = rf'[^"{re.escape(self.form.delimiter)}\x{{80}}-\x{{10FFFF}}]*'
        pattern = f"(?s)(?:{letter}{re.escape(self.form.delimiter)}){{{len(self.names) - 1}}}{letter}"
        is_plain = tf.strings.regex_full_match(lines, pattern)
        return check_slowly(is_plain, lines, lambda rest: self._has_closed_fields(rest) & is_utf8(rest))

    def _has_closed_fields(self, lines: tf.Tensor) -> tf.Tensor:
        """Traced: the same of lines with quotes in them."""
        comma = re.escape(self.form.delimiter)
        bare = tf.strings.regex_replace(lines, f'(^|{comma})"(?:[^"]|"")*"', rf"\1{QUOTED}")
        closed = ~tf.strings.regex_full_match(bare, f'(?s).*(?:"|{QUOTED}[^{comma}]).*')
        commas = tf.strings.length(bare) - tf.strings.length(tf.strings.regex_replace(bare, comma, ""))
        return closed & (commas == len(self.names) - 1)

    def reason(self, line: bytes) -> str:
        """What is wrong with a line that is not well formed."""
        try:
            text = line.decode()
            found = next(csv.reader([text], delimiter=self.form.delimiter, strict=True))
        except UnicodeDecodeError:
            return NOT_UTF8
        except csv.Error:
            return UNCLOSED
        if len(found) == len(self.names):
            return UNCLOSED
        return f"it has {len(found)} column(s), expected {len(self.names)}"


UNCLOSED = "its quotes do not match; a field cannot hold a line break, and a quote in a field is written twice"


def is_utf8(strings: tf.Tensor) -> tf.Tensor:
    """Traced: which of the strings are valid UTF-8."""
    return check_slowly(tf.strings.regex_full_match(strings, r"[\x00-\x7F]*"), strings, is_transcoded)


def is_transcoded(strings: tf.Tensor) -> tf.Tensor:
    """Traced: which of the strings are valid UTF-8, by the slower way."""
    return tf.equal(tf.strings.unicode_transcode(strings, "UTF-8", "UTF-8", errors="replace"), strings)


def check_slowly(found: tf.Tensor, strings: tf.Tensor, check: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Traced: [b] what was found, or what a slower check says of those of which nothing was."""
    rest = tf.where(~found)
    return tf.tensor_scatter_nd_update(found, rest, check(tf.gather_nd(strings, rest)))


# ---------------------------------------------------------------------------------------------
# The first pass
# ---------------------------------------------------------------------------------------------


@dataclass
class ColumnSurvey:
    """What one column of the rows that are well formed holds.

    Attributes:
        numbers, others: how many fields are numbers, and how many neither that nor missing.
        missing: how many are.
        first_others, first_missing: the first of these: (file and line, the field).
    """

    numbers: int = 0
    others: int = 0
    missing: int = 0
    first_others: list[tuple[str, str]] = field(default_factory=list)
    first_missing: list[tuple[str, str]] = field(default_factory=list)


class Survey:
    """One pass over files of a split: how many rows, what is wrong with them, what the columns hold.

    Args:
        table: the columns.
        files: of the split.
        most: the different targets that are kept.
    """

    def __init__(self, table: CsvTable, files: Sequence[str], most: int) -> None:
        self.count = 0
        self._table = table
        self._files = files
        self._most = most
        self._columns = [ColumnSurvey() for _ in table.names]
        self._malformed: list[str] = []
        self._targets: dict[bytes, str] = {}  # and where each is first
        for batch in table.lines(files).map(self._inspect, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True):
            self._add(*batch)

    def _inspect(self, file: tf.Tensor, line: tf.Tensor, text: tf.Tensor) -> Any:
        """Traced: (file, line, text, which rows are well formed, their fields, which of these are missing, numbers)."""
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
        for n, found in enumerate(self._columns):
            found.missing += int(missing[:, n].sum())
            found.others += int(others[:, n].sum())
            found.numbers += int((numbers[:, n] & ~missing[:, n]).sum())
            collect_first(found.first_others, others[:, n], rows, place, fields[:, n])
            collect_first(found.first_missing, missing[:, n], rows, place, fields[:, n])
        self._add_targets(fields[:, self._table.target], missing[:, self._table.target], rows, place)

    def _add_targets(self, targets: Any, missing: Any, rows: Any, place: Any) -> None:
        if len(self._targets) > self._most:
            return
        different, numbers = tf.unique(targets)
        _, first = np.unique(numbers, return_index=True)
        for value, index in zip(different.numpy().tolist(), first, strict=True):
            if value not in self._targets and not missing[index]:
                self._targets[value] = place(rows[index])

    def is_numeric(self, n: int) -> bool:
        """Whether a column is one of numbers.

        Raises:
            ConfigError: if nearly all of it is.
        """
        found = self._columns[n]
        if found.others and found.numbers >= MOSTLY * (found.numbers + found.others):
            name = self._table.names[n]
            (where, value), key = found.first_others[0], "kind" if n == self._table.target else "numeric"
            raise ConfigError(
                f"dataset.{key}: the column {name} has {value!r} ({where}), and {found.numbers} of its "
                f"{found.numbers + found.others} values are numbers; add it to dataset.missing, or "
                + (
                    "say what it is with dataset.kind"
                    if key == "kind"
                    else f"put {name} in dataset.numeric (then it is a bad example) or dataset.categorical"
                )
            )
        return not found.others and bool(found.numbers)

    def outputs(self, kind: str) -> Outputs:
        """What the target is."""
        target = self._table.target
        if kind == "regression":
            return Outputs("regression", (1,))
        if kind == "auto" and self.is_numeric(target) and not self._has_few_whole_numbers():
            return Outputs("regression", (1,))
        name = self._table.names[target]
        if len(self._targets) > self._most:
            raise ConfigError(
                f"dataset.target={name}: has more than {self._most} classes; raise dataset.most_values, or name another"
            )
        if len(self._targets) < 2 or (kind == "binary" and len(self._targets) != 2):
            expected = "2" if kind == "binary" else "at least 2"
            raise ConfigError(
                f"dataset.target={name}: has {len(self._targets)} different value(s), expected {expected} classes"
            )
        is_binary = kind == "binary" or (kind == "auto" and len(self._targets) == 2)
        names = tuple(sorted((value.decode() for value in self._targets), key=number_sort_key))
        found: Kind = "binary" if is_binary else "classification"
        return Outputs(found, (1,) if is_binary else (len(names),), names)

    def _has_few_whole_numbers(self) -> bool:
        return len(self._targets) <= FEW and all(re.fullmatch(rb"[+-]?\d+", value) for value in self._targets)

    def faults(self, numeric: Sequence[int], outputs: Outputs) -> tuple[str, ...]:
        """The first rows that are bad examples, in words."""
        target = self._table.target
        name = self._table.names[target]
        found = list(self._malformed)
        found += [f"{where}: its target {name} is missing" for where, _ in self._columns[target].first_missing]
        for n in [*numeric, *([target] if outputs.kind == "regression" else [])]:
            others = self._columns[n].first_others
            found += [f"{where}: {self._table.names[n]} is {value!r}, expected a number" for where, value in others]
        if outputs.names:
            unknown = {value: where for value, where in self._targets.items() if value.decode() not in outputs.names}
            found += [
                f"{where}: its target {name} is {value.decode()!r}, no class of the training split"
                for value, where in unknown.items()
            ]
        return tuple(found[:NAMED])


def collect_first(first: list[tuple[str, str]], chosen: Any, rows: Any, place: Any, fields: Any) -> None:
    """Adds the first of the chosen fields, with their places."""
    for index in chosen.nonzero()[0][: NAMED - len(first)]:
        first.append((place(rows[index]), fields[int(index)].numpy().decode(errors="replace")))


def number_sort_key(name: str) -> tuple[bool, float, str]:
    """Sorts numbers by their value, before words."""
    return (False, float(name), name) if is_number(name) else (True, 0.0, name)
