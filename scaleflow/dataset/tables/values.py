"""Finds the types of the columns of a table, as pyarrow holds them, and converts its targets.

pyarrow is imported inside the functions, because only this dataset needs it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scaleflow.dataset.reading.class_names import show_classes
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Outputs
from scaleflow.serving.cells import (
    EXPECTED,
    IS_DATE,
    IS_NUMBER,
    NUMBER,
    Array,
    cast_to_dates,
    match_names,
    strip_plus,
    to_numbers,
    to_strings,
)

#: A column of a CSV file with at least this fraction of numbers, but also other values, is rejected as ambiguous.
MOSTLY = 0.9

#: Nearly all of more different values than this being numbers, or dates, is as ambiguous. More whole numbers than this
#: are no classes by `kind: auto`.
FEW = 20

#: A code, which a number would not keep: 01234, 1E5.
CODE = r"^([+-]?0[0-9]+|[1-9][0-9]*E[0-9]+)$"


def infer_dates(column: Any) -> Any:
    """Converts a clean column of strings to dates, if all of its values are; else returns it. JSON has no dates."""
    import pyarrow
    from pyarrow import types

    if not types.is_string(column.type) or column.null_count == len(column):
        return column
    dates = cast_to_dates(column)
    return column if dates is None else dates.cast(pyarrow.timestamp("us"))


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

    if text.null_count == len(text) or are_codes(text):
        return text
    plain = strip_plus(text)
    numbers = ("int64", "float64") if are_plain_numbers(plain) else ()  # 0x1F is an int64 for pyarrow
    for wanted in (*numbers, "bool", "timestamp[us]", pyarrow.timestamp("us", "UTC")):
        try:
            return compute.cast(plain if wanted in numbers else text, wanted)
        except pyarrow.ArrowInvalid:
            continue
    different, present = text.unique().drop_null(), len(text) - text.null_count
    for what, pattern in (("numbers", IS_NUMBER), ("dates", IS_DATE)):
        fits = compute.fill_null(compute.match_substring_regex(text, pattern), True)
        others = compute.sum(compute.invert(fits)).as_py()
        words = len(different) - compute.sum(compute.match_substring_regex(different, pattern)).as_py()
        is_mostly = others <= (1 - MOSTLY) * present or FEW < len(different) * MOSTLY <= len(different) - words
        if others and is_mostly:
            row = compute.index(fits, False).as_py()
            raise ConfigError(
                f"dataset.data_dir: the column {name} has {text[row].as_py()!r} ({place(row)}), and {present - others} "
                f"of its {present} values are {what}; add this value to dataset.missing, or {ways}"
            )
    return text


def are_codes(text: Any) -> bool:
    """Returns whether strings look like numbers, but some of them would lose characters as such: 01234, 1E5."""
    from pyarrow import compute

    return bool(compute.any(compute.match_substring_regex(text, CODE)).as_py()) and are_plain_numbers(text)


def are_plain_numbers(column: Any) -> bool:
    """Returns whether pyarrow can convert a column to numbers while it reads a CSV file."""
    import pyarrow
    from pyarrow import compute

    try:
        return compute.cast(column, "float64") is not None
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
        return False


def to_classes(column: Any) -> Any:
    """Converts a target to the names of its classes: strings, "" if missing."""
    from pyarrow import compute, types

    return to_strings(compute.cast(column, "string") if types.is_boolean(column.type) else column)


def convert_target(column: Any, outputs: Outputs) -> tuple[Array, Array, str]:
    """Returns the targets of rows, [n, 1] or [n], which of them cannot be used, and what is expected.

    With `outputs.ignore`, that is the target of an unknown class.
    """
    from pyarrow import compute

    if outputs.kind == "regression":
        numbers, is_bad = to_numbers(column)
        return numbers[:, None], is_bad | np.isnan(numbers), EXPECTED[NUMBER]
    names = to_classes(column)
    different = names.unique()
    places = match_names(different.to_pylist(), outputs.names or ())
    rows = compute.index_in(names, value_set=different).to_numpy()
    is_known = np.array([place is not None for place in places])[rows]
    classes = np.array([outputs.ignore or 0 if place is None else place for place in places], np.int32)[rows]
    is_bad = ~is_known if outputs.ignore is None else compute.equal(names, "").to_numpy(zero_copy_only=False)
    targets = classes.astype(np.float32)[:, None] if outputs.kind == "binary" else classes
    return targets, is_bad, f"a class of the training split ({show_classes(outputs.names or ())})"
