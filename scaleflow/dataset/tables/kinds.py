"""What the columns of a table are taken for: numbers, categories, texts or dates, as a sample of its rows shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from scaleflow.dataset.tables.options import KEYS, MOST_NAMED, describe_left_out
from scaleflow.dataset.tables.values import (
    CATEGORY,
    DATE,
    EXPECTED,
    FEW,
    MOSTLY,
    NUMBER,
    TEXT,
    Array,
    infer_dates,
    infer_type,
    is_missing,
    is_numeric,
)
from scaleflow.errors import ConfigError
from scaleflow.interfaces.formatting import join_first

#: Why a column is left out, in place of its kind.
NO_VALUES, ONE_VALUE, ROW_NUMBERS = "no values", "the same value in every row", "the number of the row"
OWN_WORDS = "a word of its own in nearly every row"

#: What is done about a column with more words than `most_values`: the rare ones are one word, or it is refused.
Rare = Literal["other", "refuse"]

#: Of fewer rows, a column with one value, or one that numbers them, stays.
FEWEST_ROWS = 20

#: A column of strings is text if its values have at least this many words on average, and more than a share of them
#: is different.
TEXT_WORDS, TEXT_DIFFERENT = 3, 0.5


@dataclass(frozen=True)
class SampleColumns:
    """The columns of the rows that are learned from.

    Attributes:
        columns: by name, as `clean_column` returns them.
        format: of the files; in CSV files all columns are strings, whose types are to be inferred.
        place: names a row by its index.
        missing_words: how often the target has each word of `dataset.missing`.
        classes: values of the target in other rows; None: they are too many to be classes.
    """

    columns: Mapping[str, Any]
    format: str
    place: Callable[[int], str]
    missing_words: Mapping[str, int] = field(default_factory=dict)
    classes: Sequence[str] | None = ()

    def infer(self, name: str, ways: str = "") -> Any:
        """Returns a column with the type that its values have."""
        column = self.columns[name]
        if self.format == "csv":
            return infer_type(name, column, self.place, ways)
        return infer_dates(column) if self.format == "json" else column


def describe_missing_words(words: Mapping[str, int]) -> str:
    """Returns the end of a message on targets, which names the words of `dataset.missing` that may be classes."""
    found = ", ".join(f"{word} ({count} rows)" for word, count in words.items())
    return f": dataset.missing has {found}; if it is a class, leave it out there" if found else ""


def find_uselessness(column: Any, rows: Array | None) -> str | None:
    """Returns why a column, as `clean_column` returns it, tells nothing; None if it may tell something.

    Args:
        column: of the rows that are learned from.
        rows: their indices, if the column is the first one of its file and may number them; else None.
    """
    import pyarrow
    from pyarrow import compute

    if is_missing(column).all():
        return NO_VALUES
    if column.null_count or len(column) < FEWEST_ROWS:
        return None
    with contextlib.suppress(pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
        if compute.all(compute.equal(column, column[0])).as_py():
            return ONE_VALUE
        if rows is not None:
            starts = compute.cast(column, "int64").to_numpy() - rows
            return ROW_NUMBERS if starts[0] in (0, 1) and (starts == starts[0]).all() else None
    return None


def choose_kind(rows: SampleColumns, name: str, most: int, is_left_out: bool) -> str:
    """Returns what a column is taken for, by its type and its values.

    If `is_left_out`, a column with more than `most` words that are hardly repeated is not used: returns the reason.
    """
    from pyarrow import compute, types

    ways = f"add {name} to dataset.numeric (the value is then a bad example), dataset.categorical or dataset.drop"
    column = rows.infer(name, ways)
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
    return OWN_WORDS if is_left_out and different > max(most, MOSTLY * rows_with_value) else CATEGORY


def is_like_values(column: Any) -> bool:
    """Returns whether a column of words may be numbers or dates that were not recognised, such as `377.2 kg`.

    Nearly all of its words begin or end with a digit, and most rows have one of their own.
    """
    from pyarrow import compute, types

    words = column.unique().drop_null()
    if not types.is_string(column.type) or len(words) <= max(FEW, (len(column) - column.null_count) / 2):
        return False
    return bool(compute.sum(compute.match_substring_regex(words, r"^\W?\pN|\pN\W?$")).as_py() >= MOSTLY * len(words))


def count_words(rows: SampleColumns, names: Iterable[str], most: int, rare: Rare) -> dict[str, int]:
    """Returns the numbers of words of the columns that have more than `most`; refuses these if `rare` says so."""
    from pyarrow import compute

    counts = {name: compute.count_distinct(rows.columns[name]).as_py() for name in names}
    found = {name: count for name, count in counts.items() if count > most}
    for name, count in found.items() if rare == "refuse" else ():
        raise ConfigError(
            f"dataset.data_dir: the column {name} has {count} different words, more than dataset.most_values={most}; "
            f"leave it out with dataset.drop=[{name}], name it in dataset.text or dataset.numeric, raise "
            "dataset.most_values, or use dataset.rare=other"
        )
    return found


def check_column_types(rows: SampleColumns, given: Mapping[str, str]) -> None:
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


def find_useless(sample: SampleColumns, names: Sequence[str], first: str, rows: Array) -> dict[str, str]:
    """Returns the columns that tell nothing, each with the reason; `first` is the first column of the files."""
    reasons = {
        name: find_uselessness(sample.columns[name], rows if name == first and len(names) > 1 else None)
        for name in names
    }
    return {name: reason for name, reason in reasons.items() if reason}


def divide_useless(found: Mapping[str, str], target: str) -> tuple[dict[str, str], dict[str, str]]:
    """Divides what columns are taken for into kinds and reasons to leave a column out. Raises if no column is left."""
    kinds = {name: each for name, each in found.items() if each in EXPECTED}
    useless = {name: each for name, each in found.items() if each not in EXPECTED}
    if not kinds:
        raise ConfigError(f"dataset.data_dir: no column besides {target} is of use: {describe_left_out(useless)}")
    return kinds, useless


def describe_columns(kinds: Mapping[str, str], target: str, kind: str) -> str:
    """Returns a line that says what the columns are taken for; `kind` is that of the target."""
    by_kind = {each: [name for name, found in kinds.items() if found == each] for each in EXPECTED}
    parts = [f"{each} {join_first(names, MOST_NAMED)}" for each, names in by_kind.items() if names]
    return f"dataset=table: {'; '.join(parts)}; target {target} ({kind})"
