"""The target of a table: its kind, its classes, its scale."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scaleflow.dataset.reading.class_names import OneKind, describe_outputs
from scaleflow.dataset.reading.spread import find_mean_and_deviation
from scaleflow.dataset.tables.kinds import SampleColumns, describe_missing_words
from scaleflow.dataset.tables.values import FEW, to_classes
from scaleflow.errors import ConfigError
from scaleflow.interfaces import EarlierState, Outputs, extend_classes
from scaleflow.serving.cells import IS_NUMBER, Array, is_missing, is_numeric, to_numbers

#: More different words than this share of the rows are no classes, by `kind: auto`.
MOST_CLASSES = 0.5

#: More different targets than that are not listed.
MOST_LISTED = 10_000

#: How many of the rarest classes a message names.
RAREST = 5


def describe_target(rows: SampleColumns, target: str, kind: OneKind, most: int, is_scaled: bool) -> Outputs:
    """Describes the target; raises `ConfigError` if its values do not fit `kind`."""
    if kind == "regression" or (kind == "auto" and has_values(rows, target)):
        numbers, is_bad = to_numbers(rows.columns[target])
        numbers = numbers[~is_bad & ~np.isnan(numbers)]
        if not len(numbers):
            raise ConfigError(f"dataset.target={target}: no row of the training split has a number in it")
        mean, deviation = find_mean_and_deviation(numbers)
        return Outputs("regression", (1,), scaling=(mean, deviation) if is_scaled and deviation > 0 else None)
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
    check_class_count(rows, target, classes, most)
    return describe_outputs(kind, len(classes), classes)


def describe_known_target(
    rows: SampleColumns, target: str, kind: OneKind, most: int, is_scaled: bool, earlier: EarlierState | None
) -> Outputs:
    """Describes the target as an earlier run learned it, with new classes if it may be extended."""
    known = None if earlier is None else earlier.find_outputs()
    if earlier is None or known is None:
        return describe_target(rows, target, kind, most, is_scaled)
    is_same = earlier.state.reading.get("target", target) == target and kind in ("auto", known.kind)
    if earlier.extends and not is_same:
        return describe_target(rows, target, kind, most, is_scaled)
    if not earlier.extends and kind not in ("auto", known.kind):
        raise ConfigError(f"dataset.kind={kind}: the earlier run has the kind {known.kind}; leave it auto")
    if not earlier.extends and known.scaling and not is_scaled:
        raise ConfigError("dataset.scale_target=false: the earlier run scaled its target; leave it out")
    if known.kind == "regression":
        return known if is_scaled else replace(known, scaling=None)
    if not earlier.extends:
        return known
    classes = find_classes(rows, target)
    check_class_count(rows, target, classes, most)
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
        column: the target, as `clean_column` returns it.
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
    return sorted(words - {""}, key=number_sort_key)


def find_targets(blocks: Iterable[Any]) -> tuple[list[int], list[str] | None]:
    """Returns the indices of the rows without a target, and the different targets as classes; None if these are many.

    `blocks` has the target of all rows, as `clean_column` returns it.
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


def number_sort_key(name: str) -> tuple[bool, float, str]:
    """Returns a sort key: numbers by value, then words."""
    return (False, float(name), name) if re.match(IS_NUMBER, name) else (True, 0.0, name)
