"""Which columns of a table are inputs, and what they are taken for: kinds, classes, the scale of the target."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from scaleflow.dataset.reading.targets import OneKind, check_weights_name, describe_outputs, find_mean_and_deviation
from scaleflow.dataset.tables.values import FEW, MOSTLY, Form, infer_type, to_classes, to_weights
from scaleflow.errors import ConfigError, find_similar
from scaleflow.interfaces import EarlierState, Outputs, extend_classes
from scaleflow.interfaces.formatting import join_first
from scaleflow.interfaces.options import Words, check_option, check_options
from scaleflow.serving.cells import (
    CATEGORY,
    DATE,
    EXPECTED,
    IS_NUMBER,
    NUMBER,
    TEXT,
    Array,
    is_missing,
    is_numeric,
    to_numbers,
)

#: The keys that say what columns are taken for.
KEYS = {NUMBER: "dataset.numeric", CATEGORY: "dataset.categorical", TEXT: "dataset.text"}


#: The most columns that a note names for one reason.
MOST_NAMED = 12

#: The name of a column that pandas or R made of a table's index.
INDEX = re.compile(r"|rownames|row\.names|__index_level_\d+__|Unnamed: \d+(\.\d+)*")


@check_options("dataset")
def choose_columns(
    names: Sequence[str],
    target: Any,
    columns: Words | None,
    drop: Words | None,
    kinds: Mapping[str, Any],
    roles: Mapping[str, str] = {},
) -> list[str]:
    """Returns the names of the input columns. Dropped columns may have any names, and so may those with a role.

    `roles` has columns by the key of an option; they are inputs only if `columns` names them, and weights never.

    An index, and a column with a / in its name, are no inputs, unless `columns` or the options of `kinds` name them.
    """
    if columns is not None and not len(columns):
        raise ConfigError("dataset.columns=[]: expected at least one column, or null for all")
    dropped = find_columns(drop or (), names, "dataset.drop")
    left = [name for name in names if name not in dropped]
    find_columns([target], names, "dataset.target")
    find_columns([target], left, "dataset.target", problem="dataset.drop leaves it out")
    selected = find_columns(columns or (), names, "dataset.columns")
    for key, name in roles.items():
        find_columns([name], names, key)
    left = [name for name in left if name in selected or name not in roles.values()]
    if target in selected:
        raise ConfigError(f"dataset.columns: {target} is the target, which cannot be an input; remove it")
    check_weights_name(roles.get("dataset.weights"), selected, target, key="dataset.columns")
    named = [
        *selected,
        *(name for value in kinds.values() for name in (value if isinstance(value, list | tuple) else ())),
    ]
    left = [name for name in left if name in named or not find_name_problem(name)]
    inputs = [name for name in left if name != target and (not selected or name in selected)]
    if not inputs:
        unused = describe_left_out({name: each for name in names if (each := find_name_problem(name))})
        raise ConfigError(f"dataset.columns: no column is left besides the target{unused and f'; not used: {unused}'}")
    for name in inputs:
        if not name or "/" in name:
            problem = "has no name" if not name else f"has a / in its name, {name}"
            raise ConfigError(f"dataset.data_dir: a column {problem}; rename it, or use dataset.drop=['{name}']")
    return inputs


def find_name_problem(name: str) -> str:
    """Returns why a column of this name is no input, unless an option names it; "" if it can be one."""
    return "an index has such a name" if INDEX.fullmatch(name) else "rename it: it has a /" if "/" in name else ""


def describe_left_out(reasons: Mapping[str, str]) -> str:
    """Returns a text on the columns that are not used, by the reason."""
    names = {each: [name or "''" for name, reason in reasons.items() if reason == each] for each in reasons.values()}
    return "; ".join(f"{join_first(names[each], MOST_NAMED)} ({each})" for each in names)


def find_columns(
    given: Sequence[Any], names: Sequence[str], key: str, problem: str = "there is no such column"
) -> list[str]:
    for name in given:
        if name not in names:
            similar = find_similar(str(name), names)
            hint = f"; did you mean {similar}? The columns are" if similar else "; the columns are"
            raise ConfigError(f"{key}={name}: {problem}{hint} {', '.join(names)}")
    return list(given)


def parse_column_kinds(names: Sequence[str], options: Mapping[str, Any]) -> dict[str, str]:
    """Returns what the options say that a column is taken for, by its name."""
    given: dict[str, str] = {}
    for kind, value in options.items():
        key = KEYS[kind]
        check_option(value, Words | None, key)
        for name in find_columns(value or (), names, key, problem="is not an input column"):
            if name in given:
                raise ConfigError(f"{key}: {name} is in {KEYS[given[name]]}, too; name it in one of the two")
            given[name] = kind
    return given


def find_categories(kinds: Mapping[str, str], earlier: EarlierState | None) -> dict[str, Sequence[str]]:
    """Returns the categories that an earlier run learned, by the name of the column."""
    learned = {} if earlier is None else earlier.state.preprocessing
    return {name: learned[name].learned for name, kind in kinds.items() if kind == CATEGORY and name in learned}


def check_known_columns(known: Sequence[str], names: Sequence[str], data_dir: str) -> None:
    """Rejects a table without a column that an earlier run read; others do not matter."""
    missing = [name for name in known if name not in names]
    if not missing:
        return
    similar = find_similar(missing[0], [name for name in names if name not in known])
    more = f" and {', '.join(missing[1:])}" if missing[1:] else ""
    raise ConfigError(
        f"dataset.data_dir={data_dir}: has no column {missing[0]}{more}, which the earlier run read"
        f"{f'; did you mean {similar}? The' if similar else '; the'} columns are {', '.join(names)}"
    )


def find_new(unused: Sequence[str], reading: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line about the columns that an earlier run's table did not have; nothing if that is not known."""
    if new := [name for name in unused if name not in reading.get("unused", unused)]:
        yield f"new columns, which the data of the run did not have, are not used: {join_first(new, MOST_NAMED)}"


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
    """The columns of the rows that are learned from."""

    columns: Mapping[str, Any]  # by name, as `ColumnReader.clean` returns them; the types of strings are inferred
    place: Callable[[int], str]  # names a row by its index
    #: How often the target has each word of `dataset.missing`
    missing_words: Mapping[str, int] = field(default_factory=dict)
    classes: Sequence[str] | None = ()  # values of the target in other rows; None: they are too many to be classes

    def infer(self, name: str, ways: str = "") -> Any:
        """Returns a column with the type that its values have. The format of the file does not matter."""
        from pyarrow import types

        column = self.columns[name]
        return infer_type(name, column, self.place, ways=ways) if types.is_string(column.type) else column


