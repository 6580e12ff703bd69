"""Finds the types of columns, and how their numbers and dates are written, if not as in English; converts targets.

pyarrow is imported inside the functions, because only this dataset needs it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    NUMBER,
    Array,
    cast_to_dates,
    count_units,
    describe_units,
    match_names,
    match_number,
    parse_date_cells,
    parse_number,
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

#: So many values rule most forms of dates out, and so many that are spread over all most forms of numbers.
FIRST, SPREAD = 20, 200

#: With such a currency, a point is the decimal one.
ENGLISH_UNITS = ("$", "USD", "GBP", "INR")

#: What a form of dates has: a time, a year, only parts that make a number.
HAS_TIME, HAS_YEAR = re.compile("%[HIMSpfzZ]"), re.compile("%[YyG]")
IS_NUMERIC = re.compile(r"(%[YymdjHMS]\.?){2,}")

#: A number with a decimal point that is between no thousands, and one that may be.
HAS_POINT, GROUPED = r"\.([0-9]{1,2}|[0-9]{4,})$", r"^[+-]?([1-9][0-9]{0,2}(\.[0-9]{3})+|0|[1-9][0-9]*)$"


def find_forms(
    columns: Mapping[str, Any],
    decimal: str | None = None,
    thousands: str | None = None,
    dates: str | None = None,
    known: Mapping[str, Form] = {},
    numeric: Collection[str] = (),
    inputs: Collection[str] = (),
) -> dict[str, Form]:
    """Returns the forms of the columns whose numbers or dates are not written as in Python.

    Args:
        columns: as `ColumnReader.clean` returns them. Only columns of strings are read.
        decimal, thousands, dates: what the user says about it.
        known: the forms of other columns, from an earlier run.
        numeric: columns that the user takes for numbers. Numbers with a rare unit are missing there.
        inputs: columns that are inputs, for messages.

    Raises:
        ConfigError: if the values of a column can mean two things or have several units, or no column has the dates
            that the user names.
    """
    from pyarrow import types

    if dates:
        check_date_form(dates)
    strings = {name: column for name, column in columns.items() if types.is_string(column.type)}
    plain = {name: column for name, column in strings.items() if are_plain_numbers(strip_plus(column))}
    texts = {name: column.unique().drop_null().to_pylist() for name, column in strings.items() if name not in plain}
    possible = [
        form
        for form in NUMBER_FORMS
        if decimal in (None, form[0]) and form[1] in ("", thousands or form[1]) and form[0] != thousands
    ]
    numbers = {name: find_number_forms(values, possible) for name, values in texts.items()}
    points = {decimal} if decimal else find_points(numbers.values(), plain.values())
    forms: dict[str, Form] = {}
    for name, values in texts.items():
        if form := choose_number_form(name, values, numbers[name], points):
            unit = find_unit(name, strings[name], form, numeric=numeric, inputs=inputs)
            forms[name] = {"decimal": form[0], "thousands": form[1], "unit": unit}
        elif day := find_date_form(name, values, strings[name], given=dates):
            forms[name] = {"dates": day}
    dot_separates_thousands = thousands == "." or points == {","}
    for name, column in plain.items():
        if dates and (day := find_date_form_of_numbers(column, dates)):
            forms[name] = {"dates": day}
        elif dot_separates_thousands and is_grouped_by_dots(column):
            forms[name] = {"decimal": ",", "thousands": ".", "unit": ""}
    if dates and strings:
        has_typed_dates = any(types.is_temporal(column.type) for column in columns.values())
        is_used = any(form.get("dates", "").startswith(dates) for form in [*forms.values(), *known.values()])
        if not (is_used or has_typed_dates):
            raise ConfigError(
                f"dataset.dates={dates}: the dates of no column are written so; it is as in Python's strptime"
            )
    return forms


def find_points(numbers: Iterable[Sequence[Sequence[tuple[str, str]]]], plain: Iterable[Any]) -> set[str]:
    """Returns the decimal points of the columns that have only one, to decide about the others.

    Args:
        numbers: by column, its groups of forms.
        plain: columns of numbers as in Python.
    """
    from pyarrow import compute

    points: set[str] = set()
    for groups in numbers:
        if len(groups) == 1 and len({form[0] for form in groups[0]}) == 1:
            points.add(groups[0][0][0])
    if points:
        return points
    has_point = any(compute.any(compute.match_substring_regex(column, HAS_POINT)).as_py() for column in plain)
    return {"."} if has_point else set()


def choose_number_form(
    name: str, values: Sequence[str], groups: Sequence[Sequence[tuple[str, str]]], points: Collection[str]
) -> tuple[str, str] | None:
    """Returns the form of a column's numbers; None if it has no numbers. Raises ConfigError if two forms are possible.

    Args:
        groups: forms that mean the same numbers together.
        points: the decimal points of other columns.
    """
    if len(groups) > 1 and len(points) == 1:
        with_point = [[form for form in group if form[0] in points] for group in groups]
        groups = [group for group in with_point if group]
    if not groups:
        return None
    if len(groups) > 1:
        refuse_two_meanings(name, values, groups)
    return next((form for form in groups[0] if form[0] in points), groups[0][0])


def find_unit(name: str, column: Any, form: tuple[str, str], numeric: Collection[str], inputs: Collection[str]) -> str:
    """Returns the unit of a column's numbers, "" if they have none.

    Raises ConfigError if they have several, and the user does not take the column for numbers.
    """
    counts = count_units(column, {"decimal": form[0], "thousands": form[1]})
    del counts[""]
    if len(counts) > 1 and name not in numeric:
        refuse_several_units(name, describe_units(counts), is_input=name in inputs)
    return max(counts, key=counts.__getitem__, default="")


def is_grouped_by_dots(column: Any) -> bool:
    """Returns whether a column of numbers as in Python can have a dot between thousands, as in 1.200."""
    from pyarrow import compute

    has_dot = compute.any(compute.match_substring(column, ".")).as_py()
    return bool(has_dot and compute.all(compute.match_substring_regex(column, GROUPED)).as_py())


def find_date_form_of_numbers(column: Any, given: str) -> str | None:
    """Returns the user's form of dates if numbers as in Python, such as 20250301, have it."""
    if not IS_NUMERIC.fullmatch(given):
        return None
    return find_given_date_form(column.unique().drop_null().to_pylist(), given)


