"""Finds the types of columns, and how their numbers and dates are written, if not as in English; converts targets.

pyarrow is imported inside the functions, because only this dataset needs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from scaleflow.dataset.reading.targets import show_classes
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Outputs
from scaleflow.interfaces.formatting import join_first
from scaleflow.serving.cells import (
    EXPECTED,
    IS_DATE,
    IS_NUMBER,
    MARKS,
    NUMBER,
    Array,
    cast_to_dates,
    match_names,
    match_number,
    parse_date_cells,
    rewrite_cells,
    rewrite_number,
    strip_plus,
    to_numbers,
    to_strings,
)

#: A column of strings with at least this fraction of numbers, but also other values, is rejected as ambiguous.
MOSTLY = 0.9

#: Nearly all of more different values than this being numbers, or dates, is as ambiguous. More whole numbers than this
#: are no classes by `kind: auto`.
FEW = 20

#: A code, which a number would not keep: 01234, 1E5.
CODE = r"^([+-]?0[0-9]+|[1-9][0-9]*E[0-9]+)$"


def infer_type(name: str, text: Any, place: Any, ways: str) -> Any:
    """Converts a clean column of strings to numbers, booleans or dates, if all of its values are; else returns it.

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


def to_weights(column: Any) -> tuple[Array, Array, str]:
    """Returns the weights of rows, [n] float32, which of them cannot be used, and what is expected."""
    numbers, is_bad = to_numbers(column)
    is_bad |= ~((numbers >= 0) & (numbers <= np.finfo(np.float32).max))  # also NaN
    return np.where(is_bad, 0, numbers).astype(np.float32), is_bad, "a finite number from 0 up"


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


#: How the numbers or the dates of a column are written: see `rewrite_cells`.
Form = Mapping[str, str]

#: Every way to write numbers: the decimal point, and what is between thousands.
NUMBER_FORMS = [(point, between) for point, between in product(".,", ("", ",", ".", " ", "'")) if point != between]

#: Ways to write days, and times after them. With points, the day is first everywhere.
DAYS: tuple[str, ...] = (
    "%d.%m.%Y",
    "%d.%m.%y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%d-%m-%Y",
    "%m-%d-%Y",
    "%Y/%m/%d",
    "%Y.%m.%d",
    "%d/%m/%y",
)
DAYS += ("%m/%d/%y", "%d %b %Y", "%d-%b-%Y", "%d-%b-%y", "%b %d, %Y", "%d %B %Y", "%B %d, %Y")
TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")

#: So many values rule most forms of dates out.
FIRST = 20

#: What a form of dates has: a time, a year, digits only.
HAS_TIME, HAS_YEAR = re.compile("%[HIMSpfzZ]"), re.compile("%[YyG]")
IS_DIGITS = re.compile("(%[YymdHMS]){3,}")

#: A number with a decimal point that is between no thousands, and one that may be.
HAS_POINT, GROUPED = r"\.([0-9]{1,2}|[0-9]{4,})$", r"^[+-]?([1-9][0-9]{0,2}(\.[0-9]{3})+|0|[1-9][0-9]*)$"


def find_forms(
    columns: Mapping[str, Any],
    decimal: str | None = None,
    thousands: str | None = None,
    dates: str | None = None,
    known: Mapping[str, Form] = {},
) -> dict[str, Form]:
    """Returns the forms of the columns whose numbers or dates are not written as in Python.

    Args:
        columns: as `clean_column` returns them. Only columns of strings are read.
        decimal, thousands, dates: what the user says about it.
        known: the forms of other columns, from an earlier run.

    Raises:
        ConfigError: if the values of a column can mean two things, or no column has the dates that the user names.
    """
    from pyarrow import compute, types

    has_typed_dates = any(types.is_temporal(column.type) for column in columns.values())
    columns = {name: column for name, column in columns.items() if types.is_string(column.type)}
    if dates:
        check_date_form(dates)
    plain = {name: column for name, column in columns.items() if are_plain_numbers(strip_plus(column))}
    texts = {name: column.unique().drop_null().to_pylist() for name, column in columns.items() if name not in plain}
    given = [
        form
        for form in NUMBER_FORMS
        if decimal in (None, form[0]) and form[1] in ("", thousands or form[1]) and form[0] != thousands
    ]
    numbers = {name: find_number_forms(each, given) for name, each in texts.items()}
    points = {found[0][0][0] for found in numbers.values() if len(found) == 1 and len({p for p, _ in found[0]}) == 1}
    points = {decimal} if decimal else points
    if not points and any(
        compute.any(compute.match_substring_regex(each, HAS_POINT)).as_py() for each in plain.values()
    ):
        points = {"."}
    forms: dict[str, Form] = {}
    for name, found in numbers.items():
        if len(found) > 1 and len(points) == 1:
            found = [left for group in found if (left := [form for form in group if form[0] in points])]
        if len(found) > 1:
            refuse_two_meanings(name, texts[name], found)
        if found:
            form = next((form for form in found[0] if form[0] in points), found[0][0])
            forms[name] = {"decimal": form[0], "thousands": form[1]}
        elif day := find_date_form(name, texts[name], columns[name], given=dates):
            forms[name] = {"dates": day}
    dot_separates_thousands = thousands == "." or points == {","}
    for name, column in plain.items():
        if dates and IS_DIGITS.fullmatch(dates):
            days = column.unique().drop_null().to_pylist()
            if day := find_given_date_form(days, dates):
                forms[name] = {"dates": day}
                continue
        if dot_separates_thousands:
            is_grouped = compute.match_substring_regex(column, GROUPED)
            if compute.any(compute.match_substring(column, ".")).as_py() and compute.all(is_grouped).as_py():
                forms[name] = {"decimal": ",", "thousands": "."}
    is_used = any(form.get("dates", "").startswith(dates or "%") for form in [*forms.values(), *known.values()])
    if dates and columns and not (is_used or has_typed_dates):
        raise ConfigError(
            f"dataset.dates={dates}: the dates of no column are written so; it is as in Python's strptime"
        )
    return forms


