"""Chooses the inputs among the columns of a table, and describes their kinds and the target."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from scaleflow.dataset.reading.targets import OneKind, check_weights_name, describe_outputs, find_mean_and_deviation
from scaleflow.dataset.tables.values import MANY_VALUES, MOSTLY, Form, infer_type, to_classes, to_weights
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

#: The option that takes columns for a kind.
KEYS = {NUMBER: "dataset.numeric", CATEGORY: "dataset.categorical", TEXT: "dataset.text"}

#: Maximum number of columns that a note names for one reason.
MAX_COLUMNS_SHOWN = 12

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
    """Returns the names of the input columns.

    An index and a column with a / in its name are no inputs, unless `columns` or the options of `kinds` name them.

    Args:
        names: the columns of the files.
        target: the column of the target.
        columns: `dataset.columns`.
        drop: `dataset.drop`. These columns may have any names.
        kinds: the options that take columns for a kind, by kind.
        roles: columns by the option that gives them a role, such as `dataset.weights`. They may have any names, and are
            inputs only if `columns` names them. Weights are never inputs.
    """
    if columns is not None and not len(columns):
        raise ConfigError("dataset.columns=[]: expected at least one column, or null for all")
    dropped = find_columns(drop or (), names, "dataset.drop")
    kept = [name for name in names if name not in dropped]
    find_columns([target], names, "dataset.target")
    find_columns([target], kept, "dataset.target", problem="dataset.drop leaves it out")
    selected = find_columns(columns or (), names, "dataset.columns")
    for key, name in roles.items():
        find_columns([name], names, key)
    if target in selected:
        raise ConfigError(f"dataset.columns: {target} is the target, which cannot be an input; remove it")
    check_weights_name(roles.get("dataset.weights"), selected, target, key="dataset.columns")
    if selected:
        inputs = [name for name in kept if name in selected]
    else:
        without_role = [name for name in kept if name != target and name not in roles.values()]
        inputs = leave_out_problems(without_role, kinds.values())
    if not inputs:
        unused = describe_left_out(find_name_problems(names))
        hint = f"; not used: {unused}" if unused else ""
        raise ConfigError(f"dataset.columns: no column is left besides the target{hint}")
    check_input_names(inputs)
    return inputs


def leave_out_problems(names: Iterable[str], options: Iterable[Any]) -> list[str]:
    """Returns the columns without those whose names make them no inputs. Columns that an option lists are kept."""
    listed: list[str] = []
    for value in options:
        if isinstance(value, list | tuple):
            listed.extend(value)
    return [name for name in names if name in listed or not find_name_problem(name)]


def check_input_names(names: Iterable[str]) -> None:
    """Raises ConfigError if an input has no name, or a / in it."""
    for name in names:
        if not name or "/" in name:
            problem = "has no name" if not name else f"has a / in its name, {name}"
            raise ConfigError(f"dataset.data_dir: a column {problem}; rename it, or use dataset.drop=['{name}']")


def find_name_problem(name: str) -> str:
    """Returns why a column of this name is no input unless an option names it; "" if there is no problem."""
    if INDEX.fullmatch(name):
        return "an index has such a name"
    if "/" in name:
        return "rename it: it has a /"
    return ""


def find_name_problems(names: Iterable[str]) -> dict[str, str]:
    """Returns the columns that are no inputs because of their names, with the reasons."""
    problems = {name: find_name_problem(name) for name in names}
    return {name: problem for name, problem in problems.items() if problem}


def describe_left_out(reasons: Mapping[str, str]) -> str:
    """Returns a text about unused columns, grouped by reason. `reasons` has the reason of each column."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names_by_reason.setdefault(reason, []).append(name or "''")
    parts = [f"{join_first(names, MAX_COLUMNS_SHOWN)} ({reason})" for reason, names in names_by_reason.items()]
    return "; ".join(parts)


def find_columns(
    wanted: Sequence[Any], names: Sequence[str], key: str, problem: str = "there is no such column"
) -> list[str]:
    """Returns the wanted columns. Raises ConfigError about `key` and the `problem` if one is not among `names`."""
    for name in wanted:
        if name not in names:
            similar = find_similar(str(name), names)
            hint = f"; did you mean {similar}? The columns are" if similar else "; the columns are"
            raise ConfigError(f"{key}={name}: {problem}{hint} {', '.join(names)}")
    return list(wanted)


