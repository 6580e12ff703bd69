"""Finds the types of columns and how their numbers and dates are written. Converts targets.

pyarrow is imported inside the functions, because only this dataset needs it.
"""

from __future__ import annotations

import contextlib
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

#: A column with more different values than this has many. If nearly all of these are numbers or dates, it is ambiguous
#: as well. With `kind: auto`, more whole numbers than this are no classes.
MANY_VALUES = 20

#: Maximum number of columns that a note names.
MAX_COLUMNS_SHOWN = 20

#: A code that loses characters if it is read as a number: 01234, 1E5.
CODE = r"^([+-]?0[0-9]+|[1-9][0-9]*E[0-9]+)$"


def infer_type(name: str, text: Any, place: Any, ways: str) -> Any:
    """Converts a column of strings to numbers, booleans or dates if all of its values fit. Else it returns the strings.

    Args:
        name: of the column.
        text: the strings, as `ColumnReader.clean` returns them. Null is missing.
        place: names a row in a message.
        ways: how to resolve an ambiguity, for a message.

    Raises:
        ConfigError: if nearly all values are numbers or dates, but not all.
    """
    import pyarrow
    from pyarrow import compute

    if text.null_count == len(text) or are_codes(text):
        return text
    plain = strip_plus(text)
    if are_plain_numbers(plain):  # the cast alone is no test: pyarrow takes 0x1F for an int64
        for number_type in ("int64", "float64"):
            with contextlib.suppress(pyarrow.ArrowInvalid):
                return compute.cast(plain, number_type)
    for other_type in ("bool", "timestamp[us]", pyarrow.timestamp("us", "UTC")):
        with contextlib.suppress(pyarrow.ArrowInvalid):
            return compute.cast(text, other_type)
    refuse_ambiguous_column(name, text, place, ways=ways)
    return text


def refuse_ambiguous_column(name: str, text: Any, place: Any, ways: str) -> None:
    """Raises ConfigError if nearly all strings of a column are numbers, or dates. See `infer_type`."""
    from pyarrow import compute

    different = text.unique().drop_null()
    present = len(text) - text.null_count
    for noun, pattern in (("numbers", IS_NUMBER), ("dates", IS_DATE)):
        fits = compute.fill_null(compute.match_substring_regex(text, pattern), True)
        others = compute.sum(compute.invert(fits)).as_py()
        different_fits = compute.sum(compute.match_substring_regex(different, pattern)).as_py()
        has_many_fits = len(different) * MOSTLY > MANY_VALUES and different_fits >= len(different) * MOSTLY
        is_mostly = others <= (1 - MOSTLY) * present or has_many_fits
        if others and is_mostly:
            row = compute.index(fits, False).as_py()
            raise ConfigError(
                f"dataset.data_dir: the column {name} has {text[row].as_py()!r} ({place(row)}), and {present - others} "
                f"of its {present} values are {noun}; add this value to dataset.missing, or {ways}"
            )


def are_codes(text: Any) -> bool:
    """Returns whether strings look like numbers, but some of them lose characters as numbers: 01234, 1E5."""
    from pyarrow import compute

    has_code = compute.any(compute.match_substring_regex(text, CODE)).as_py()
    return bool(has_code) and are_plain_numbers(text)


def are_plain_numbers(column: Any) -> bool:
    """Returns whether pyarrow can convert a column to numbers while it reads a CSV file."""
    import pyarrow
    from pyarrow import compute

    try:
        compute.cast(column, "float64")
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
        return False
    return True


def to_weights(column: Any) -> tuple[Array, Array, str]:
    """Converts a column to the weights of rows.

    Returns:
        The weights, [n] float32, whether each is unusable, [n] bool, and a text about the expected values.
    """
    numbers, is_bad = to_numbers(column)
    is_in_range = (numbers >= 0) & (numbers <= np.finfo(np.float32).max)  # False for NaN
    is_bad |= ~is_in_range
    weights = np.where(is_bad, 0, numbers).astype(np.float32)
    return weights, is_bad, "a finite number from 0 up"


