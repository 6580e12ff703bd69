"""Converts the cells of tables, files, data frames and JSON to a model's inputs: numbers, texts and dates.

Training, `scaleflow predict` and the served model read a column with the same `ColumnReader`. The learned state of the
preprocessing, such as means and vocabularies, is part of the saved model.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
from pyarrow import compute, types

#: The kinds of columns, as messages call them.
NUMBER = "numbers"
CATEGORY = "categories"
TEXT = "texts"
DATE = "dates"

#: Strings that mean a missing value.
MISSING = ("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?", ".")

#: A string that is a number.
IS_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?$"

#: A string that is a date with or without a time.
IS_DATE = r"^(\d{3}[1-9]|\d\d[1-9]\d|\d[1-9]\d\d|[1-9]\d{3})-\d\d-\d\d"
IS_DATE += r"([ T]([01]\d|2[0-3])(:[0-5]\d(:[0-5]\d(\.\d+)?)?)?(Z|[+-]\d\d(:?\d\d)?)?)?$"

#: A date with a time zone.
HAS_ZONE = r"[ T].*(Z|[+-]\d\d(:?\d\d)?)$"

#: Separator of thousands -> pattern of its variants.
SEPARATORS = {" ": "[ \u00a0\u202f]", "'": "['\u2019]", ",": ",", ".": r"\."}

#: Signs and codes of currencies.
MARKS = r"R?\$|[\u00a2-\u00a5\u20a0-\u20cf]|z\u0142|K\u010d|(?:kr|Rs|\u0440\u0443\u0431)\.?"
MARKS += "|USD|EUR|GBP|CHF|JPY|CNY|INR|RUB|BRL|SEK|NOK|DKK|PLN|CZK|HUF"
MINUS = ("-", "\u2212")

#: Currency sign -> code. Signs that several currencies share, such as `$` or `kr`, have no code.
CODES_OF_SIGNS = {"€": "EUR", "£": "GBP", "₹": "INR", "₽": "RUB", "\u0440\u0443\u0431": "RUB", "R$": "BRL"}
CODES_OF_SIGNS |= {"z\u0142": "PLN", "K\u010d": "CZK"}

Array = np.ndarray[Any, Any]


def match_number(decimal: str, thousands: str) -> re.Pattern[str]:
    """Returns a pattern of numbers such as `(1.163,74 €)`. It rejects leading zeros: `007` is a code, not a number."""
    grouped = rf"[1-9]\d{{0,2}}(?:{SEPARATORS[thousands]}\d{{3}})+|" if thousands else ""
    grouped += r"[1-9]\d?(?:,\d\d)+,\d{3}|" if thousands == "," else ""  # 12,34,567 as in India
    part = rf"(?:{re.escape(decimal)}(?P<part>\d*))?(?P<power>[eE][+-]?\d{{1,3}})?"
    sign = "[+\u2212-]?"
    before = rf"(?P<open>\()?(?P<sign>{sign})\s?(?P<mark>{MARKS})?\s?(?P<inner>{sign})"
    after = rf"(?P<after>[\u2212-]?)\s?(?P<unit>%|{MARKS})?(?(open)\))"
    return re.compile(rf"{before}(?P<whole>{grouped}0|[1-9]\d*|(?=\D\d)){part}{after}")


def parse_number(text: str, pattern: re.Pattern[str]) -> tuple[str, str] | None:
    """Parses a number. Returns (the number in Python's notation, its unit or ""), or None if the text does not match.

    `12.5%` is 12.5 with the unit `%`. `€` and `EUR` are the same unit.
    """
    match = pattern.fullmatch(text)
    if match is None:
        return None
    number = re.sub(r"\D", "", match["whole"]) or "0"
    if match["part"]:
        number += f".{match['part']}"
    if match["power"]:
        number += match["power"]
    if match["open"] or any(match[group] in MINUS for group in ("sign", "inner", "after")):
        number = f"-{number}"
    units = []
    for mark in (match["mark"], match["unit"]):
        if mark:
            unit = mark.rstrip(".")
            units.append(CODES_OF_SIGNS.get(unit, unit))
    return number, " ".join(units)


def rewrite_number(text: str, pattern: re.Pattern[str]) -> str | None:
    """Converts a number to Python's notation; None if the text does not match."""
    parsed = parse_number(text, pattern)
    return None if parsed is None else parsed[0]


def rewrite_cells(cells: Iterable[str | None], form: Mapping[str, str]) -> list[str | None]:
    """Rewrites numbers in Python's notation, or dates in ISO form. Missing and other cells stay as they are.

    A number with another unit than `form["unit"]` becomes missing: see `ColumnReader.count_other_units`.

    Args:
        cells: the distinct values of a column.
        form: `{"decimal": ",", "thousands": ".", "unit": "EUR"}`, or `{"dates": "%d.%m.%Y"}`. The unit is "" if the
            numbers of the column had no unit in training.
    """
    cells = list(cells)
    if "dates" in form:
        dates = parse_date_cells(cells, form["dates"])
        return [cell if date is None else date for cell, date in zip(cells, dates, strict=True)]
    pattern = match_number(form["decimal"], form["thousands"])
    return [None if cell is None else rewrite_cell(cell, pattern, form["unit"]) for cell in cells]


def rewrite_cell(cell: str, pattern: re.Pattern[str], unit: str) -> str | None:
    """Rewrites one cell for `rewrite_cells`.

    If the column has no unit, a number with a unit stays text. If the column has another unit, it becomes None.
    """
    parsed = parse_number(cell, pattern)
    if parsed is None:
        return cell
    if parsed[1] in ("", unit):
        return parsed[0]
    return None if unit else cell


def count_units(column: Any, form: Mapping[str, str]) -> Counter[str]:
    """Counts the numbers in a clean column of strings by unit. Numbers without a unit count as ""."""
    pattern = match_number(form["decimal"], form["thousands"])
    counts: Counter[str] = Counter()
    for entry in column.value_counts().to_pylist():
        parsed = None if entry["values"] is None else parse_number(entry["values"], pattern)
        if parsed is not None:
            counts[parsed[1]] += entry["counts"]
    return counts


def describe_units(units: Mapping[str, int]) -> str:
    """Formats the five most frequent units with their counts, such as `EUR (12), GBP (3)`."""
    shown = [f"{unit or 'none'} ({count:,})" for unit, count in Counter(units).most_common(5)]
    if len(units) > 5:
        shown.append("...")
    return ", ".join(shown)


def parse_date_cells(cells: Sequence[str | None], form: str) -> list[str | None]:
    """Converts dates to the form `2024-01-31T23:59:59`, in UTC. A cell that does not match `form` becomes None.

    Raises ValueError or `re.error` if `form` is not a format of Python's `strptime`.
    """
    dates = pd.to_datetime(pd.Series(cells, dtype=object), format=form, errors="coerce", utc=True)
    texts = dates.dt.strftime("%Y-%m-%dT%H:%M:%S")
    return [None if text != text else text for text in texts]


def is_numeric(column: Any) -> bool:
    type_ = column.type
    return bool(
        types.is_boolean(type_) or types.is_integer(type_) or types.is_floating(type_) or types.is_decimal(type_)
    )


def is_missing(column: Any) -> Array:
    """Returns True for each null or NaN, [n] bool."""
    missing: Array = compute.is_null(column, nan_is_null=True).to_numpy()
    return missing


def strip_plus(text: Any) -> Any:
    """Removes a leading `+` from numbers, because pyarrow does not read it."""
    if not compute.any(compute.starts_with(text, "+")).as_py():  # takes a tenth of the time of the replacement
        return text
    return compute.replace_substring_regex(text, r"^\+([0-9.])", r"\1")


def to_numbers(column: Any) -> tuple[Array, Array]:
    """Converts a column to float64 [n], with NaN for missing values. Also returns which values are bad, [n] bool.

    Bad values are infinite or not numbers. A boolean becomes 1 or 0, also if it is the text `true` or `false`.
    """
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
    """Converts a column to strings in Python's notation (`True`, `1.0`). Missing values become ""."""
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
    """Converts a column to `str` objects [n], with "" for missing values. No value is bad: the second result is False.

    A word that is a variant of a `known` word, such as `1.0` for `1`, becomes the known word.
    """
    texts = to_strings(column)
    if isinstance(texts, pyarrow.ChunkedArray):
        texts = texts.combine_chunks()
    codes = texts.dictionary_encode()
    words = codes.dictionary.to_numpy(zero_copy_only=False)
    if known:
        matched = []
        for word, place in zip(words, match_names(words.tolist(), known), strict=True):
            matched.append(word if place is None else known[place])
        words = np.array(matched, object)
    return words[codes.indices.to_numpy()], np.zeros(len(column), bool)


def to_dates(column: Any) -> tuple[Array, Array]:
    """Converts a column to `str` objects [n] such as 2024-01-31T23:59:59, "" if missing. Also returns which are bad."""
    if is_numeric(column):  # pyarrow would count microseconds from 1970
        return np.full(len(column), "", object), ~is_missing(column)
    dates = cast_to_dates(column)
    is_bad = np.zeros(len(column), bool)
    if dates is None:  # a later row is not a date, or only some of the dates have a time zone
        text = compute.replace_substring_regex(compute.cast(column, pyarrow.string()), r"\.\d+", "")
        days = compute.utf8_slice_codeunits(text, 0, 10)
        parsed = compute.strptime(days, "%Y-%m-%d", "s", error_is_null=True)  # parses 30 February as 1 March
        is_day = compute.equal(compute.strftime(parsed, "%Y-%m-%d"), days)
        is_date = compute.and_(is_day, compute.match_substring_regex(text, IS_DATE))
        has_zone = compute.match_substring_regex(text, HAS_ZONE)
        is_local = compute.and_(is_date, compute.invert(has_zone))
        is_zoned = compute.and_(is_date, has_zone)
        nothing = pyarrow.scalar(None, pyarrow.string())
        local = cast_to_dates(compute.if_else(is_local, text, nothing))
        zoned = cast_to_dates(compute.if_else(is_zoned, text, nothing))
        dates = compute.coalesce(local, zoned)
        is_bad = compute.is_null(dates).to_numpy() & ~is_missing(column)
    seconds = compute.cast(dates, pyarrow.timestamp("s"), safe=False).to_numpy(zero_copy_only=False)
    texts = np.datetime_as_string(seconds).astype(object)
    texts[np.isnat(seconds)] = ""
    return texts, is_bad


def cast_to_dates(column: Any) -> Any:
    """Converts a column to timestamps in UTC; None if some values are not dates, or only some have a time zone."""
    for zone in (None, "UTC"):
        try:
            return compute.cast(compute.cast(column, pyarrow.timestamp("us", zone)), pyarrow.timestamp("us"))
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
            continue
    return None


def match_names(names: Sequence[str], known: Sequence[str]) -> list[int | None]:
    """Returns the index of each name in `known`; None for an unknown name.

    Variants match as well: another notation of a number (`1.0` for `1`), and `true` and `false` in upper case. They
    match only if a single known name has that value.
    """
    exact = {name: index for index, name in enumerate(known)}
    counts = Counter(map(normalise_name, known))
    similar: dict[Decimal | str, int] = {}
    for name, index in exact.items():
        value = normalise_name(name)
        if counts[value] == 1:
            similar[value] = index
    return [exact.get(name, similar.get(normalise_name(name))) for name in names]


def normalise_name(name: str) -> Decimal | str:
    """Returns a value that all variants of a name share: a Decimal for a number, lower case for true and false."""
    if re.match(IS_NUMBER, name):
        return Decimal(name)  # as floats, different ids of 17 digits could be equal
    return name.lower() if name.lower() in ("true", "false") else name


#: Kind of a column -> its expected values, for messages.
EXPECTED = {NUMBER: "a finite number", CATEGORY: "a word", TEXT: "a text", DATE: "a date"}


@dataclass(frozen=True)
class ColumnReader:
    """Reads the cells of one column. Training, `predict` and the served model use it in the same way.

    `convert` calls `clean`, `rewrite` and `to_array`. Training learns from the results of `clean` and `rewrite`.
    """

    kind: str | None = None  # the column's kind in training; None: unknown
    missing: Sequence[str] | None = None  # words that mean a missing value; None: see `convert` and `clean`
    written: Mapping[str, str] | None = None  # the form of its numbers or dates, see `rewrite_cells`
    known: Sequence[str] = ()  # the categories in training

    @property
    def has_unit(self) -> bool:
        """Whether the numbers of the column had a unit in training."""
        return self.kind == NUMBER and bool((self.written or {}).get("unit"))

    def convert(self, column: Any, dtype: np.dtype[Any]) -> tuple[Array, Array, str]:
        """Converts a pyarrow column to an array. Texts become objects.

        Also returns which values are bad, that is, cannot be converted, [n] bool, and the expected values in words.
        Without a known kind and words for missing values, text stays as it is.
        """
        takes_any_text = self.kind is None and self.missing is None and dtype.kind == "O"
        if not takes_any_text:
            column = self.rewrite(self.clean(column))
        return self.to_array(column, dtype)

    def clean(self, column: Any) -> Any:
        """Removes pyarrow's encodings from a column. Text becomes a trimmed `string`, or null if it means missing."""
        if types.is_dictionary(column.type):
            column = compute.cast(column, column.type.value_type)
        is_text = (
            types.is_string(column.type) or types.is_large_string(column.type) or types.is_string_view(column.type)
        )
        if not is_text:
            return column
        text = compute.utf8_trim_whitespace(compute.cast(column, pyarrow.string()))
        words = MISSING if self.missing is None else self.missing
        is_missing = compute.is_in(text, value_set=pyarrow.array(list(words), pyarrow.string()))
        return compute.if_else(is_missing, pyarrow.scalar(None, pyarrow.string()), text)

    def rewrite(self, column: Any) -> Any:
        """Rewrites numbers or dates in a clean column of strings with `rewrite_cells`. Other columns stay unchanged."""
        if self.written is None or not types.is_string(column.type):
            return column
        if isinstance(column, pyarrow.ChunkedArray):
            column = column.combine_chunks()
        codes = column.dictionary_encode()
        words = pyarrow.array(rewrite_cells(codes.dictionary.to_pylist(), self.written), pyarrow.string())
        return pyarrow.chunked_array([words.take(codes.indices)])

    def to_array(self, column: Any, dtype: np.dtype[Any]) -> tuple[Array, Array, str]:
        """Converts the result of `rewrite` to an array. Returns the same as `convert`."""
        if self.kind in (CATEGORY, TEXT):
            return *to_texts(column, self.known), EXPECTED[self.kind]
        is_date = types.is_timestamp(column.type) or types.is_date(column.type)
        if self.kind == DATE or (dtype.kind == "O" and is_date):
            return *to_dates(column), EXPECTED[DATE]
        if dtype.kind == "O":
            return *to_texts(column), EXPECTED[TEXT]
        return fit_numbers(*read_numbers(column, dtype), dtype)

    def count_other_units(self, column: Any) -> Counter[str]:
        """Counts the numbers in a clean column whose unit differs from the column's unit in training, by unit.

        `rewrite` turns these numbers into missing values, because it cannot convert currencies or units. A number
        without a unit counts as one in the column's unit.
        """
        counts: Counter[str] = Counter()
        if self.written is None or not self.written.get("unit") or not types.is_string(column.type):
            return counts
        for unit, count in count_units(column, self.written).items():
            if unit not in ("", self.written["unit"]):
                counts[unit] += count
        return counts


def make_readers(reading: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, ColumnReader]:
    """Returns the readers of table columns by name; {} if the source of the run was not a table.

    Args:
        reading: how the source read its files, from the run's learned state.
        words: the learned state of each input's preprocessing.
    """
    columns = reading.get("columns")
    forms = reading.get("forms")
    kinds = columns if isinstance(columns, dict) else {}
    written = forms if isinstance(forms, dict) else {}
    missing = reading.get("missing")
    readers: dict[str, ColumnReader] = {}
    for name, kind in kinds.items():
        if kind in [*EXPECTED]:  # a list, because `kind` may be of any type, even one without a hash
            known = words.get(name, ()) if kind == CATEGORY else ()
            readers[name] = ColumnReader(kind, missing, written.get(name), known)
    return readers


def read_numbers(column: Any, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Converts a column to numbers, for integer inputs without loss of digits. Also returns which are bad, [n] bool."""
    if dtype.kind in "iu":
        with contextlib.suppress(pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
            whole = compute.cast(column, "int64")
            return compute.fill_null(whole, 0).to_numpy(), is_missing(whole)
    return to_numbers(column)


def fit_numbers(numbers: Array, is_bad: Array, dtype: np.dtype[Any]) -> tuple[Array, Array, str]:
    """Converts numbers to an input's dtype. Also returns which are bad, with overflow, and the expected values."""
    is_float = numbers.dtype.kind == "f"
    if is_float and dtype.kind in "biu":
        is_bad = is_bad | np.isnan(numbers)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        is_bad = is_bad | (numbers < limits.min) | (numbers > limits.max)
        if is_float:
            is_bad = is_bad | (numbers != np.floor(numbers))
        return np.where(is_bad, 0, numbers).astype(dtype), is_bad, f"a whole number ({dtype.name})"
    with np.errstate(over="ignore"):
        converted = numbers.astype(dtype, copy=False)
    return converted, is_bad | np.isinf(converted), "true or false" if dtype.kind == "b" else EXPECTED[NUMBER]


def gather_cells(values: Array) -> Any:
    """Converts values [n] of any type to a pyarrow column, as text if they have several types."""
    with contextlib.suppress(pyarrow.ArrowException, OverflowError):
        column = pyarrow.chunked_array([pyarrow.array(values, from_pandas=True)])
        type_ = column.type
        is_plain = types.is_string(type_) or types.is_timestamp(type_) or types.is_date(type_) or types.is_null(type_)
        if is_numeric(column) or is_plain:
            return column
    return pyarrow.chunked_array([pyarrow.array(map(write_cell, values), pyarrow.string())])


def write_cell(value: Any) -> str | None:
    """Formats a cell as text; None if it is missing."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if pd.isna(value):
        return None
    if isinstance(value, datetime.date | np.datetime64):  # also datetime.datetime and pandas.Timestamp
        moment = pd.Timestamp(value)
        if moment.tz is not None:
            moment = moment.tz_convert(None)
        return str(moment.strftime("%Y-%m-%dT%H:%M:%S"))
    return str(value)


def decode_text(value: Any) -> str:
    """Converts a text to `str`. It may be `bytes`, or None, which becomes ""."""
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
