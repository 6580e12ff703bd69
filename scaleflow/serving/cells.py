"""Numbers and dates as people write them, `1.163,74 €` or `31.12.2024`, become the one form that models take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import pandas as pd

#: What a separator of thousands is also written as.
SEPARATORS = {" ": "[ \u00a0\u202f]", "'": "['\u2019]", ",": ",", ".": r"\."}

#: Signs and codes of currencies.
MARKS = r"R?\$|[\u00a2-\u00a5\u20a0-\u20cf]|z\u0142|K\u010d|(?:kr|Rs|\u0440\u0443\u0431)\.?"
MARKS += "|USD|EUR|GBP|CHF|JPY|CNY|INR|RUB|BRL|SEK|NOK|DKK|PLN|CZK|HUF"
MINUS = ("-", "\u2212")


def match_number(decimal: str, thousands: str) -> re.Pattern[str]:
    """Returns the pattern of numbers such as `(1.163,74 €)`; one with leading zeros, such as `007`, is a code."""
    grouped = rf"[1-9]\d{{0,2}}(?:{SEPARATORS[thousands]}\d{{3}})+|" if thousands else ""
    grouped += r"[1-9]\d?(?:,\d\d)+,\d{3}|" if thousands == "," else ""  # 12,34,567 as in India
    part = rf"(?:{re.escape(decimal)}(?P<part>\d*))?(?P<power>[eE][+-]?\d{{1,3}})?"
    sign = "[+\u2212-]?"
    before = rf"(?P<open>\()?(?P<sign>{sign})\s?(?P<mark>{MARKS})?\s?(?P<inner>{sign})"
    after = rf"(?P<after>[\u2212-]?)\s?(?P<unit>%|{MARKS})?(?(open)\))"
    return re.compile(rf"{before}(?P<whole>{grouped}0|[1-9]\d*|(?=\D\d)){part}{after}")


def rewrite_number(text: str, pattern: re.Pattern[str]) -> str | None:
    """Returns a number as Python writes it; None if the text does not match. `12.5%` is 12.5."""
    if (found := pattern.fullmatch(text)) is None:
        return None
    is_negative = bool(found["open"]) or any(found[place] in MINUS for place in ("sign", "inner", "after"))
    whole, part = re.sub(r"\D", "", found["whole"]) or "0", found["part"]
    return f"{'-' if is_negative else ''}{whole}{f'.{part}' if part else ''}{found['power'] or ''}"


def rewrite_cells(cells: Iterable[str | None], form: Mapping[str, str]) -> list[str | None]:
    """Returns cells of a column in the form that models take. Others, and missing ones, stay as they are.

    Args:
        cells: the different values of a column.
        form: `{"decimal": ",", "thousands": "."}`, or `{"dates": "%d.%m.%Y"}`.
    """
    given = list(cells)
    if "dates" in form:
        dates = pd.to_datetime(pd.Series(given, dtype=object), format=form["dates"], errors="coerce")
        texts = dates.dt.strftime("%Y-%m-%dT%H:%M:%S")
        return [old if new != new else new for old, new in zip(given, texts, strict=True)]
    pattern = match_number(form["decimal"], form["thousands"])
    return [cell if cell is None else rewrite_number(cell, pattern) or cell for cell in given]