def parse_column_kinds(names: Sequence[str], options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the kinds that options name for columns. `options` has the columns by kind."""
    kinds: dict[str, str] = {}
    for kind, value in options.items():
        key = KEYS[kind]
        check_option(value, Words | None, key)
        for name in find_columns(value or (), names, key, problem="is not an input column"):
            if name in kinds:
                raise ConfigError(f"{key}: {name} is in {KEYS[kinds[name]]}, too; name it in one of the two")
            kinds[name] = kind
    return kinds


def find_categories(kinds: Mapping[str, str], earlier: EarlierState | None) -> dict[str, Sequence[str]]:
    """Returns the categories that an earlier run learned, by column."""
    if earlier is None:
        return {}
    learned = earlier.state.preprocessing
    return {name: learned[name].learned for name, kind in kinds.items() if kind == CATEGORY and name in learned}


def check_known_columns(known: Sequence[str], names: Sequence[str], data_dir: str) -> None:
    """Rejects a table that lacks a column which an earlier run read. Additional columns are allowed."""
    missing = [name for name in known if name not in names]
    if not missing:
        return
    similar = find_similar(missing[0], [name for name in names if name not in known])
    others = f" and {', '.join(missing[1:])}" if missing[1:] else ""
    hint = f"; did you mean {similar}? The" if similar else "; the"
    raise ConfigError(
        f"dataset.data_dir={data_dir}: has no column {missing[0]}{others}, which the earlier run read"
        f"{hint} columns are {', '.join(names)}"
    )


def describe_new_columns(unused: Sequence[str], reading: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line about columns that an earlier run's table did not have.

    It yields nothing if `reading`, the record of that run, has no list of unused columns.
    """
    new = [name for name in unused if name not in reading.get("unused", unused)]
    if new:
        yield (
            f"new columns, which the data of the run did not have, are not used: {join_first(new, MAX_COLUMNS_SHOWN)}"
        )


#: Reasons to leave a column out. They take the place of its kind.
NO_VALUES = "no values"
ONE_VALUE = "the same value in every row"
ROW_NUMBERS = "the number of the row"
OWN_WORDS = "a word of its own in nearly every row"

#: What happens to a column with more words than `most_values`: rare words become one word, or it is refused.
Rare = Literal["other", "refuse"]

#: In a smaller sample, a column with one value stays, and so does one that numbers the rows.
MIN_ROWS = 20

#: A column of strings is a text if its values have at least `MIN_TEXT_WORDS` words on average, and more than
#: `TEXT_DIFFERENT` of them are different.
MIN_TEXT_WORDS = 3
TEXT_DIFFERENT = 0.5


@dataclass(frozen=True)
class SampleColumns:
    """The columns of the sampled rows."""

    columns: Mapping[str, Any]  # as `ColumnReader.rewrite` returns them
    place: Callable[[int], str]  # names the file and row of an index of the sample
    forms: Mapping[str, Form] = field(default_factory=dict)  # by column, how its numbers or dates were written
    #: How often the target has each word of `dataset.missing`
    missing_words: Mapping[str, int] = field(default_factory=dict)
    classes: Sequence[str] | None = ()  # values of the target in other rows. None: they are too many to be classes.

    def infer(self, name: str, ways: str = "") -> Any:
        """Returns a column with the type that fits all of its values, whatever the format of the file."""
        from pyarrow import types

        column = self.columns[name]
        return infer_type(name, column, self.place, ways=ways) if types.is_string(column.type) else column


@dataclass(frozen=True)
class ColumnOptions:
    """The options of a table that concern its columns. conf/dataset/table.yaml describes them."""

    target: str
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


def describe_missing_words(words: Mapping[str, int]) -> str:
    """Returns the end of a message about targets: the words of `dataset.missing` that may be classes."""
    if not words:
        return ""
    counts = ", ".join(f"{word} ({count} rows)" for word, count in words.items())
    return f": dataset.missing has {counts}; if it is a class, leave it out there"


def find_useless(sample: SampleColumns, names: Sequence[str], first: str, rows: Array) -> dict[str, str]:
    """Returns the columns without information, with the reasons.

    Args:
        sample: the sampled rows.
        names: the columns to examine.
        first: the first column of the files. It may number the rows.
        rows: the indices of the sampled rows.
    """
    reasons: dict[str, str] = {}
    for name in names:
        can_be_numbers_of_rows = name == first and len(names) > 1
        reason = find_uselessness(sample.columns[name], rows if can_be_numbers_of_rows else None)
        if reason is not None:
            reasons[name] = reason
    return reasons


def find_uselessness(column: Any, rows: Array | None) -> str | None:
    """Returns the reason why a sampled column has no information; None if it may have some.

    Args:
        column: as `ColumnReader.clean` returns it.
        rows: the indices of its rows, if it may number them.
    """
    import pyarrow
    from pyarrow import compute

    if is_missing(column).all():
        return NO_VALUES
    if column.null_count or len(column) < MIN_ROWS:
        return None
    with contextlib.suppress(pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
        if compute.all(compute.equal(column, column[0])).as_py():
            return ONE_VALUE
        if rows is not None:
            starts = compute.cast(column, "int64").to_numpy() - rows
            if starts[0] in (0, 1) and (starts == starts[0]).all():
                return ROW_NUMBERS
    return None


def choose_kind(sample: SampleColumns, name: str, options: ColumnOptions, is_optional: bool) -> str:
    """Returns the kind of a column, by its type and its values.

    Args:
        sample: the sampled rows.
        name: of the column.
        options: of the table.
        is_optional: whether the column can be left out. If hardly any of its words occurs twice, the result is this
            reason to leave it out, not a kind.

    Raises:
        ConfigError: if the column cannot be an input.
    """
    from pyarrow import compute, types

    ways = f"add {name} to dataset.numeric (the value is then a bad example), dataset.categorical or dataset.drop"
    column = sample.infer(name, ways)
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
    is_diverse = different > options.most_values or different > TEXT_DIFFERENT * rows_with_value
    if words >= MIN_TEXT_WORDS and is_diverse:
        return TEXT
    has_own_words = different > max(options.most_values, MOSTLY * rows_with_value)
    if has_own_words and is_optional and options.rare == "other":
        return OWN_WORDS
    return CATEGORY


#: A number with a unit that is no sign of a currency, such as `377.2 kg` or `12km/h`.
HAS_UNIT = re.compile(
    r"[+-]?\d+(?:[.,'\u2019 ]\d+)*\s?([^\W\d_][^\W\d_/\u00b2\u00b3]{0,9}(?:/[^\W\d_]{1,5})?[\u00b2\u00b3]?)"
)


def is_like_values(column: Any) -> bool:
    """Returns whether a column of words may be numbers or dates that were not recognised, such as `377.2 kg`.

    Either nearly all of its words are numbers with the same unit, or they begin or end with a digit and most rows have
    a word that no other row has.
    """
    from pyarrow import compute, types

    if not types.is_string(column.type):
        return False
    words = column.unique().drop_null()
    if len(words) <= MANY_VALUES:
        return False
    units: Counter[str] = Counter()
    for word in words.to_pylist():
        match = HAS_UNIT.fullmatch(word)
        if match:
            units[match[1]] += 1
    if max(units.values(), default=0) >= MOSTLY * len(words):
        return True
    rows_with_value = len(column) - column.null_count
    if len(words) <= rows_with_value / 2:
        return False
    has_outer_digit = compute.match_substring_regex(words, r"^\W?\pN|\pN\W?$")
    return bool(compute.sum(has_outer_digit).as_py() >= MOSTLY * len(words))


def count_words(sample: SampleColumns, names: Iterable[str], options: ColumnOptions) -> dict[str, int]:
    """Returns the categories with more words than `dataset.most_values`, and how many words they have.

    Raises ConfigError about the first of them if `dataset.rare` is `refuse`.
    """
    from pyarrow import compute

    counts: dict[str, int] = {}
    for name in names:
        count = compute.count_distinct(sample.columns[name]).as_py()
        if count > options.most_values:
            counts[name] = count
    if counts and options.rare == "refuse":
        name = next(iter(counts))
        raise ConfigError(
            f"dataset.data_dir: the column {name} has {counts[name]} different words, more than "
            f"dataset.most_values={options.most_values}; leave it out with dataset.drop=[{name}], name it in "
            "dataset.text or dataset.numeric, raise dataset.most_values, or use dataset.rare=other"
        )
    return counts


def check_column_types(sample: SampleColumns, kinds: Mapping[str, str]) -> None:
    """Rejects columns whose type does not fit the kind that an option names for them."""
    from pyarrow import types

    for name, kind in kinds.items():
        column = sample.columns[name]
        can_be_words = kind != NUMBER and (types.is_timestamp(column.type) or types.is_date(column.type))
        if not (types.is_string(column.type) or is_numeric(column) or can_be_words):
            raise ConfigError(
                f"{KEYS[kind]}: the column {name} has the type {column.type}, which cannot be taken for {kind}; leave "
                f"it out with dataset.drop=[{name}], or convert it in the file"
            )


def check_weights_column(sample: SampleColumns, name: str | None) -> None:
    """Rejects a column of weights without any weight. Single rows without one are faults."""
    if name is None:
        return
    _, is_bad, _ = to_weights(sample.columns[name])
    if is_bad.all():
        value = sample.columns[name][0].as_py()
        raise ConfigError(f"dataset.weights={name}: no row has a number from 0 up in it, the first has {value!r}")


def divide_useless(decisions: Mapping[str, str], target: str) -> tuple[dict[str, str], dict[str, str]]:
    """Divides decisions on columns into kinds and reasons to leave a column out.

    Raises ConfigError if no column is left.
    """
    kinds: dict[str, str] = {}
    useless: dict[str, str] = {}
    for name, decision in decisions.items():
        if decision in EXPECTED:
            kinds[name] = decision
        else:
            useless[name] = decision
    if not kinds:
        raise ConfigError(f"dataset.data_dir: no column besides {target} is of use: {describe_left_out(useless)}")
    return kinds, useless


def describe_columns(kinds: Mapping[str, str], target: str, target_kind: str, weights: str | None) -> str:
    """Returns a line that lists the columns by kind, and the target."""
    parts: list[str] = []
    for kind in EXPECTED:
        names = [name for name in kinds if kinds[name] == kind]
        if names:
            parts.append(f"{kind} {join_first(names, MAX_COLUMNS_SHOWN)}")
    role = f"; weights {weights}" if weights else ""
    return f"dataset=table: {'; '.join(parts)}; target {target} ({target_kind}){role}"


#: With `kind: auto`, more different words than this share of the rows are no classes.
MAX_CLASS_SHARE = 0.5

#: Maximum number of different targets that are listed.
MAX_LISTED = 10_000

#: How many of the rarest classes a message names.
RAREST = 5


def describe_target(sample: SampleColumns, options: ColumnOptions) -> Outputs:
    """Describes the target. Raises ConfigError if its values do not fit `dataset.kind`."""
    if options.kind == "regression" or (options.kind == "auto" and is_quantity(sample, options.target)):
        return describe_quantity(sample, options)
    return describe_classes(sample, options)


def describe_quantity(sample: SampleColumns, options: ColumnOptions) -> Outputs:
    """Describes the target of a regression."""
    numbers, is_bad = to_numbers(sample.columns[options.target])
    numbers = numbers[~is_bad & ~np.isnan(numbers)]
    if not len(numbers):
        raise ConfigError(f"dataset.target={options.target}: no row of the training split has a number in it")
    mean, deviation = find_mean_and_deviation(numbers)
    is_scaled = options.scale_target and deviation > 0
    return Outputs("regression", (1,), scaling=(mean, deviation) if is_scaled else None)


def describe_classes(sample: SampleColumns, options: ColumnOptions) -> Outputs:
    """Describes the target of a classification."""
    kind = options.kind
    target = options.target
    classes = find_classes(sample, target)
    if len(classes) < 2 or (kind == "binary" and len(classes) != 2):
        expected = "2" if kind == "binary" else "at least 2"
        raise ConfigError(
            f"dataset.target={target}: has {len(classes)} different value(s), expected {expected} classes"
            f"{describe_missing_words(sample.missing_words)}"
        )
    rows_with_target = len(sample.columns[target]) - sample.columns[target].null_count
    if kind == "auto" and len(classes) > max(MANY_VALUES, MAX_CLASS_SHARE * rows_with_target):
        raise ConfigError(
            f"dataset.target={target}: has {len(classes)} different words in {rows_with_target} rows, such as "
            f"{classes[0]}, and is no number; dataset.decimal and dataset.thousands say how numbers are written, "
            "dataset.kind=classification takes each word for a class"
        )
    check_class_count(sample, options, classes)
    return describe_outputs(kind, len(classes), classes)


def describe_known_target(sample: SampleColumns, options: ColumnOptions, earlier: EarlierState | None) -> Outputs:
    """Describes the target as an earlier run learned it, with new classes if that run is extended."""
    known = None if earlier is None else earlier.find_outputs()
    if earlier is None or known is None:
        return describe_target(sample, options)
    kind = options.kind
    if earlier.extends:
        has_same_target = earlier.state.reading.get("target", options.target) == options.target
        if not has_same_target or kind not in ("auto", known.kind):
            return describe_target(sample, options)
    else:
        if kind not in ("auto", known.kind):
            raise ConfigError(f"dataset.kind={kind}: the earlier run has the kind {known.kind}; leave it auto")
        if known.scaling and not options.scale_target:
            raise ConfigError("dataset.scale_target=false: the earlier run scaled its target; leave it out")
    if known.kind == "regression":
        return known if options.scale_target else replace(known, scaling=None)
    if not earlier.extends:
        return known
    return extend_known_classes(known, sample, options)


def extend_known_classes(known: Outputs, sample: SampleColumns, options: ColumnOptions) -> Outputs:
    """Adds the classes of the sample to the known classes."""
    classes = find_classes(sample, options.target)
    check_class_count(sample, options, classes)
    extended = extend_classes(known, classes)
    if options.kind == "binary" and extended.kind != "binary":
        names = extended.names or ()
        raise ConfigError(
            f"dataset.kind=binary: {options.target} has {len(names)} classes with those of the earlier run "
            f"({', '.join(names)}); leave dataset.kind out, or use model.init_from_preprocessing=new"
        )
    return extended


def find_limits(outputs: Outputs, column: Any, is_trained: Array, earlier: EarlierState | None) -> Outputs:
    """Returns regression outputs with the range of their targets. A run that is extended widens its range.

    Args:
        outputs: of the table.
        column: the target, as `ColumnReader.rewrite` returns it.
        is_trained: which rows are not in the test split, [n] bool.
        earlier: the learned state of an earlier run.
    """
    if outputs.kind != "regression" or (earlier is not None and not earlier.extends):
        return outputs
    numbers, is_bad = to_numbers(column)
    is_usable = is_trained & ~is_bad & ~np.isnan(numbers)
    values = [*numbers[is_usable].tolist(), *(outputs.limits or ())]
    if not values:
        return replace(outputs, limits=None)
    return replace(outputs, limits=(min(values), max(values)))


def find_classes(sample: SampleColumns, target: str) -> list[str]:
    """Returns the classes of a target: numbers by value, then words."""
    words = set(to_classes(sample.columns[target]).unique().to_pylist())
    words.update(sample.classes or ())
    words.discard("")
    numbers = {word: float(word) for word in words if re.match(IS_NUMBER, word)}

    def order(word: str) -> tuple[bool, float, str]:
        return word not in numbers, numbers.get(word, 0.0), word

    return sorted(words, key=order)


def find_targets(blocks: Iterable[Any]) -> tuple[list[int], list[str] | None]:
    """Returns the indices of the rows without a target, and the different targets as classes.

    The classes are None if there are too many.

    Args:
        blocks: the target of all rows, as `ColumnReader.clean` returns it.
    """
    absent: list[int] = []
    classes: set[str] = set()
    first = 0
    for column in blocks:
        absent += (first + np.flatnonzero(is_missing(column))).tolist()
        first += len(column)
        if len(classes) <= MAX_LISTED and can_be_classes(column):
            classes.update(to_classes(column.unique()).to_pylist())
    if len(classes) > MAX_LISTED:
        return absent, None
    return absent, sorted(classes - {""})


def can_be_classes(column: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(column.type) or types.is_integer(column.type) or types.is_boolean(column.type))


def check_class_count(sample: SampleColumns, options: ColumnOptions, classes: Sequence[str]) -> None:
    """Refuses a target with more classes than `dataset.most_values`, and names the rarest."""
    if len(classes) <= options.most_values:
        return
    counts = Counter(to_classes(sample.columns[options.target]).to_pylist())
    rarest = sorted(classes, key=counts.__getitem__)[:RAREST]
    shown = ", ".join(f"{name} ({counts[name]:,})" for name in rarest)
    raise ConfigError(
        f"dataset.target={options.target}: has {len(classes):,} classes, more than "
        f"dataset.most_values={options.most_values}; the rarest, with their rows, are {shown}; join them or leave "
        "them out in the file, raise dataset.most_values, or choose another target"
    )


def is_quantity(sample: SampleColumns, target: str) -> bool:
    """Returns whether `kind: auto` takes a target for a quantity, not for classes."""
    from pyarrow import compute, types

    column = sample.infer(target, "set dataset.kind")
    if types.is_integer(column.type):
        if sample.classes is None:
            return True
        return len(sample.classes) > MANY_VALUES or bool(compute.count_distinct(column).as_py() > MANY_VALUES)
    if types.is_string(column.type) or types.is_boolean(column.type):
        return False
    if not is_numeric(column):
        raise ConfigError(
            f"dataset.target={target}: has the type {column.type}, and a target is a number, a word or a boolean; "
            "choose another one, or write it so in the file, such as days in place of dates"
        )
    return True
