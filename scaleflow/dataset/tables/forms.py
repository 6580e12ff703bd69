"""How the numbers and dates of a CSV file are written, if not as in English: found by the values of a column."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from scaleflow.dataset.tables.values import CODE, MOSTLY, are_plain_numbers
from scaleflow.errors import ConfigError
from scaleflow.interfaces.formatting import join_first
from scaleflow.serving.cells import MARKS, cast_to_dates, match_number, rewrite_cells, rewrite_number, strip_plus

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

#: A number with a decimal point that is between no thousands, and one that may be.
HAS_POINT, GROUPED = r"\.([0-9]{1,2}|[0-9]{4,})$", r"^[+-]?([1-9][0-9]{0,2}(\.[0-9]{3})+|0|[1-9][0-9]*)$"


def find_forms(
    columns: Mapping[str, Any],
    quantities: Collection[str],
    decimal: str | None = None,
    thousands: str | None = None,
    dates: str | None = None,
) -> dict[str, Form]:
    """Returns how the numbers and dates of columns are written, of those that are not written as in Python.

    Args:
        columns: as `clean_column` returns them; those of strings are looked at.
        quantities: the columns that may be numbers.
        decimal, thousands, dates: what the user says about it.

    Raises:
        ConfigError: if the values of a column can mean two things.
    """
    from pyarrow import compute, types

    columns = {name: column for name, column in columns.items() if types.is_string(column.type)}
    plain = {name: column for name, column in columns.items() if are_plain_numbers(strip_plus(column))}
    texts = {name: column.unique().drop_null().to_pylist() for name, column in columns.items() if name not in plain}
    given = [
        form
        for form in NUMBER_FORMS
        if decimal in (None, form[0]) and form[1] in ("", thousands or form[1]) and form[0] != thousands
    ]
    numbers = {name: find_number_forms(each if name in quantities else (), given) for name, each in texts.items()}
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
        elif day := find_date_form(name, texts[name], columns[name], dates):
            forms[name] = {"dates": day}
    for name, column in plain.items() if "." in (thousands, *("." for point in points if points == {","})) else ():
        is_grouped = compute.match_substring_regex(column, GROUPED)
        if compute.any(compute.match_substring(column, ".")).as_py() and compute.all(is_grouped).as_py():
            forms[name] = {"decimal": ",", "thousands": "."}
    if dates and not any("dates" in form for form in forms.values()):
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
    """Returns the form that nearly all values have; None if there is none, or they are dates as in ISO 8601."""
    if not values or cast_to_dates(column) is not None:
        return None

    def count(form: str, some: Sequence[str]) -> int:
        return sum(new != old for new, old in zip(rewrite_cells(some, {"dates": form}), some, strict=True))

    for days in ([given] if given else [], DAYS):
        forms = [day + time for day, time in product(days, TIMES)]
        forms = [form for form in forms if count(form, values[:FIRST]) >= MOSTLY * len(values[:FIRST])]
        counts = {form: each for form in forms if (each := count(form, values)) >= MOSTLY * len(values)}
        best = [form for form, each in counts.items() if each == max(counts.values())]
        if len(best) > 1 and rewrite_cells(values, {"dates": best[0]}) != rewrite_cells(values, {"dates": best[1]}):
            raise ConfigError(
                f"dataset.data_dir: the column {name} has {values[0]}, a day in two ways; set "
                f"dataset.dates='{best[0]}' or dataset.dates='{best[1]}'"
            )
        if best:
            return best[0]
    return None


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
