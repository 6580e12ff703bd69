"""Dataset source: tables in CSV, Parquet, Feather or JSON lines files, with an input for each column."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.files import (
    ALL,
    TEST_FRACTION,
    draw_test_examples,
    list_splits,
    parse_choice,
    parse_count,
    parse_flag,
    parse_fraction,
    parse_words,
)
from scaleflow.dataset.table_columns import Category, Date, Number, WordBag
from scaleflow.dataset.table_files import IS_NUMBER, CsvForm, clean_column, infer_type, open_tables
from scaleflow.dataset.table_values import (
    CATEGORY,
    CONVERSIONS,
    DATE,
    EXPECTED,
    NUMBER,
    TEXT,
    Array,
    convert_target,
    is_numeric,
    to_classes,
    to_numbers,
)
from scaleflow.dataset.text import Text
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Examples, Inputs, Kind, Outputs, Preprocessing, Stream

#: The keys that say what columns are taken for.
KEYS = {NUMBER: "dataset.numeric", CATEGORY: "dataset.categorical", TEXT: "dataset.text"}

KINDS = ("auto", "classification", "binary", "regression")
MISSING = ("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?")

#: `kind: auto` treats whole numbers as classes up to this many distinct values.
FEW = 20

#: Maximum number of faults that are recorded with file and row.
NAMED = 10

#: Rows per call of `decode`.
DECODE_BATCH_SIZE = 256

#: A column of strings is text if its values have at least this many words on average, and more than a share of them
#: is different.
TEXT_WORDS, TEXT_DIFFERENT = 3, 0.5

#: Words of a text for embeddings, if `tokens` is null.
TOKENS = 50

#: The most columns of a kind that the note names.
MOST_NAMED = 12


class Table:
    """Reads tables, one example per row, one input per column.

    An input is a number (float32, NaN is missing), or a string ("" is missing): a category, a text, or a date as
    `2024-01-31T23:59:59`. `Number`, `Category`, `WordBag` or `Text`, and `Date` convert them inside the saved model.
    Types are those of the file; in a CSV file, a column has the type that all its values have. The rows are kept in
    memory.

    Args:
        data_dir: a file, a glob, or a folder. In a folder, subfolders `train`, `validation`, `test`, or files whose
            names begin with these words, are the splits.
        target: the column to predict.
        kind: `auto`, `classification`, `binary` or `regression`. With `auto`, words, booleans and whole numbers of at
            most 20 distinct values are classes, and other numbers are regression targets.
        columns: input columns; null means all but the target.
        drop: columns that are not read.
        numeric, categorical, text: columns to treat as such, whatever their type is.
        missing: strings that mean a missing value.
        delimiter: character between the fields of a CSV file; null: a comma, or a tab in a `.tsv` file.
        header: names of the columns of CSV files without a header line.
        encoding: of the text of CSV files.
        most_values: maximum number of distinct words in a categorical column, and of classes.
        vocabulary: maximum number of different words of a text column.
        embed: give categories and texts as numbers of words, for a model with embeddings, such as `dlrm`.
        tokens: with `embed`, the words of a text that are kept; null: 50.
        scale_target: of a regression: compute the training loss on targets with mean 0 and deviation 1.
        test: fraction of the rows in the test split, if file names denote no splits.
        split_seed: selects the test rows.

    Raises:
        ConfigError: if files or columns are missing or do not fit, or an option is invalid.
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
        text: Sequence[str] | None = None,
        missing: Sequence[str] = MISSING,
        delimiter: str | None = None,
        header: Sequence[str] | None = None,
        encoding: str = "utf8",
        most_values: int = 1000,
        vocabulary: int = 1000,
        embed: bool = False,
        tokens: int | None = None,
        scale_target: bool = True,
        test: float = TEST_FRACTION,
        split_seed: int = 0,
    ) -> None:
        parse_choice(kind, "dataset.kind", KINDS)
        self._test = parse_fraction(test)
        self._seed = parse_count(split_seed, "dataset.split_seed")
        self._most = parse_count(most_values, "dataset.most_values", 2)
        self._missing = parse_words(missing, "dataset.missing")
        is_scaled = parse_flag(scale_target, "dataset.scale_target")
        words = parse_count(vocabulary, "dataset.vocabulary", 3)
        length = parse_tokens(tokens, parse_flag(embed, "dataset.embed"))
        self._files = open_tables(data_dir, CsvForm(delimiter, tuple(parse_words(header, "dataset.header")), encoding))
        self._target = target
        names = choose_columns(self._files.names, target, columns, drop)
        given = parse_column_kinds(names, {NUMBER: numeric, CATEGORY: categorical, TEXT: text})
        self._columns = [*names, target]
        self._rows: dict[str, Rows] = {}
        rows = self._read("train" if "train" in self._files.by_split else ALL)
        if not len(rows):
            raise ConfigError(f"dataset.data_dir={data_dir}: the files of the training split have no rows")
        check_column_types(rows, given)
        self.outputs = describe_target(rows, target, kind, self._most, is_scaled)
        self._kinds = {name: given.get(name) or choose_kind(rows, name, self._most) for name in names}
        self.inputs = {
            name: Inputs((), "float32" if each == NUMBER else "string") for name, each in self._kinds.items()
        }
        self.preprocessing = {
            name: make_preprocessing(name, each, embed, words, length) for name, each in self._kinds.items()
        }
        self.notes = (describe_columns(self._kinds, target, self.outputs),)

    @property
    def splits(self) -> Collection[str]:
        return list_splits(self._files.by_split, self._test)

    def load(self, split: str) -> Examples:
        """Returns the rows of a split; as a stream if some of them cannot be used, so that these can be left out."""
        rows = self._read(split if split in self._files.by_split else ALL)
        reasons: dict[int, str] = {}

        def take(name: str, values: Array, is_bad: Array, expected: str) -> Array:
            column, label = rows.columns[name], f"its target {name}" if name == self._target else name
            for row in np.flatnonzero(is_bad):
                value = column[int(row)].as_py()
                problem = "is missing" if value is None or value != value else f"is {value}, expected {expected}"
                reasons.setdefault(int(row), f"{label} {problem}")
            return values

        targets = take(self._target, *convert_target(rows.columns[self._target], self.outputs))
        inputs = {
            name: take(name, *CONVERSIONS[kind](rows.columns[name]), EXPECTED[kind])
            for name, kind in self._kinds.items()
        }
        chosen = np.arange(len(rows))
        if split not in self._files.by_split:
            chosen = np.flatnonzero(draw_test_examples(len(rows), self._test, self._seed) == (split == "test"))
        arrays = Arrays(inputs, targets).map(lambda array: array[chosen])
        return stream_rows(arrays, rows, chosen, reasons) if not reasons.keys().isdisjoint(chosen.tolist()) else arrays

    def _read(self, group: str) -> Rows:
        if group not in self._rows:
            table, files = self._files.read(group, self._columns)
            columns = {name: clean_column(table[name], self._missing) for name in self._columns}
            self._rows[group] = Rows(columns, files, self._files.format == "csv")
        return self._rows[group]