@dataclass(frozen=True)
class ColumnOptions:
    """What the options of a table say about its columns; conf/dataset/table.yaml describes them."""

    columns: Words | None
    weights: str | None
    drop: Words | None
    numeric: Words | None
    categorical: Words | None
    text: Words | None
    decimal: str | None
    thousands: str | None
    dates: str | None
    kind: OneKind
    most_values: int
    rare: Rare
    scale_target: bool

    @property
    def by_kind(self) -> dict[str, Words | None]:
        """The columns that options take for a kind."""
        return {NUMBER: self.numeric, CATEGORY: self.categorical, TEXT: self.text}


@dataclass(frozen=True)
class TableTypes:
    """What a table learns from the values of its columns."""

    sought: Sequence[str]  # the columns whose values are looked at
    found: Mapping[str, str]  # by input, its kind, or why it is left out
    outputs: Mapping[str, Any]  # the fields of `Outputs`
    forms: dict[str, Form]  # by column, how its numbers or dates are written
    codes: Sequence[str]  # columns that look like numbers, but are words
    missing_words: dict[str, int]  # how often the target has each word of `dataset.missing`
    unread: Sequence[str]  # categories that look like numbers or dates
    many: Mapping[str, int]  # by category, the number of its words, if these are too many
    bare_numbers: Sequence[str]  # notes on columns whose numbers have a unit in some rows only

    def describe(self, unused: Mapping[str, str], most: int) -> Iterator[str]:
        """Yields lines on what may surprise; `unused` has columns with the reason to leave them out."""
        if self.codes:
            yield (
                f"dataset: codes, not numbers: {', '.join(self.codes)}; dataset.numeric takes such a column for numbers"
            )
        if unread := [name for name in self.unread if name not in self.codes]:
            yield (
                f"dataset: words, though they look like numbers or dates: {', '.join(unread)}; write numbers and "
                "dates in a usual form, such as 377.2 and 2024-01-31, or use dataset.drop"
            )
        if unused:
            yield f"dataset: not used: {describe_left_out(unused)}; name a column in dataset.columns to use it"
        for name, count in self.many.items():
            yield (
                f"dataset.rare=other: the {most:,} most frequent of {count:,} words of {name} are used; the others "
                "are one word, as unknown ones are"
            )