def to_classes(column: Any) -> Any:
    """Converts a target to the names of its classes: strings, "" if missing."""
    from pyarrow import compute, types

    return to_strings(compute.cast(column, "string") if types.is_boolean(column.type) else column)


def convert_target(column: Any, outputs: Outputs) -> tuple[Array, Array, str]:
    """Converts a column to the targets of rows. An unknown class becomes `outputs.ignore` if that is set.

    Returns:
        The targets, [n, 1] or [n], whether each is unusable, [n] bool, and a text about the expected values.
    """
    from pyarrow import compute

    if outputs.kind == "regression":
        numbers, is_bad = to_numbers(column)
        return numbers[:, None], is_bad | np.isnan(numbers), EXPECTED[NUMBER]
    names = to_classes(column)
    different = names.unique()
    places = match_names(different.to_pylist(), outputs.names or ())
    unknown = outputs.ignore or 0
    code_of_name = np.array([unknown if place is None else place for place in places], np.int32)
    is_name_known = np.array([place is not None for place in places], bool)
    rows = compute.index_in(names, value_set=different).to_numpy()
    classes = code_of_name[rows]
    is_bad = ~is_name_known[rows]
    if outputs.ignore is not None:
        is_bad = compute.equal(names, "").to_numpy(zero_copy_only=False)
    targets = classes.astype(np.float32)[:, None] if outputs.kind == "binary" else classes
    return targets, is_bad, f"a class of the training split ({show_classes(outputs.names or ())})"


#: How the numbers or the dates of a column are written: see `rewrite_cells`.
Form = Mapping[str, str]

#: How numbers are written: the decimal point, and the separator of thousands.
NumberForm = tuple[str, str]

NUMBER_FORMS: list[NumberForm] = [
    (point, separator) for point, separator in product(".,", ("", ",", ".", " ", "'")) if point != separator
]

#: Ways to write days. With points, the day comes first everywhere.
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
    "%m/%d/%y",
    "%d %b %Y",
    "%d-%b-%Y",
    "%d-%b-%y",
    "%b %d, %Y",
    "%d %B %Y",
    "%B %d, %Y",
)

#: Ways to write a time after a day.
TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")

#: Values that are tried with every form of dates, before the likely forms are tried with all values.
FIRST_VALUES = 20

#: The same for forms of numbers. These values are spread over all values.
SPREAD_VALUES = 200

#: With these currencies, a point is the decimal one.
ENGLISH_UNITS = ("$", "USD", "GBP", "INR")

#: Whether a form of dates has a time, a year, or only parts that make a number.
HAS_TIME = re.compile("%[HIMSpfzZ]")
HAS_YEAR = re.compile("%[YyG]")
IS_NUMERIC = re.compile(r"(%[YymdjHMS]\.?){2,}")

#: A number with a point that cannot separate thousands.
HAS_POINT = r"\.([0-9]{1,2}|[0-9]{4,})$"

#: A number whose points can all separate thousands.
GROUPED = r"^[+-]?([1-9][0-9]{0,2}(\.[0-9]{3})+|0|[1-9][0-9]*)$"


