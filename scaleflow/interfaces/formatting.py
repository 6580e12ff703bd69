"""Formats numbers and durations for people (lines of the terminal, tables and notes), and values as CSV and JSON."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

#: The start of the head of every HTML page, which identifies scaleflow's pages.
GENERATOR = '<meta charset="utf-8"><meta name="generator" content="scaleflow">'

#: Maximum number of names in a message.
MAX_NAMED = 3

#: The units of durations that users type, in seconds.
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def format_number(value: float) -> str:
    """Formats a number with at most five significant digits.

    Numbers from 0.0001 have four digits and no exponent, such as `0.0034` and `0.9533`. Numbers from 1,000 to 99,999
    have five digits, such as `1234.5`. All others have three digits and an exponent, such as `1.68e+11`.
    """
    size = abs(value)
    if 1000 <= size < 100_000:
        return f"{value:.5g}"
    return f"{value:.4g}" if 0.0001 <= size < 1000 else f"{value:.3g}"


def format_with_interval(values: Mapping[str, float], name: str, more: str = "") -> str:
    """Formats a metric with its 95 % interval, if the values contain it: `0.9805 (0.967 to 0.99)`.

    `more` is added within the parentheses.
    """
    low, high = (values.get(f"{name}{end}") for end in ("_low", "_high"))
    interval = "" if low is None or high is None else f"{low:.3g} to {high:.3g}"
    brackets = "; ".join(part for part in (interval, more) if part)
    return format_number(values[name]) + (f" ({brackets})" if brackets else "")


def format_duration(seconds: float) -> str:
    """Formats a duration as `8 s`, `4 min 10 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_elapsed(seconds: float) -> str:
    """Formats an elapsed time as `0.4 s`, `12 s` or `4 min 10 s`."""
    return f"{seconds:.1f} s" if seconds < 9.95 else format_duration(seconds)


def join_first(words: Sequence[str], most: int = MAX_NAMED, count: int | None = None, between: str = ", ") -> str:
    """Joins the first `most` words, and adds the number of the others.

    `count` is the number of existing words, if `words` does not contain all of them.
    """
    left = (len(words) if count is None else count) - most
    return between.join(words[:most]) + (f" and {left:,} more" if left > 0 else "")


class Readable:
    """Prints as rows of (label, value), and shows as a table in a notebook."""

    def list_rows(self) -> Sequence[tuple[str, str]]:
        raise NotImplementedError

    def __str__(self) -> str:
        rows = self.list_rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)

    def _repr_html_(self) -> str:
        cells = (
            f'<tr><th style="text-align:left">{escape(label)}</th><td style="text-align:left">{escape(value)}</td></tr>'
            for label, value in self.list_rows()
        )
        return f"<table>{''.join(cells)}</table>"


#: Values of single steps, which are reported with the metrics, and their titles.
OF_STEPS = {"train/learning_rate": "learning rate", "train/gradient_norm": "gradient norm"}


def list_metric_rows(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns rows with the metrics of the test and their intervals; without a test, of validation,
    else of training.
    """
    for split in ("test/", "val/", "train/"):
        ends = {f"{name}{end}" for name in values for end in ("_low", "_high")}
        names = [name for name in values if name.startswith(split) and name not in ends and name not in OF_STEPS]
        if names:
            return [(name.replace("/", " "), format_with_interval(values, name)) for name in names]
    return []


def format_csv(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Returns a table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


def to_json(value: Any) -> Any:
    """Returns a value with null instead of numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