def describe_missing_words(words: Mapping[str, int]) -> str:
    """Returns the end of a message on targets, which names the words of `dataset.missing` that may be classes."""
    found = ", ".join(f"{word} ({count} rows)" for word, count in words.items())
    return f": dataset.missing has {found}; if it is a class, leave it out there" if found else ""


def find_uselessness(column: Any, rows: Array | None) -> str | None:
    """Returns why a column, as `ColumnReader.clean` returns it, tells nothing; None if it may tell something.

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


def choose_kind(rows: SampleColumns, name: str, told: ColumnOptions, is_free: bool) -> str:
    """Returns what a column is taken for, by its type and its values.

    If it `is_free`, it may have too many words that are hardly repeated, and is not used: returns the reason.
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
    if words >= TEXT_WORDS and (different > told.most_values or different > TEXT_DIFFERENT * rows_with_value):
        return TEXT
    is_left_out = is_free and told.rare == "other" and different > max(told.most_values, MOSTLY * rows_with_value)
    return OWN_WORDS if is_left_out else CATEGORY


#: A number with a unit that is no sign of a currency, such as `377.2 kg` or `12km/h`.
HAS_UNIT = re.compile(
    r"[+-]?\d+(?:[.,'\u2019 ]\d+)*\s?([^\W\d_][^\W\d_/\u00b2\u00b3]{0,9}(?:/[^\W\d_]{1,5})?[\u00b2\u00b3]?)"
)


def is_like_values(column: Any) -> bool:
    """Returns whether a column of words may be numbers or dates that were not recognised, such as `377.2 kg`.

    Nearly all of its words are numbers with the same unit. Or they begin or end with a digit, and most rows have one of
    their own.
    """
    from pyarrow import compute, types

    if not types.is_string(column.type):
        return False
    words = column.unique().drop_null()
    if len(words) <= FEW:
        return False
    units = Counter(found[1] for word in words.to_pylist() if (found := HAS_UNIT.fullmatch(word)))
    if max(units.values(), default=0) >= MOSTLY * len(words):
        return True
    if len(words) <= (len(column) - column.null_count) / 2:
        return False
    return bool(compute.sum(compute.match_substring_regex(words, r"^\W?\pN|\pN\W?$")).as_py() >= MOSTLY * len(words))