@dataclass(frozen=True)
class Rows:
    """The used columns of some files.

    Attributes:
        columns: by name, as `clean_column` returns them.
        files: each file with the number of its rows.
        is_text: whether all columns are strings, whose types are to be inferred.
    """

    columns: Mapping[str, Any]
    files: Sequence[tuple[str, int]]
    is_text: bool

    def __len__(self) -> int:
        return sum(count for _, count in self.files)

    def place(self, row: int) -> str:
        """Names a row by its file; the first row of a file is row 1, and a header does not count."""
        for path, count in self.files:
            if row < count:
                return f"{path}, row {row + 1}"
            row -= count
        raise IndexError(row)

    def infer_column(self, name: str, ways: str) -> Any:
        """Returns a column with the type that its values have."""
        return infer_type(name, self.columns[name], self.place, ways) if self.is_text else self.columns[name]


def stream_rows(arrays: Arrays, rows: Rows, chosen: Array, reasons: Mapping[int, str]) -> Stream:
    """Returns the chosen rows as a stream, in which a row with a reason is an example that cannot be read."""
    places = [rows.place(int(row)) for row in chosen]
    texts = [reasons.get(int(row), "") for row in chosen]
    with tf.device("CPU:0"):
        parts, found = tf.nest.map_structure(tf.constant, arrays.parts), tf.constant(texts)

    def decode(place: tf.Tensor) -> Any:
        reason = tf.gather(found, place)
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(tf.equal(reason, "")), [reason[0]])]):
            return tf.nest.map_structure(lambda part: tf.gather(part, place), parts)

    faults = [f"{where}: {reason}" for where, reason in zip(places, texts, strict=True) if reason]
    return Stream(
        tf.data.Dataset.range(len(chosen)),
        len(chosen),
        decode,
        lambda place: places[int(place)],
        faults[:NAMED],
        at_once=DECODE_BATCH_SIZE,
    )


