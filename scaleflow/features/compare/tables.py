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
    names = ("difference", "is_real", "is_better")
    extra = ({name: getattr(each, name) for name in names} for each in comparison.results)
    values["results"] = [{**each, **more} for each, more in zip(values["results"], extra, strict=True)]
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
        missing = [name for name, each in comparison.unknown.items() if category in each]
        if missing:
            yield Text(f"\n{category}: {NOT_KNOWN}; the {' and the '.join(missing)} run has no record of it")
        elif category == "code":
            rows = [[each.name, describe_change(each)] for each in differences]
            yield from make_section(category, ["file", "what"], rows)
            for text in comparison.code_diff.values():
                yield color_diff(text.splitlines())
        else:
            rows = [[each.name, shorten(each.before), shorten(each.now)] for each in differences]
            yield from make_section(category, ["what", "first", "second"], rows)
    metrics = [each for each in comparison.results if not each.name.startswith("perf/") or each.name in SHOWN_SPEED]
    rows = [render_metric(each) for each in metrics]
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
    shown = [(f"{to_printable(line)}\n", colors.get(line[:1], "")) for line in lines[:MAX_LINES]]
    more = [f"and {len(lines) - MAX_LINES} more lines\n"] if len(lines) > MAX_LINES else []
    text = Text.assemble(*shown, *more)
    text.rstrip()
    return text


def describe_change(each: Difference) -> str:
    if each.name == COMMIT:
        return f"{each.before or 'none'} -> {each.now or 'none'}"
    what = "changed"
    if each.before is None:
        what = "only in the second"
    elif each.now is None:
        what = "only in the first"
    return what if each.matters else f"{what} (cannot change the results)"


def render_metric(each: MetricDifference) -> list[str]:
    values = ["-" if value is None else format_number(value) for value in (each.before, each.now, each.difference)]
    if each.difference:
        values[2] = f"{'+' if each.difference > 0 else ''}{values[2]}"
    if each.low is not None and each.high is not None:
        verdict = "yes" if each.is_real else "no"
        if each.is_real and each.is_better is not None:
            verdict += ", better" if each.is_better else ", worse"
        return [
            each.name,
            *values,
            f"{verdict}: {format_number(each.low)} to {format_number(each.high)} ({each.basis})",
        ]
    return [each.name, *values, "" if each.difference is None else each.basis]


def shorten(value: str | None) -> str:
    """Returns a value for a table, cut to `MAX_LETTERS` characters, "-" for None."""
    text = "-" if value is None else value
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 3]}..."
