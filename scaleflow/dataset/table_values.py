"""Converts the columns of a table, as pyarrow holds them, to the arrays that a dataset gives.

pyarrow is imported inside the functions, because only this dataset needs it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scaleflow.dataset.table_files import IS_NUMBER, parse_numbers
from scaleflow.interfaces import Outputs

#: What a column can be taken for, as it is called in the note.
NUMBER, CATEGORY, TEXT, DATE = "numbers", "categories", "texts", "dates"

Array = np.ndarray[Any, Any]


def is_numeric(column: Any) -> bool:
    from pyarrow import types

    tests = (types.is_boolean, types.is_integer, types.is_floating, types.is_decimal)
    return any(test(column.type) for test in tests)


def is_missing(column: Any) -> Array:
    """Returns which values are null or NaN: [n] bool."""
    from pyarrow import compute

    missing: Array = compute.is_null(column, nan_is_null=True).to_numpy()
    return missing


def to_numbers(column: Any) -> tuple[Array, Array]:
    """Converts a column to float32 [n], NaN if missing, and returns which values are no finite numbers: [n] bool.

    A boolean is 1 or 0, also as a word of a CSV file.
    """
    import pyarrow
    from pyarrow import compute, types

    is_bad = np.zeros(len(column), bool)
    if types.is_string(column.type):
        for word, digit in (("true", "1"), ("false", "0")):
            column = compute.replace_substring_regex(column, f"(?i)^{word}$", digit)
        is_number = compute.fill_null(compute.match_substring_regex(column, IS_NUMBER), True)
        is_bad = ~is_number.to_numpy()
        column = parse_numbers(compute.if_else(is_number, column, pyarrow.scalar(None, pyarrow.string())), "float64")
    elif not is_numeric(column):
        return np.full(len(column), np.nan, np.float32), ~is_missing(column)
    with np.errstate(over="ignore"):
        numbers = compute.cast(column, "float64", safe=False).to_numpy().astype(np.float32)
    return numbers, is_bad | np.isinf(numbers)


def to_texts(column: Any) -> tuple[Array, Array]:
    """Converts a column to `str` objects [n], "" if missing. All values can be used."""
    texts = ["" if value is None or value != value else str(value) for value in column.to_pylist()]
    return np.array(texts, object), np.zeros(len(texts), bool)


def to_dates(column: Any) -> tuple[Array, Array]:
    """Converts a column to `str` objects [n] such as 2024-01-31T23:59:59, "" if missing, and which are no dates."""
    import pyarrow
    from pyarrow import compute

    dates = cast_to_dates(column)
    is_bad = np.zeros(len(column), bool)
    if dates is None:  # the training split has dates only
        values = [cast_to_dates(pyarrow.array([value], pyarrow.string())) for value in to_texts(column)[0]]
        is_bad = np.array([value is None for value in values]) & ~is_missing(column)
        kept = [None if bad else str(value) for bad, value in zip(is_bad, column.to_pylist(), strict=True)]
        dates = cast_to_dates(pyarrow.array(kept, pyarrow.string()))
    seconds = compute.cast(dates, pyarrow.timestamp("s"), safe=False).to_numpy(zero_copy_only=False)
    texts = np.datetime_as_string(seconds).astype(object)
    texts[np.isnat(seconds)] = ""
    return texts, is_bad


def cast_to_dates(column: Any) -> Any:
    """Returns a column as timestamps in UTC, or None if some values are no dates."""
    import pyarrow
    from pyarrow import compute

    for zone in (None, "UTC"):
        try:
            return compute.cast(compute.cast(column, pyarrow.timestamp("us", zone)), pyarrow.timestamp("us"))
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
            continue
    return None


def to_classes(column: Any) -> Array:
    """Returns the names of the classes of a target: `str` objects [n], "" if missing."""
    from pyarrow import compute, types

    is_bool = types.is_boolean(column.type)
    return to_texts(compute.cast(column, "string") if is_bool else column)[0]


def convert_target(column: Any, outputs: Outputs) -> tuple[Array, Array, str]:
    """Returns the targets of rows, [n, 1] float32 or [n] int32, which of them cannot be used, and what is expected."""
    if outputs.kind == "regression":
        numbers, is_bad = to_numbers(column)
        return numbers[:, None], is_bad | np.isnan(numbers), EXPECTED[NUMBER]
    assert outputs.names is not None
    places = {name: place for place, name in enumerate(outputs.names)}
    found = np.array([places.get(name, -1) for name in to_classes(column)], np.int32)
    classes = np.maximum(found, 0)
    targets = classes.astype(np.float32)[:, None] if outputs.kind == "binary" else classes
    return targets, found < 0, "a class of the training split"


#: How the values of a column are converted, by what it is taken for, and what a value is expected to be.
CONVERSIONS = {NUMBER: to_numbers, CATEGORY: to_texts, TEXT: to_texts, DATE: to_dates}
EXPECTED = {NUMBER: "a finite number", CATEGORY: "a word", TEXT: "a text", DATE: "a date"}
