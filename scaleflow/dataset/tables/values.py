"""Converts the columns of a table, as pyarrow holds them, to the arrays that a dataset gives.

pyarrow is imported inside the functions, because only this dataset needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scaleflow.dataset.reading.class_names import IS_NUMBER, match_names, show_classes
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Outputs

#: What a column can be taken for, as it is called in the note.
NUMBER, CATEGORY, TEXT, DATE = "numbers", "categories", "texts", "dates"

#: Strings that mean a missing value.
MISSING = ("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?", ".")

#: A column of a CSV file with at least this fraction of numbers, but also other values, is rejected as ambiguous.
MOSTLY = 0.9

#: Nearly all of more different values than this being numbers, or dates, is as ambiguous. More whole numbers than this
#: are no classes by `kind: auto`.
FEW = 20

#: A code, which a number would not keep: 01234, 1E5.
CODE = r"^([+-]?0[0-9]+|[1-9][0-9]*E[0-9]+)$"

#: A string that is a date with or without a time.
IS_DATE = r"^(\d{3}[1-9]|\d\d[1-9]\d|\d[1-9]\d\d|[1-9]\d{3})-\d\d-\d\d"
IS_DATE += r"([ T]([01]\d|2[0-3])(:[0-5]\d(:[0-5]\d(\.\d+)?)?)?(Z|[+-]\d\d(:?\d\d)?)?)?$"

#: A date with a time zone.
HAS_ZONE = r"[ T].*(Z|[+-]\d\d(:?\d\d)?)$"

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


def strip_plus(text: Any) -> Any:
    """Removes the sign that pyarrow does not read."""
    from pyarrow import compute

    return compute.replace_substring_regex(text, r"^\+([0-9.])", r"\1")


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


def to_numbers(column: Any) -> tuple[Array, Array]:
    """Converts a column to float64 [n], NaN if missing, and returns which values are no finite numbers: [n] bool.

    A boolean is 1 or 0, also as a word of a CSV file.
    """
    import pyarrow
    from pyarrow import compute, types

    is_bad = np.zeros(len(column), bool)
    if types.is_string(column.type):
        try:
            column = compute.cast(column, "float64")
        except pyarrow.ArrowInvalid:
            for word, digit in (("true", "1"), ("false", "0")):
                column = compute.replace_substring_regex(column, f"(?i)^{word}$", digit)
            is_number = compute.fill_null(compute.match_substring_regex(column, IS_NUMBER), True)
            is_bad = ~is_number.to_numpy()
            column = compute.if_else(is_number, strip_plus(column), pyarrow.scalar(None, pyarrow.string()))
    elif not is_numeric(column):
        return np.full(len(column), np.nan), ~is_missing(column)
    numbers = compute.cast(column, "float64", safe=False).to_numpy()
    return numbers, is_bad | np.isinf(numbers)


def to_strings(column: Any) -> Any:
    """Converts a column to strings, as Python writes the values; "" if missing."""
    import pyarrow
    from pyarrow import compute, types

    if types.is_boolean(column.type):
        column = compute.if_else(column, "True", "False")
    elif types.is_timestamp(column.type):
        column = compute.cast(column, pyarrow.timestamp("s"), safe=False)
    elif types.is_floating(column.type):
        column = compute.if_else(compute.is_nan(column), None, column)
        whole = compute.cast(column, pyarrow.string())
        return compute.fill_null(compute.replace_substring_regex(whole, r"^(-?[0-9]+)$", r"\1.0"), "")
    return compute.fill_null(compute.cast(column, pyarrow.string()), "")


def to_texts(column: Any, known: Sequence[str] = ()) -> tuple[Array, Array]:
    """Converts a column to `str` objects [n], "" if missing. All values can be used.

    A word that is written in another way than the `known` one, such as `1.0` for `1`, becomes that.
    """
    import pyarrow

    texts = to_strings(column)
    codes = (texts.combine_chunks() if isinstance(texts, pyarrow.ChunkedArray) else texts).dictionary_encode()
    words = codes.dictionary.to_numpy(zero_copy_only=False)
    if known:
        places = match_names(words.tolist(), known)
        words = np.array([w if n is None else known[n] for w, n in zip(words, places, strict=True)], object)
    return words[codes.indices.to_numpy()], np.zeros(len(column), bool)


def to_dates(column: Any) -> tuple[Array, Array]:
    """Converts a column to `str` objects [n] such as 2024-01-31T23:59:59, "" if missing, and which are no dates."""
    import pyarrow
    from pyarrow import compute

    if is_numeric(column):  # pyarrow would count microseconds from 1970
        return np.full(len(column), "", object), ~is_missing(column)
    dates = cast_to_dates(column)
    is_bad = np.zeros(len(column), bool)
    if dates is None:  # the rows that the types were inferred from have dates only, all with a time zone or all without
        text = compute.replace_substring_regex(compute.cast(column, pyarrow.string()), r"\.\d+", "")
        days = compute.utf8_slice_codeunits(text, 0, 10)
        parsed = compute.strptime(days, "%Y-%m-%d", "s", error_is_null=True)  # 30 February becomes 1 March
        is_day = compute.equal(compute.strftime(parsed, "%Y-%m-%d"), days)
        is_date = compute.and_(is_day, compute.match_substring_regex(text, IS_DATE))
        has_zone = compute.match_substring_regex(text, HAS_ZONE)
        groups = (compute.and_(is_date, compute.invert(has_zone)), compute.and_(is_date, has_zone))
        nothing = pyarrow.scalar(None, pyarrow.string())
        dates = compute.coalesce(*(cast_to_dates(compute.if_else(each, text, nothing)) for each in groups))
        is_bad = compute.is_null(dates).to_numpy() & ~is_missing(column)
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


#: How the values of a column are converted, by what it is taken for, and what a value is expected to be.
CONVERSIONS = {NUMBER: to_numbers, CATEGORY: to_texts, TEXT: to_texts, DATE: to_dates}
EXPECTED = {NUMBER: "a finite number", CATEGORY: "a word", TEXT: "a text", DATE: "a date"}