def find_forms(
    columns: Mapping[str, Any],
    decimal: str | None = None,
    thousands: str | None = None,
    dates: str | None = None,
    known: Mapping[str, Form] = {},
    numeric: Collection[str] = (),
    inputs: Collection[str] = (),
) -> dict[str, Form]:
    """Finds how numbers and dates are written, for columns that do not write them as Python does.

    Args:
        columns: as `ColumnReader.clean` returns them. Only columns of strings are examined.
        decimal: the decimal point, if the user names it.
        thousands: the separator of thousands, if the user names it.
        dates: the form of dates, if the user names it.
        known: the forms of other columns, from an earlier run.
        numeric: columns that the user takes for numbers. Numbers with a rare unit are missing there.
        inputs: columns that are inputs, for messages.

    Raises:
        ConfigError: if a value can mean two things, a column has several units, or no column has the user's dates.
    """
    from pyarrow import types

    if dates:
        check_date_form(dates)
    strings = {name: column for name, column in columns.items() if types.is_string(column.type)}
    plain: dict[str, Any] = {}  # columns of numbers as in Python
    texts: dict[str, list[str]] = {}  # the different values of the other columns
    for name, column in strings.items():
        if are_plain_numbers(strip_plus(column)):
            plain[name] = column
        else:
            texts[name] = column.unique().drop_null().to_pylist()
    allowed = choose_number_forms(decimal, thousands)
    number_forms = {name: find_number_forms(values, allowed) for name, values in texts.items()}
    points = {decimal} if decimal else find_points(number_forms.values(), plain.values())
    forms: dict[str, Form] = {}
    for name, values in texts.items():
        number_form = choose_number_form(name, values, number_forms[name], points)
        if number_form is not None:
            unit = find_unit(name, strings[name], number_form, numeric=numeric, inputs=inputs)
            forms[name] = {"decimal": number_form[0], "thousands": number_form[1], "unit": unit}
            continue
        date_form = find_date_form(name, values, strings[name], users_form=dates)
        if date_form is not None:
            forms[name] = {"dates": date_form}
    forms |= find_forms_of_plain_numbers(plain, dates, dot_separates_thousands=thousands == "." or points == {","})
    has_typed_dates = any(types.is_temporal(column.type) for column in columns.values())
    if dates and strings and not has_typed_dates:
        check_dates_used(dates, [*forms.values(), *known.values()])
    return forms


def choose_number_forms(decimal: str | None, thousands: str | None) -> list[NumberForm]:
    """Returns the forms of numbers that have the decimal point and the separator that the user names, if any."""
    allowed: list[NumberForm] = []
    for point, separator in NUMBER_FORMS:
        fits_decimal = decimal is None or point == decimal
        fits_thousands = thousands is None or (separator in ("", thousands) and point != thousands)
        if fits_decimal and fits_thousands:
            allowed.append((point, separator))
    return allowed


def find_forms_of_plain_numbers(
    columns: Mapping[str, Any], dates: str | None, dot_separates_thousands: bool
) -> dict[str, Form]:
    """Returns the forms of columns of numbers as in Python that mean dates or other numbers.

    Args:
        columns: the columns of numbers as in Python.
        dates: the user's form of dates. Numbers such as 20250301 can have it.
        dot_separates_thousands: whether 1.200 is 1200.
    """
    forms: dict[str, Form] = {}
    for name, column in columns.items():
        date_form = find_date_form_of_numbers(column, dates) if dates else None
        if date_form is not None:
            forms[name] = {"dates": date_form}
        elif dot_separates_thousands and is_grouped_by_dots(column):
            forms[name] = {"decimal": ",", "thousands": ".", "unit": ""}
    return forms


def check_dates_used(dates: str, forms: Iterable[Form]) -> None:
    """Raises ConfigError if no column has the user's form of dates."""
    for form in forms:
        if form.get("dates", "").startswith(dates):
            return
    raise ConfigError(f"dataset.dates={dates}: the dates of no column are written so; it is as in Python's strptime")


def find_points(form_groups: Iterable[Sequence[Sequence[NumberForm]]], plain: Iterable[Any]) -> set[str]:
    """Returns the decimal points of the columns that allow only one. They decide about the other columns.

    Args:
        form_groups: for each column, its possible forms in groups.
        plain: columns of numbers as in Python.
    """
    from pyarrow import compute

    points: set[str] = set()
    for groups in form_groups:
        points_of_column = {form[0] for form in groups[0]} if len(groups) == 1 else set()
        if len(points_of_column) == 1:
            points |= points_of_column
    if points:
        return points
    for column in plain:
        if compute.any(compute.match_substring_regex(column, HAS_POINT)).as_py():
            return {"."}
    return set()


def choose_number_form(
    name: str, values: Sequence[str], groups: Sequence[Sequence[NumberForm]], points: Collection[str]
) -> NumberForm | None:
    """Returns the form of a column's numbers; None if it has no numbers.

    Args:
        name: of the column.
        values: its different values.
        groups: its possible forms. The forms of a group yield the same numbers.
        points: the decimal points of other columns.

    Raises:
        ConfigError: if two groups are possible.
    """
    if len(groups) > 1 and len(points) == 1:
        groups = keep_forms_with_points(groups, points)
    if not groups:
        return None
    if len(groups) > 1:
        refuse_two_meanings(name, values, groups)
    for form in groups[0]:
        if form[0] in points:
            return form
    return groups[0][0]


