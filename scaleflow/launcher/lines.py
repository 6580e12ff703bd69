"""Formats the lines of a run, and fits them to the width of a terminal."""

import json
import math
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from scaleflow.interfaces.events import RunReady
from scaleflow.interfaces.formatting import format_number

#: Labels of values that people copy: these are printed in one piece.
PASTED = ("look at it", "go on", "load it")

#: A space where a line must not be broken.
FIXED = "\xa0"


class Column(NamedTuple):
    """A part of a line of an epoch."""

    rank: int  # the highest ranks are left out first
    width: int  # the usual width, so that the columns of all lines align
    text: str


#: The metrics of a line, in order, with their ranks.
METRIC_RANKS = {"train/loss": 3, "train/accuracy": 5, "train/mae": 5, "val/loss": 2, "val/accuracy": 1, "val/mae": 1}
RATE_RANK = 6
LEFT_RANK = 4

#: The usual widths of a number, of examples per second, and of the time left.
NUMBER_WIDTH = 7
RATE_WIDTH = 20
LEFT_WIDTH = 15


def measure_width(stream: TextIO) -> int | None:
    """Returns the number of columns of a terminal; None for any other stream."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def list_figures(values: Mapping[str, Any], left: str = "") -> list[Column]:
    """Returns the columns `loss 0.312`, `accuracy 0.91`, `val loss 0.35`, `61,000 examples/s` and `9 s left`."""
    columns = []
    for name, rank in METRIC_RANKS.items():
        if name in values:
            label = name.removeprefix("train/").replace("/", " ")
            columns.append(
                Column(rank, len(label) + 1 + NUMBER_WIDTH, f"{label} {format_number(values[name]):<{NUMBER_WIDTH}}")
            )
    rate = values.get("perf/examples_per_second")
    if rate is not None and math.isfinite(rate):
        columns.append(Column(RATE_RANK, RATE_WIDTH, f"{rate:,.0f} examples/s"))
    return [*columns, Column(LEFT_RANK, LEFT_WIDTH, left)] if left else columns


def fit_columns(start: str, columns: Sequence[Column], width: int | None) -> str:
    """Joins the columns that fit into a width after the start of the line."""
    columns = list(columns)
    while width is not None and columns:
        if sum(2 + max(each.width, len(each.text.rstrip())) for each in columns) + len(start) <= width:
            break
        columns.remove(max(columns, key=lambda each: each.rank))
    return "  ".join(part for part in (start, *(each.text for each in columns)) if part).rstrip()


def wrap_line(text: str, width: int | None, indent: int = 2) -> list[str]:
    """Breaks a line between its columns, which are separated by two spaces, and within long columns between words.

    A word longer than a line is not broken, so that it can be copied.
    """
    if width is None or len(text) <= width:
        return [text]
    room = width - indent
    text = re.sub(r"(?<=\d) (?=(s|ms|min|h|MB|%)\b)", FIXED, text)
    parts = [part if len(part) > room else part.replace(" ", FIXED) for part in re.split(r"( {2,})", text)]
    parts[1::2] = re.findall(r" {2,}", text)
    line = "".join(parts) if len(parts) > 1 else text
    lines = textwrap.wrap(
        line, max(width, indent + 1), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return [each.replace(FIXED, " ") for each in lines]


def format_row(label: str, value: str, column: int, width: int | None) -> list[str]:
    """Returns the lines of a summary row. The values of all rows begin in the same column.

    If a value's longest word does not fit after its label, the value begins on its own line.
    """
    line = f"{label:<{column}}{value}"
    if width is None or len(line) <= width:
        return [line]
    if label.strip() in PASTED:
        return [label, value]
    words = max(map(len, value.split()), default=0)
    if column + words <= width:
        return wrap_line(line, width, column)
    return [label, *wrap_line(f"  {value}", width)] if label.strip() else wrap_line(f"  {value}", width)


def lay_out_table(
    cells: Sequence[Sequence[str]], left: Sequence[str], width: int | None, less: Sequence[str] = ()
) -> tuple[list[str], list[list[str]]]:
    """Returns the lines of a table's head, and the lines of each row.

    If the table is too wide, its head breaks into two lines, then columns are left out. If it is still too wide, each
    row becomes a paragraph that names its columns, and there is no head.

    Args:
        cells: the head and the rows.
        left: the left-aligned columns.
        width: the terminal's width; None: unlimited.
        less: columns that may be left out, in this order.
    """
    names = cells[0]
    rows = cells[1:]
    broken = {name: re.sub(r"([./])(?=\w)| ", r"\1\n", name, count=1).split("\n") for name in names}
    for heads, out in [({name: [name] for name in names}, 0), *((broken, n) for n in range(len(less) + 1))]:
        shown = [n for n, name in enumerate(names) if name not in less[:out]]
        widths = {n: max(map(len, (*heads[names[n]], *(row[n] for row in rows)))) for n in shown}
        if width is None or sum(widths.values()) + 2 * len(shown) - 2 <= width:
            break
    else:
        return [], [
            wrap_line("  ".join(f"{name} {cell}" for name, cell in zip(names, row, strict=True) if cell), width)
            for row in rows
        ]

    def align(texts: Mapping[int, str]) -> str:
        aligned = (f"{text:<{widths[n]}}" if names[n] in left else f"{text:>{widths[n]}}" for n, text in texts.items())
        return "  ".join(aligned).rstrip()

    height = max(len(heads[names[n]]) for n in shown)
    parts = {n: [""] * (height - len(heads[names[n]])) + heads[names[n]] for n in shown}
    head = [align({n: part[line] for n, part in parts.items()}) for line in range(height)]
    return head, [[align({n: row[n] for n in shown})] for row in rows]


def format_run_line(event: RunReady) -> str:
    """Returns the first line of a run: its name, its model, its devices and its length."""
    resolved = {k.removeprefix("resolved."): v for k, v in event.params.items() if k.startswith("resolved.")}
    total = int(resolved["parameters"])
    trainable = int(resolved["trainable_parameters"])
    by_epoch = json.loads(resolved.get("trainable_parameters_by_epoch", "{}"))
    later = "".join(f", from epoch {epoch} on {number:,}" for epoch, number in by_epoch.items() if epoch != "0")
    count = f"all {total:,}" if trainable == total and not later else f"{by_epoch.get('0', trainable):,} of {total:,}"
    batch = resolved.get("global_batch_size")
    length = f"global batch {batch}, {event.steps} steps" if batch else "trying batch sizes"
    devices = f"{resolved['replicas']} replica(s) on {resolved['hardware']}"
    return f"{event.name}: {count} parameters train{later}, {devices}, {length}"