# ---------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------


def parse_tokens(tokens: Any, embed: bool) -> int:
    """Returns the number of words of a text that are kept for embeddings."""
    if tokens is None:
        return TOKENS
    if not embed:
        raise ConfigError(f"dataset.tokens={tokens}: is for dataset.embed=true; without it all words of a text count")
    return parse_count(tokens, "dataset.tokens", 1)


def choose_columns(names: Sequence[str], target: Any, columns: Any, drop: Any) -> list[str]:
    """Returns the names of the input columns. Dropped columns may have any names."""
    dropped = find_columns(parse_words(drop, "dataset.drop"), names, "dataset.drop")
    left = [name for name in names if name not in dropped]
    find_columns([target], names, "dataset.target")
    find_columns([target], left, "dataset.target", "dataset.drop leaves it out")
    selected = parse_words(columns, "dataset.columns")
    find_columns(selected, names, "dataset.columns")
    if target in selected:
        raise ConfigError(f"dataset.columns: {target} is the target, which cannot be an input; remove it")
    inputs = [name for name in left if name != target and (not selected or name in selected)]
    if not inputs:
        raise ConfigError("dataset.columns: no column is left besides the target")
    for name in inputs:
        if not name or "/" in name:
            problem = "has no name" if not name else f"has a / in its name, {name}"
            raise ConfigError(f"dataset.data_dir: a column {problem}; rename it, or use dataset.drop=['{name}']")
    return inputs


def find_columns(
    given: Sequence[Any], names: Sequence[str], key: str, problem: str = "there is no such column"
) -> list[str]:
    for name in given:
        if name not in names:
            raise ConfigError(f"{key}={name}: {problem}; the columns are {', '.join(names)}")
    return list(given)


def parse_column_kinds(names: Sequence[str], options: Mapping[str, Any]) -> dict[str, str]:
    """Returns what the options say that a column is taken for, by its name."""
    given: dict[str, str] = {}
    for kind, value in options.items():
        key = KEYS[kind]
        for name in find_columns(parse_words(value, key), names, key, "is not an input column"):
            if name in given:
                raise ConfigError(f"{key}: {name} is in {KEYS[given[name]]}, too; name it in one of the two")
            given[name] = kind
    return given


def describe_columns(kinds: Mapping[str, str], target: str, outputs: Outputs) -> str:
    """Returns a line that says how the columns are taken."""
    parts = []
    for kind in EXPECTED:
        names = [name for name, each in kinds.items() if each == kind]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        if names:
            parts.append(f"{kind} {', '.join(names[:MOST_NAMED])}{more}")
    return f"dataset=table: {'; '.join(parts)}; target {target} ({outputs.kind})"


# ---------------------------------------------------------------------------------------------
# What columns are taken for
# ---------------------------------------------------------------------------------------------