def find_number_forms(values: Sequence[str], forms: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Returns the forms that most values have, and nearly all: those that mean the same numbers together."""
    marks = {mark for value in values for mark in re.findall(f"%|{MARKS}", value)}
    is_number = any(re.search(r"\d", value) for value in values[:FIRST])
    if not is_number or len(marks) > 1 or any(re.match(CODE, value) for value in values):
        return []
    means: dict[tuple[str | None, ...], list[tuple[str, str]]] = {}
    for form in forms:
        pattern = match_number(*form)
        means.setdefault(tuple(rewrite_number(value, pattern) for value in values), []).append(form)
    most = max(sum(each is not None for each in mean) for mean in means)
    if most < MOSTLY * len(values):
        return []
    found = [group for mean, group in means.items() if sum(each is not None for each in mean) == most]
    is_english = bool(marks & {"$", "\u00a3", "\u20b9", "USD", "GBP", "INR"}) and len(found) > 1
    return [group for group in found if not is_english or group[0][0] == "."]


def find_date_form(name: str, values: Sequence[str], column: Any, given: str | None) -> str | None:
    """Returns the form that nearly all values have; None if there is none, or they are dates as in ISO 8601.

    The form that the user gives comes first, also for values that are dates as in ISO 8601.
    """
    if given and (found := find_given_date_form(values, given)):
        return found
    if not values or cast_to_dates(column) is not None:
        return None
    best = find_best_date_forms(values, [day + time for day, time in product(DAYS, TIMES)])
    if len(best) > 1 and rewrite_cells(values, {"dates": best[0]}) != rewrite_cells(values, {"dates": best[1]}):
        raise ConfigError(
            f"dataset.data_dir: the column {name} has {values[0]}, a day in two ways; set "
            f"dataset.dates='{best[0]}' or dataset.dates='{best[1]}'"
        )
    return best[0] if best else None


def find_given_date_form(values: Sequence[str], given: str) -> str | None:
    """Returns the user's form of dates, with a time if it names none and the values have one; None if it does not fit."""
    times = [""] if HAS_TIME.search(given) else TIMES
    best = find_best_date_forms(values, [given + time for time in times])
    return best[0] if best else None


def find_best_date_forms(values: Sequence[str], forms: Iterable[str]) -> list[str]:
    """Returns the forms of dates that fit the most values, if these are nearly all; the first values rule most out."""

    def count(form: str, some: Sequence[str]) -> int:
        return sum(date is not None for date in parse_date_cells(some, form))

    first = values[:FIRST]
    likely = [form for form in forms if values and count(form, first) >= MOSTLY * len(first)]
    counts = {form: count(form, values) for form in likely}
    most = max(counts.values(), default=0)
    return [form for form, each in counts.items() if each == most and each >= MOSTLY * len(values)]


def check_date_form(form: str) -> None:
    """Raises ConfigError if `dataset.dates` is no form that `strptime` can read, or it has no year."""
    try:
        parse_date_cells(["2024-01-31"], form)
    except (ValueError, re.error) as error:
        raise ConfigError(
            f"dataset.dates={form}: is no form of Python's strptime ({error}); an example is '%d/%m/%Y %H:%M'"
        ) from error
    if not HAS_YEAR.search(form):
        raise ConfigError(f"dataset.dates={form}: has no year (%Y or %y), which a date needs; an example is '%d/%m/%Y'")


def refuse_two_meanings(name: str, values: Sequence[str], found: Sequence[Sequence[tuple[str, str]]]) -> None:
    """Raises ConfigError that shows a value which is two numbers."""
    meanings = [[rewrite_number(value, match_number(*group[0])) for value in values] for group in found[:2]]
    row = next(n for n, (one, other) in enumerate(zip(*meanings, strict=True)) if one != other)
    between = "," if "," in values[row] else "."
    ways = [
        f"{meaning[row]} with 'dataset.{'decimal' if group[0][0] == between else 'thousands'}=\"{between}\"'"
        for meaning, group in zip(meanings, found, strict=False)
    ]
    raise ConfigError(f"dataset.data_dir: the column {name} has {values[row]}, which is {' or '.join(ways)}")


def describe_forms(forms: Mapping[str, Form]) -> Iterator[str]:
    """Yields lines that say how columns are read."""
    ways: dict[str, list[str]] = {}
    for name, form in forms.items():
        between = f"{form['thousands']!r} between thousands" if form.get("thousands") else ""
        number = ", ".join(filter(None, (f"decimal {form.get('decimal')!r}", between)))
        ways.setdefault(f"dates as {form['dates']}" if "dates" in form else f"numbers with {number}", []).append(name)
    for way, names in ways.items():
        yield f"dataset: {way}: {join_first(names, FIRST)}"