def keep_forms_with_points(groups: Sequence[Sequence[NumberForm]], points: Collection[str]) -> list[list[NumberForm]]:
    """Returns the groups with those forms that have one of the decimal points, without empty groups."""
    kept: list[list[NumberForm]] = []
    for group in groups:
        forms = [form for form in group if form[0] in points]
        if forms:
            kept.append(forms)
    return kept


def find_unit(name: str, column: Any, form: NumberForm, numeric: Collection[str], inputs: Collection[str]) -> str:
    """Returns the most frequent unit of a column's numbers, "" if they have none.

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


def find_date_form_of_numbers(column: Any, users_form: str) -> str | None:
    """Returns the user's form of dates if numbers as in Python, such as 20250301, have it."""
    if not IS_NUMERIC.fullmatch(users_form):
        return None
    return fit_users_date_form(column.unique().drop_null().to_pylist(), users_form)


def find_number_forms(values: Sequence[str], forms: Sequence[NumberForm]) -> list[list[NumberForm]]:
    """Returns number forms that fit nearly all values, grouped by the numbers they yield."""
    spread = values[:: len(values) // SPREAD_VALUES + 1]
    likely = [form for form in forms if count_numbers(spread, form) >= MOSTLY / 2 * len(spread)]
    if not spread or not likely or any(re.match(CODE, value) for value in values):
        return []
    groups: dict[tuple[str | None, ...], list[NumberForm]] = {}  # by the numbers of all values, None if not a number
    for form in likely:
        pattern = match_number(*form)
        numbers = tuple(rewrite_number(value, pattern) for value in values)
        groups.setdefault(numbers, []).append(form)
    counts = {numbers: len(numbers) - numbers.count(None) for numbers in groups}
    best_count = max(counts.values())
    if best_count < MOSTLY * len(values):
        return []
    best_groups = [group for numbers, group in groups.items() if counts[numbers] == best_count]
    if len(best_groups) > 1 and has_english_unit(spread, best_groups[0][0]):
        return [group for group in best_groups if group[0][0] == "."]
    return best_groups


def has_english_unit(values: Iterable[str], form: NumberForm) -> bool:
    """Returns whether a number has a currency whose countries write a decimal point."""
    pattern = match_number(*form)
    for value in values:
        parsed = parse_number(value, pattern)
        if parsed is not None and parsed[1] in ENGLISH_UNITS:
            return True
    return False


def count_numbers(values: Sequence[str], form: NumberForm) -> int:
    pattern = match_number(*form)
    return sum(pattern.fullmatch(value) is not None for value in values)


def refuse_several_units(name: str, units: str, is_input: bool) -> None:
    """Raises ConfigError about a column whose numbers have several units. An input has more ways out than a target."""
    ways = ""
    if is_input:
        ways = (
            f", or add {name} to dataset.numeric (numbers with another unit than the most frequent one are then "
            "missing), dataset.categorical or dataset.drop"
        )
    raise ConfigError(
        f"dataset.data_dir: the column {name} has numbers with several units: {units}; write them in one unit in the "
        f"file{ways}"
    )


def describe_other_units(name: str, unit: str, counts: Mapping[str, int]) -> str:
    """Returns a note about the numbers of a column whose unit is not the one of training."""
    units = describe_units(counts)
    return f"dataset: {name}: {sum(counts.values()):,} numbers are not in {unit}, but in {units}; they count as missing"


def describe_bare_numbers(columns: Mapping[str, Any], forms: Mapping[str, Form]) -> Iterator[str]:
    """Yields lines about columns whose numbers have a unit in some rows only."""
    for name, form in forms.items():
        if not form.get("unit"):
            continue
        counts = count_units(columns[name], form)
        if counts[""]:
            yield (
                f"dataset: {name}: {counts['']:,} of {counts.total():,} numbers have no unit, and are read in "
                f"{form['unit']}"
            )


def find_date_form(name: str, values: Sequence[str], column: Any, users_form: str | None) -> str | None:
    """Returns the form that nearly all values have; None if no form fits, or they are dates as in ISO 8601.

    The user's form comes first, also for dates as in ISO 8601.
    """
    if users_form:
        fitting = fit_users_date_form(values, users_form)
        if fitting is not None:
            return fitting
    if not values or cast_to_dates(column) is not None:
        return None
    best = find_best_date_forms(values, [day + time for day, time in product(DAYS, TIMES)])
    if len(best) > 1 and rewrite_cells(values, {"dates": best[0]}) != rewrite_cells(values, {"dates": best[1]}):
        raise ConfigError(
            f"dataset.data_dir: the column {name} has {values[0]}, a day in two ways; set "
            f"dataset.dates='{best[0]}' or dataset.dates='{best[1]}'"
        )
    return best[0] if best else None


def fit_users_date_form(values: Sequence[str], users_form: str) -> str | None:
    """Returns the user's form of dates, with a time if it has none and the values have one; None if it does not fit."""
    times = [""] if HAS_TIME.search(users_form) else TIMES
    best = find_best_date_forms(values, [users_form + time for time in times])
    return best[0] if best else None


def find_best_date_forms(values: Sequence[str], forms: Iterable[str]) -> list[str]:
    """Returns the forms of dates that fit the largest number of values, if that is nearly all of them."""
    if not values:
        return []
    first = values[:FIRST_VALUES]
    counts: dict[str, int] = {}
    for form in forms:
        if count_dates(first, form) >= MOSTLY * len(first):
            counts[form] = count_dates(values, form)
    best_count = max(counts.values(), default=0)
    if best_count < MOSTLY * len(values):
        return []
    return [form for form, count in counts.items() if count == best_count]


def count_dates(values: Sequence[str], form: str) -> int:
    return sum(date is not None for date in parse_date_cells(values, form))


def check_date_form(form: str) -> None:
    """Raises ConfigError if `dataset.dates` is no form for `strptime`, or has no year."""
    try:
        parse_date_cells(["2024-01-31"], form)
    except (ValueError, re.error) as error:
        raise ConfigError(
            f"dataset.dates={form}: is no form of Python's strptime ({error}); an example is '%d/%m/%Y %H:%M'"
        ) from error
    if not HAS_YEAR.search(form):
        raise ConfigError(f"dataset.dates={form}: has no year (%Y or %y), which a date needs; an example is '%d/%m/%Y'")


def refuse_two_meanings(name: str, values: Sequence[str], groups: Sequence[Sequence[NumberForm]]) -> None:
    """Raises ConfigError that shows a value which is a different number in the first two groups of forms."""
    first = match_number(*groups[0][0])
    second = match_number(*groups[1][0])
    for value in values:
        numbers = [rewrite_number(value, first), rewrite_number(value, second)]
        if numbers[0] != numbers[1]:
            break
    mark = "," if "," in value else "."
    ways: list[str] = []
    for group, number in zip(groups, numbers, strict=False):
        option = "decimal" if group[0][0] == mark else "thousands"
        ways.append(f"{number} with 'dataset.{option}=\"{mark}\"'")
    raise ConfigError(f"dataset.data_dir: the column {name} has {value}, which is {' or '.join(ways)}")


def describe_forms(forms: Mapping[str, Form]) -> Iterator[str]:
    """Yields lines that say how columns are read."""
    ways: dict[str, list[str]] = {}
    for name, form in forms.items():
        ways.setdefault(describe_form(form), []).append(name)
    for way, names in ways.items():
        yield f"dataset: {way}: {join_first(names, MAX_COLUMNS_SHOWN)}"


def describe_form(form: Form) -> str:
    if "dates" in form:
        return f"dates as {form['dates']}"
    parts = [f"decimal {form.get('decimal')!r}"]
    if form.get("thousands"):
        parts.append(f"{form['thousands']!r} between thousands")
    if form.get("unit"):
        parts.append(f"the unit {form['unit']}")
    return f"numbers with {', '.join(parts)}"