def count_words(rows: SampleColumns, names: Iterable[str], told: ColumnOptions) -> dict[str, int]:
    """Returns the numbers of words of the columns that have too many; refuses these if `dataset.rare` says so."""
    from pyarrow import compute

    counts = {name: compute.count_distinct(rows.columns[name]).as_py() for name in names}
    found = {name: count for name, count in counts.items() if count > told.most_values}
    for name, count in found.items() if told.rare == "refuse" else ():
        raise ConfigError(
            f"dataset.data_dir: the column {name} has {count} different words, more than "
            f"dataset.most_values={told.most_values}; leave it out with dataset.drop=[{name}], name it in dataset.text "
            "or dataset.numeric, raise dataset.most_values, or use dataset.rare=other"
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


def check_weights_column(rows: SampleColumns, name: str | None) -> None:
    """Rejects a column of weights without any weight; other rows are named one by one."""
    if name is not None and to_weights(rows.columns[name])[1].all():
        found = rows.columns[name][0].as_py()
        raise ConfigError(f"dataset.weights={name}: no row has a number from 0 up in it, the first has {found!r}")


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


def describe_columns(kinds: Mapping[str, str], target: str, kind: str, weights: str | None) -> str:
    """Returns a line that says what the columns are taken for; `kind` is that of the target."""
    by_kind = {each: [name for name, found in kinds.items() if found == each] for each in EXPECTED}
    parts = [f"{each} {join_first(names, MOST_NAMED)}" for each, names in by_kind.items() if names]
    role = f"; weights {weights}" if weights else ""
    return f"dataset=table: {'; '.join(parts)}; target {target} ({kind}){role}"


#: More different words than this share of the rows are no classes, by `kind: auto`.
MOST_CLASSES = 0.5

#: More different targets than that are not listed.
MOST_LISTED = 10_000

#: How many of the rarest classes a message names.
RAREST = 5


def describe_target(rows: SampleColumns, target: str, told: ColumnOptions) -> Outputs:
    """Describes the target; raises `ConfigError` if its values do not fit `dataset.kind`."""
    kind = told.kind
    if kind == "regression" or (kind == "auto" and has_values(rows, target)):
        numbers, is_bad = to_numbers(rows.columns[target])
        numbers = numbers[~is_bad & ~np.isnan(numbers)]
        if not len(numbers):
            raise ConfigError(f"dataset.target={target}: no row of the training split has a number in it")
        mean, deviation = find_mean_and_deviation(numbers)
        return Outputs("regression", (1,), scaling=(mean, deviation) if told.scale_target and deviation > 0 else None)
    classes = find_classes(rows, target)
    if len(classes) < 2 or (kind == "binary" and len(classes) != 2):
        expected = "2" if kind == "binary" else "at least 2"
        raise ConfigError(
            f"dataset.target={target}: has {len(classes)} different value(s), expected {expected} classes"
            f"{describe_missing_words(rows.missing_words)}"
        )
    rows_with_target = len(rows.columns[target]) - rows.columns[target].null_count
    if kind == "auto" and len(classes) > max(FEW, MOST_CLASSES * rows_with_target):
        raise ConfigError(
            f"dataset.target={target}: has {len(classes)} different words in {rows_with_target} rows, such as "
            f"{classes[0]}, and is no number; dataset.decimal and dataset.thousands say how numbers are written, "
            "dataset.kind=classification takes each word for a class"
        )
    check_class_count(rows, target, classes, most=told.most_values)
    return describe_outputs(kind, len(classes), classes)


def describe_known_target(
    rows: SampleColumns, target: str, told: ColumnOptions, earlier: EarlierState | None
) -> Outputs:
    """Describes the target as an earlier run learned it, with new classes if it may be extended."""
    known = None if earlier is None else earlier.find_outputs()
    if earlier is None or known is None:
        return describe_target(rows, target, told)
    kind = told.kind
    is_same = earlier.state.reading.get("target", target) == target and kind in ("auto", known.kind)
    if earlier.extends and not is_same:
        return describe_target(rows, target, told)
    if not earlier.extends and kind not in ("auto", known.kind):
        raise ConfigError(f"dataset.kind={kind}: the earlier run has the kind {known.kind}; leave it auto")
    if not earlier.extends and known.scaling and not told.scale_target:
        raise ConfigError("dataset.scale_target=false: the earlier run scaled its target; leave it out")
    if known.kind == "regression":
        return known if told.scale_target else replace(known, scaling=None)
    if not earlier.extends:
        return known
    classes = find_classes(rows, target)
    check_class_count(rows, target, classes, most=told.most_values)
    extended = extend_classes(known, classes)
    if kind == "binary" and extended.kind != kind:
        raise ConfigError(
            f"dataset.kind=binary: {target} has {len(extended.names or ())} classes with those of the earlier run "
            f"({', '.join(extended.names or ())}); leave dataset.kind out, or use model.init_from_preprocessing=new"
        )
    return extended


def find_limits(outputs: Outputs, column: Any, is_seen: Array, earlier: EarlierState | None) -> Outputs:
    """Returns regression outputs with the range of their targets; a run that is extended widens that of the first one.

    Args:
        outputs: of the table.
        column: the target, as `ColumnReader.clean` returns it.
        is_seen: which of the rows are not those of the test split, [n] bool.
        earlier: what an earlier run learned.
    """
    if outputs.kind != "regression" or (earlier is not None and not earlier.extends):
        return outputs
    numbers, is_bad = to_numbers(column)
    values = [*numbers[is_seen & ~is_bad & ~np.isnan(numbers)].tolist(), *(outputs.limits or ())]
    return replace(outputs, limits=(min(values), max(values)) if values else None)


def find_classes(rows: SampleColumns, target: str) -> list[str]:
    """Returns the classes of a target: numbers by value, then words."""
    words = {*to_classes(rows.columns[target]).unique().to_pylist(), *(rows.classes or ())}
    numbers = {name: float(name) for name in words if re.match(IS_NUMBER, name)}
    return sorted(words - {""}, key=lambda name: (name not in numbers, numbers.get(name, 0.0), name))


def find_targets(blocks: Iterable[Any]) -> tuple[list[int], list[str] | None]:
    """Returns the indices of the rows without a target, and the different targets as classes; None if these are many.

    `blocks` has the target of all rows, as `ColumnReader.clean` returns it.
    """
    absent: list[int] = []
    classes: set[str] = set()
    first = 0
    for column in blocks:
        absent += (first + np.flatnonzero(is_missing(column))).tolist()
        first += len(column)
        if len(classes) <= MOST_LISTED and can_be_classes(column):
            classes.update(to_classes(column.unique()).to_pylist())
    return absent, sorted(classes - {""}) if len(classes) <= MOST_LISTED else None


def can_be_classes(column: Any) -> bool:
    from pyarrow import types

    return any(test(column.type) for test in (types.is_string, types.is_integer, types.is_boolean))


def check_class_count(rows: SampleColumns, target: str, classes: Sequence[str], most: int) -> None:
    """Refuses a target with more than `most` classes, and names the rarest."""
    if len(classes) <= most:
        return
    counts = Counter(to_classes(rows.columns[target]).to_pylist())
    rarest = ", ".join(f"{name} ({counts[name]:,})" for name in sorted(classes, key=counts.__getitem__)[:RAREST])
    raise ConfigError(
        f"dataset.target={target}: has {len(classes):,} classes, more than dataset.most_values={most}; the rarest, "
        f"with their rows, are {rarest}; join them or leave them out in the file, raise dataset.most_values, or choose "
        "another target"
    )


def has_values(rows: SampleColumns, target: str) -> bool:
    """Returns whether a target is a quantity by `kind: auto`; the others are classes."""
    from pyarrow import compute, types

    column = rows.infer(target, "set dataset.kind")
    if types.is_integer(column.type):
        return rows.classes is None or max(compute.count_distinct(column).as_py(), len(rows.classes)) > FEW
    if types.is_string(column.type) or types.is_boolean(column.type):
        return False
    if not is_numeric(column):
        raise ConfigError(
            f"dataset.target={target}: has the type {column.type}, and a target is a number, a word or a boolean; "
            "choose another one, or write it so in the file, such as days in place of dates"
        )
    return True
