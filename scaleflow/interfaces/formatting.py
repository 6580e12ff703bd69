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
    if 0.0001 <= size < 1000:
        return f"{value:.4g}"
    return f"{value:.3g}"


def format_with_interval(values: Mapping[str, float], name: str, more: str = "") -> str:
    """Formats a metric with its 95 % interval, if the values contain it: `0.9805 (0.967 to 0.99)`.

    `more` is added within the parentheses.
    """
    number = format_number(values[name])
    notes = []
    low = values.get(f"{name}_low")
    high = values.get(f"{name}_high")
    if low is not None and high is not None:
        notes.append(f"{low:.3g} to {high:.3g}")
    if more:
        notes.append(more)
    return f"{number} ({'; '.join(notes)})" if notes else number


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
    joined = between.join(words[:most])
    others = (len(words) if count is None else count) - most
    return f"{joined} and {others:,} more" if others > 0 else joined


class Readable:
    """Prints as rows of (label, value), and shows as a table in a notebook."""

    def list_rows(self) -> Sequence[tuple[str, str]]:
        """Returns the rows, each a label and a value."""
        raise NotImplementedError

    def __str__(self) -> str:
        rows = self.list_rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)

    def _repr_html_(self) -> str:
        table = ""
        for label, value in self.list_rows():
            head = f'<th style="text-align:left">{escape(label)}</th>'
            cell = f'<td style="text-align:left">{escape(value)}</td>'
            table += f"<tr>{head}{cell}</tr>"
        return f"<table>{table}</table>"


#: Values of single steps, which are reported with the metrics, and their titles.
OF_STEPS = {"train/learning_rate": "learning rate", "train/gradient_norm": "gradient norm"}


def list_metric_rows(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns rows with the metrics of the test and their intervals; without a test, of validation or of training."""
    for split in ("test/", "val/", "train/"):
        rows = []
        for name in values:
            is_bound = name.endswith(("_low", "_high")) and name.rpartition("_")[0] in values
            if name.startswith(split) and not is_bound and name not in OF_STEPS:
                rows.append((name.replace("/", " "), format_with_interval(values, name)))
        if rows:
            return rows
    return []


def format_csv(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Returns a table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


def to_json(value: Any) -> Any:
    """Returns a value with null instead of numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