def find_number_forms(values: Sequence[str], forms: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Returns number formats that fit nearly all values, grouped by the numbers they yield."""
    some = values[:: len(values) // SPREAD + 1]
    likely = [form for form in forms if count_numbers(some, form) >= MOSTLY / 2 * len(some)]
    if not some or not likely or any(re.match(CODE, value) for value in values):
        return []
    means: dict[tuple[str | None, ...], list[tuple[str, str]]] = {}
    for form in likely:
        pattern = match_number(*form)
        means.setdefault(tuple(rewrite_number(value, pattern) for value in values), []).append(form)
    most = max(sum(each is not None for each in mean) for mean in means)
    if most < MOSTLY * len(values):
        return []
    found = [group for mean, group in means.items() if sum(each is not None for each in mean) == most]
    pattern = match_number(*found[0][0])
    units = {parsed[1] for value in some if (parsed := parse_number(value, pattern)) is not None}
    is_english = len(found) > 1 and not units.isdisjoint(ENGLISH_UNITS)
    return [group for group in found if not is_english or group[0][0] == "."]


def count_numbers(values: Sequence[str], form: tuple[str, str]) -> int:
    pattern = match_number(*form)
    return sum(pattern.fullmatch(value) is not None for value in values)


def refuse_several_units(name: str, units: str, is_input: bool) -> None:
    """Raises ConfigError about a column whose numbers have several units; only an input can be read otherwise."""
    ways = (
        f", or add {name} to dataset.numeric (numbers with another unit than the most frequent one are then missing), "
        "dataset.categorical or dataset.drop"
    )
    raise ConfigError(
        f"dataset.data_dir: the column {name} has numbers with several units: {units}; write them in one unit in the "
        f"file{ways if is_input else ''}"
    )


def describe_other_units(name: str, unit: str, counts: Mapping[str, int]) -> str:
    """Returns a note on the numbers of a column that have another unit than the one it was trained with."""
    units = describe_units(counts)
    return f"dataset: {name}: {sum(counts.values()):,} numbers are not in {unit}, but in {units}; they count as missing"


def describe_bare_numbers(columns: Mapping[str, Any], forms: Mapping[str, Form]) -> Iterator[str]:
    """Yields lines on columns whose numbers have a unit in some rows only."""
    for name, form in forms.items():
        if not form.get("unit"):
            continue
        counts = count_units(columns[name], form)
        if counts[""]:
            yield (
                f"dataset: {name}: {counts['']:,} of {counts.total():,} numbers have no unit, and are read in "
                f"{form['unit']}"
            )


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
    """Returns the user's form of dates, with a time if it names none and the values have one; None if none fits."""
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
        unit = f"the unit {form['unit']}" if form.get("unit") else ""
        number = ", ".join(filter(None, (f"decimal {form.get('decimal')!r}", between, unit)))
        ways.setdefault(f"dates as {form['dates']}" if "dates" in form else f"numbers with {number}", []).append(name)
    for way, names in ways.items():
        yield f"dataset: {way}: {join_first(names, FIRST)}"
