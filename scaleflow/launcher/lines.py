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
METRIC_RANKS = {
    "train/loss": 3,
    "train/accuracy": 5,
    "train/mae": 5,
    "val/loss": 2,
    "val/accuracy": 1,
    "val/mae": 1,
}
RATE_RANK = 6
LEFT_RANK = 4

#: The usual widths of a number, of examples per second, and of the time left.
NUMBER_WIDTH = 7
RATE_WIDTH = 20
LEFT_WIDTH = 15


def measure_width(stream: TextIO) -> int | None:
    """Returns the number of columns of a terminal; None for any other stream."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def list_figures(values: Mapping[str, Any], time_left: str = "") -> list[Column]:
    """Returns the columns `loss 0.312`, `accuracy 0.91`, `val loss 0.35`, `61,000 examples/s` and `9 s left`."""
    columns = []
    for name, rank in METRIC_RANKS.items():
        if name in values:
            label = name.removeprefix("train/").replace("/", " ")
            text = f"{label} {format_number(values[name]):<{NUMBER_WIDTH}}"
            columns.append(Column(rank, len(label) + 1 + NUMBER_WIDTH, text))
    rate = values.get("perf/examples_per_second")
    if rate is not None and math.isfinite(rate):
        columns.append(Column(RATE_RANK, RATE_WIDTH, f"{rate:,.0f} examples/s"))
    if time_left:
        columns.append(Column(LEFT_RANK, LEFT_WIDTH, time_left))
    return columns


def fit_columns(start: str, columns: Sequence[Column], width: int | None) -> str:
    """Joins the columns that fit into a width after the start of the line."""
    shown = list(columns)
    while width is not None and shown:
        needed = len(start) + sum(2 + max(column.width, len(column.text.rstrip())) for column in shown)
        if needed <= width:
            break
        shown.remove(max(shown, key=lambda column: column.rank))
    parts = [start] if start else []
    parts += [column.text for column in shown if column.text]
    return "  ".join(parts).rstrip()


def wrap_line(text: str, width: int | None, indent: int = 2) -> list[str]:
    """Breaks a line between its columns, which are separated by two spaces, and within long columns between words.

    A word longer than a line is not broken, so that it can be copied.
    """
    if width is None or len(text) <= width:
        return [text]
    room = width - indent
    text = re.sub(r"(?<=\d) (?=(s|ms|min|h|MB|%)\b)", FIXED, text)
    columns = re.split(r"( {2,})", text)  # every second part is the space between two columns
    if len(columns) > 1:
        for index in range(0, len(columns), 2):
            if len(columns[index]) <= room:
                columns[index] = columns[index].replace(" ", FIXED)
        text = "".join(columns)
    lines = textwrap.wrap(
        text, max(width, indent + 1), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(FIXED, " ") for line in lines]


def format_row(label: str, value: str, column: int, width: int | None) -> list[str]:
    """Returns the lines of a summary row. The values of all rows begin in the same column.

    If a value's longest word does not fit after its label, the value begins on its own line.
    """
    line = f"{label:<{column}}{value}"
    if width is None or len(line) <= width:
        return [line]
    if label.strip() in PASTED:
        return [label, value]
    longest_word = max((len(word) for word in value.split()), default=0)
    if column + longest_word <= width:
        return wrap_line(line, width, column)
    value_lines = wrap_line(f"  {value}", width)
    return [label, *value_lines] if label.strip() else value_lines


def lay_out_table(
    cells: Sequence[Sequence[str]], left_aligned: Sequence[str], width: int | None, less: Sequence[str] = ()
) -> tuple[list[str], list[list[str]]]:
    """Returns the lines of a table's head, and the lines of each row.

    If the table is too wide, its head breaks into two lines, then columns are left out. If it is still too wide, each
    row becomes a paragraph that names its columns, and there is no head.

    Args:
        cells: the head and the rows.
        left_aligned: the names of the left-aligned columns.
        width: the terminal's width; None: unlimited.
        less: columns that may be left out, in this order.
    """
    names = cells[0]
    rows = cells[1:]
    columns = []
    for index, name in enumerate(names):
        columns.append(TableColumn(name, [row[index] for row in rows], is_left=name in left_aligned))
    if is_too_wide(columns, width):
        for column in columns:
            column.break_head()
    left_out: list[str] = []
    for name in less:
        if is_too_wide(columns, width):
            left_out.append(name)
            columns = [column for column in columns if column.name not in left_out]
    if is_too_wide(columns, width):
        return [], [wrap_line(name_cells(names, row), width) for row in rows]
    height = max(len(column.head) for column in columns)
    head = []
    for line in range(height):
        head.append(join_cells([column.head_line(line, height) for column in columns]))
    body = []
    for number in range(len(rows)):
        body.append([join_cells([column.align(column.cells[number]) for column in columns])])
    return head, body


class TableColumn:
    """A column of a table: its head, which may have two lines, and its cells."""

    def __init__(self, name: str, cells: Sequence[str], is_left: bool) -> None:
        self.name = name
        self.head = [name]
        self.cells = cells
        self.width = max(len(text) for text in (name, *cells))
        self._is_left = is_left

    def break_head(self) -> None:
        """Breaks the head after its first point or slash, or at its first space."""
        self.head = re.sub(r"([./])(?=\w)| ", r"\1\n", self.name, count=1).split("\n")
        self.width = max(len(text) for text in (*self.head, *self.cells))

    def head_line(self, line: int, height: int) -> str:
        """Returns a line of the head, which is at the bottom of a table's head of `height` lines."""
        missing = height - len(self.head)
        return self.align("" if line < missing else self.head[line - missing])

    def align(self, text: str) -> str:
        """Pads a text to the width of the column."""
        return text.ljust(self.width) if self._is_left else text.rjust(self.width)


def is_too_wide(columns: Sequence[TableColumn], width: int | None) -> bool:
    """Whether columns, with two spaces between them, are wider than a terminal."""
    return width is not None and sum(column.width + 2 for column in columns) - 2 > width


def join_cells(cells: Sequence[str]) -> str:
    return "  ".join(cells).rstrip()


def name_cells(names: Sequence[str], row: Sequence[str]) -> str:
    """Returns the cells of a row that are not empty, each after the name of its column."""
    return "  ".join(f"{name} {cell}" for name, cell in zip(names, row, strict=True) if cell)


def format_run_line(event: RunReady) -> str:
    """Returns the first line of a run: its name, its model, its devices and its length."""
    params = event.params
    devices = f"{params['resolved.replicas']} replica(s) on {params['resolved.hardware']}"
    if "resolved.parameters" not in params:  # a script whose model is built later
        return f"{event.name}: {devices}"
    total = int(params["resolved.parameters"])
    trainable = int(params["resolved.trainable_parameters"])
    by_epoch = json.loads(params.get("resolved.trainable_parameters_by_epoch", "{}"))
    later = "".join(f", from epoch {epoch} on {number:,}" for epoch, number in by_epoch.items() if epoch != "0")
    if trainable == total and not later:
        count = f"all {total:,}"
    else:
        count = f"{by_epoch.get('0', trainable):,} of {total:,}"
    batch = params.get("resolved.global_batch_size")
    length = f"global batch {batch}, {event.steps} steps" if batch else "trying batch sizes"
    if not event.steps and event.epochs:
        length = f"{event.epochs} epochs"
    return f"{event.name}: {count} parameters train{later}, {devices}, {length}"
