"""Shows a comparison of two runs in the terminal, in a notebook, and as JSON."""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from scaleflow.features.compare.results import NOT_KNOWN, MetricDifference, Reproduction, describe_verdict
from scaleflow.interfaces.formatting import format_number
from scaleflow.launcher.command_exit import to_printable
from scaleflow.runs.identity import CATEGORIES, COMMIT, Difference

#: Maximum number of characters in a value, and of rows in a table in the terminal.
MAX_LETTERS = 120
MAX_ROWS = 40

#: Maximum number of lines of a diff in the terminal.
MAX_LINES = 200

#: Metrics of speed and memory that the terminal shows. It hides all others.
SHOWN_SPEED = ("perf/examples_per_second", "perf/seconds_to_first_step", "perf/peak_host_mb", "perf/peak_device_mb")

#: Width in characters of a comparison in a notebook, and of output to a file or pipe.
PAGE_WIDTH = 140
PIPE_WIDTH = 120

#: HTML of a comparison in a notebook.
FRAGMENT = '<pre style="overflow-x:auto;line-height:1.35">{code}</pre>'


@dataclass(frozen=True)
class Comparison:
    """The differences between two runs. `before` is the first run's value, `now` the second's.

    Attributes:
        first, second: names, with the id or the folder.
        config: keys with different values, including resolved values of `auto` (`resolved.`); None if a run lacks the
            key.
        code, packages, data, machine: differences. `matters` is false if a difference cannot change results.
        code_diff: unified diffs of kept copies, for each of the user's modules that differ.
        verdict: whether the second run reproduces the first.
        unknown: categories without a record, by `first` and `second`.
    """

    first: str
    second: str
    config: Mapping[str, tuple[str | None, str | None]]
    code: Sequence[Difference]
    code_diff: Mapping[str, str]
    packages: Sequence[Difference]
    data: Sequence[Difference]
    machine: Sequence[Difference]
    results: Sequence[MetricDifference]
    verdict: Reproduction
    unknown: Mapping[str, Sequence[str]]

    def __str__(self) -> str:
        stream = io.StringIO()
        print_comparison(self, stream)
        return stream.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        with open(os.devnull, "w") as null:  # noqa: PTH123
            console = Console(file=null, record=True, width=PAGE_WIDTH, highlight=False, force_terminal=True)
            for part in render(self):
                console.print(part)
            return console.export_html(code_format=FRAGMENT, inline_styles=True)


def print_comparison(comparison: Comparison, stream: TextIO) -> None:
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)
    for part in render(comparison):
        console.print(part)


def to_values(comparison: Comparison) -> dict[str, Any]:
    """Returns the comparison as plain values. Metrics also have `difference`, `is_real` and `is_better`."""
    values = asdict(comparison)
    results = []
    for metric in comparison.results:
        derived = {
            "difference": metric.difference,
            "is_real": metric.is_real,
            "is_better": metric.is_better,
        }
        results.append({**asdict(metric), **derived})
    values["results"] = results
    return values


def render(comparison: Comparison) -> Iterator[RenderableType]:
    """Yields the parts of the report. Tables have at most `MAX_ROWS` rows."""
    head = Table.grid(padding=(0, 2))
    head.add_row("first", Text(to_printable(comparison.first), overflow="fold"))
    head.add_row("second", Text(to_printable(comparison.second), overflow="fold"))
    yield head
    rows = [[key, shorten(before), shorten(now)] for key, (before, now) in comparison.config.items()]
    yield from make_section("config", ["key", "first", "second"], rows)
    for category in CATEGORIES:
        differences: Sequence[Difference] = getattr(comparison, category)
        missing = [run for run, categories in comparison.unknown.items() if category in categories]
        if missing:
            yield Text(f"\n{category}: {NOT_KNOWN}; the {' and the '.join(missing)} run has no record of it")
        elif category == "code":
            rows = [[difference.name, describe_change(difference)] for difference in differences]
            yield from make_section(category, ["file", "what"], rows)
            for text in comparison.code_diff.values():
                yield color_diff(text.splitlines())
        else:
            rows = []
            for difference in differences:
                rows.append([difference.name, shorten(difference.before), shorten(difference.now)])
            yield from make_section(category, ["what", "first", "second"], rows)
    rows = []
    for metric in comparison.results:
        if not metric.name.startswith("perf/") or metric.name in SHOWN_SPEED:
            rows.append(render_metric(metric))
    yield from make_section("results", ["metric", "first", "second", "difference", "more than noise"], rows)
    yield Text(f"\nreproduced: {describe_verdict(comparison.verdict)}")


def make_section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[RenderableType]:
    """Yields a title, and a table if there are differences."""
    yield Text(f"\n{title}{'' if rows else ': the same'}", style="bold" if rows else "")
    if not rows:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, name in enumerate(head):
        table.add_column(name, no_wrap=number == 0, overflow="ellipsis")
    for row in rows[:MAX_ROWS]:
        table.add_row(*(Text(to_printable(cell), overflow="fold") for cell in row))
    yield table
    if len(rows) > MAX_ROWS:
        yield Text(f"and {len(rows) - MAX_ROWS} more; --json has all")


def color_diff(lines: Sequence[str]) -> Text:
    """Returns a unified diff with colors, cut after `MAX_LINES` lines.

    The first characters show the same without colors.
    """
    colors = {"+": "#3f9f50", "-": "#d05050", "@": "#3f9fb0"}  # readable on white and on black
    text = Text()
    for line in lines[:MAX_LINES]:
        text.append(f"{to_printable(line)}\n", colors.get(line[:1], ""))
    if len(lines) > MAX_LINES:
        text.append(f"and {len(lines) - MAX_LINES} more lines\n")
    text.rstrip()
    return text


def describe_change(difference: Difference) -> str:
    """Describes a difference of a file or of the commit for the table."""
    if difference.name == COMMIT:
        return f"{difference.before or 'none'} -> {difference.now or 'none'}"
    change = "changed"
    if difference.before is None:
        change = "only in the second"
    elif difference.now is None:
        change = "only in the first"
    return change if difference.matters else f"{change} (cannot change the results)"


def render_metric(metric: MetricDifference) -> list[str]:
    """Returns the cells of a metric's row."""
    difference = format_value(metric.difference)
    if metric.difference is not None and metric.difference > 0:
        difference = f"+{difference}"
    return [
        metric.name,
        format_value(metric.before),
        format_value(metric.now),
        difference,
        describe_certainty(metric),
    ]


def format_value(value: float | None) -> str:
    return "-" if value is None else format_number(value)


def describe_certainty(metric: MetricDifference) -> str:
    """Says whether a metric's difference is more than noise; "" if a run lacks the metric."""
    if metric.low is None or metric.high is None:
        return "" if metric.difference is None else metric.basis
    verdict = "yes" if metric.is_real else "no"
    if metric.is_real and metric.is_better is not None:
        verdict += ", better" if metric.is_better else ", worse"
    return f"{verdict}: {format_number(metric.low)} to {format_number(metric.high)} ({metric.basis})"


def shorten(value: str | None) -> str:
    """Returns a value for a table, cut to `MAX_LETTERS` characters, "-" for None."""
    text = "-" if value is None else value
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 3]}..."