def choose_kind(rows: Rows, name: str, most: int) -> str:
    """Returns what a column is taken for, by its type and its values."""
    from pyarrow import compute, types

    ways = f"add {name} to dataset.numeric (the value is then a bad example), dataset.categorical or dataset.drop"
    column = rows.infer_column(name, ways)
    if column.null_count == len(column):
        raise ConfigError(f"dataset.data_dir: the column {name} has no values; leave it out with dataset.drop=[{name}]")
    if is_numeric(column):
        return NUMBER
    if types.is_timestamp(column.type) or types.is_date(column.type):
        return DATE
    if not types.is_string(column.type):
        raise ConfigError(
            f"dataset.data_dir: the column {name} has the type {column.type}, and an input is a number, a text or a "
            f"date; leave it out with dataset.drop=[{name}], or convert it in the file"
        )
    different = compute.count_distinct(column).as_py()
    words = compute.mean(compute.count_substring_regex(column, r"\S+")).as_py()
    rows_with_value = len(column) - column.null_count
    if words >= TEXT_WORDS and (different > most or different > TEXT_DIFFERENT * rows_with_value):
        return TEXT
    if different > most:
        raise ConfigError(
            f"dataset.data_dir: the column {name} has {different} different words, more than "
            f"dataset.most_values={most}; leave it out with dataset.drop=[{name}], name it in dataset.text, or raise "
            "dataset.most_values"
        )
    return CATEGORY


def check_column_types(rows: Rows, given: Mapping[str, str]) -> None:
    """Rejects columns whose type does not fit what the options take them for."""
    from pyarrow import types

    for name, kind in given.items():
        column = rows.columns[name]
        can_be_words = kind != NUMBER and (types.is_timestamp(column.type) or types.is_date(column.type))
        if not (types.is_string(column.type) or is_numeric(column) or can_be_words):
            raise ConfigError(
                f"{KEYS[kind]}: the column {name} has the type {column.type}, which cannot be taken for {kind}; leave "
                f"it out with dataset.drop=[{name}], or convert it in the file"
            )


def make_preprocessing(name: str, kind: str, embed: bool, vocabulary: int, tokens: int) -> Preprocessing:
    if kind == TEXT:
        return Text(vocabulary, tokens) if embed else WordBag(name, vocabulary)
    if kind == CATEGORY:
        return Category(embed)
    return Number() if kind == NUMBER else Date()


def describe_target(rows: Rows, target: str, kind: str, most: int, is_scaled: bool) -> Outputs:
    """Describes the target; raises `ConfigError` if its values do not fit `kind`."""
    if kind == "regression" or (kind == "auto" and has_values(rows, target)):
        numbers, is_bad = to_numbers(rows.columns[target])
        numbers = numbers[~is_bad & ~np.isnan(numbers)].astype(np.float64)
        if not len(numbers):
            raise ConfigError(f"dataset.target={target}: no row of the training split has a number in it")
        deviation = float(numbers.std())
        scaling = (float(numbers.mean()), deviation) if is_scaled and deviation > 0 else None
        return Outputs("regression", (1,), scaling=scaling)
    classes = sorted(set(to_classes(rows.columns[target])) - {""}, key=number_sort_key)
    if len(classes) > most:
        raise ConfigError(
            f"dataset.target={target}: has more than {most} classes; raise dataset.most_values, or choose another "
            "target"
        )
    if len(classes) < 2 or (kind == "binary" and len(classes) != 2):
        expected = "2" if kind == "binary" else "at least 2"
        raise ConfigError(
            f"dataset.target={target}: has {len(classes)} different value(s), expected {expected} classes"
        )
    is_binary = kind == "binary" or (kind == "auto" and len(classes) == 2)
    resolved: Kind = "binary" if is_binary else "classification"
    return Outputs(resolved, (1,) if is_binary else (len(classes),), tuple(classes))


def has_values(rows: Rows, target: str) -> bool:
    """Returns whether a target is a quantity by `kind: auto`; the others are classes."""
    from pyarrow import compute, types

    column = rows.infer_column(target, "set dataset.kind")
    if types.is_integer(column.type):
        return bool(compute.count_distinct(column).as_py() > FEW)
    if types.is_string(column.type) or types.is_boolean(column.type):
        return False
    if not is_numeric(column):
        raise ConfigError(
            f"dataset.target={target}: has the type {column.type}, and a target is a number, a word or a boolean"
        )
    return True


def number_sort_key(name: str) -> tuple[bool, float, str]:
    """Returns a sort key: numbers by value, then words."""
    return (False, float(name), name) if re.match(IS_NUMBER, name) else (True, 0.0, name)
