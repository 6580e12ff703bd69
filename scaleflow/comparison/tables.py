"""Shows a comparison of two runs in the terminal, as HTML, and as JSON."""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from scaleflow.comparison.results import NOT_KNOWN, MetricDifference, Reproduction, describe_verdict
from scaleflow.interfaces.formatting import GENERATOR, format_number
from scaleflow.launcher.command_exit import to_printable
from scaleflow.runs.identity import CATEGORIES, COMMIT, Difference

#: A value is cut after so many letters, and a list in the terminal after so many rows.
MOST_LETTERS, MOST_ROWS = 120, 40

#: A diff in the terminal is cut after so many lines.
MOST_LINES = 200

#: Of the metrics of speed and memory, the terminal shows these.
SHOWN_SPEED = ("perf/examples_per_second", "perf/seconds_to_first_step", "perf/peak_host_mb", "perf/peak_device_mb")

#: The width of the HTML page, and of output that is no terminal, in letters.
PAGE_WIDTH, PIPE_WIDTH = 140, 120

#: It loads nothing, and follows the theme of the browser.
PAGE = (
    f'<!DOCTYPE html>\n<html lang="en"><head>{GENERATOR}'
    """<title>scaleflow diff</title><style>
{stylesheet}
:root {{ color-scheme: light dark; }}
body {{ margin: 2rem; background: Canvas; color: CanvasText; }}
pre {{ font-family: ui-monospace, Menlo, Consolas, monospace; line-height: 1.35; overflow-x: auto; }}
</style></head><body><pre><code style="font-family:inherit">{code}</code></pre></body></html>
"""
)


#: The same in a page that is there already.
FRAGMENT = '<pre style="overflow-x:auto;line-height:1.35">{code}</pre>'


@dataclass(frozen=True)
class Comparison:
    """What differs between two runs. `before` is always the first, `now` the second.

    Attributes:
        first, second: their names, with the id or the folder.
        config: the keys with other values, also those that `auto` stood for (`resolved.`); None where a run has no such
            key.
        code, packages, data, machine: what differs. Of those that cannot change results, `matters` is false.
        code_diff: of each of the user's modules that differ, a unified diff of the kept copies.
        verdict: whether the second run reproduces the first one.
        unknown: the categories of which a run has no record, by `first` and `second`.
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
        return to_html(self, MOST_ROWS, FRAGMENT)


def print_comparison(comparison: Comparison, stream: TextIO) -> None:
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)
    for part in render(comparison, MOST_ROWS):
        console.print(part)


def to_html(comparison: Comparison, most: int | None, code_format: str) -> str:
    """Returns what differs as HTML, with at most so many rows of a list; None: all."""
    with open(os.devnull, "w") as null:  # noqa: PTH123
        console = Console(file=null, record=True, width=PAGE_WIDTH, highlight=False, force_terminal=True)
        for part in render(comparison, most):
            console.print(part)
        return console.export_html(code_format=code_format, inline_styles=code_format == FRAGMENT)


def to_values(comparison: Comparison) -> dict[str, Any]:
    """Returns the comparison as plain values. Differences of metrics also have `difference`, `is_real`
    and `is_better`."""
    values = asdict(comparison)
    names = ("difference", "is_real", "is_better")
    extra = ({name: getattr(each, name) for name in names} for each in comparison.results)
    values["results"] = [{**each, **more} for each, more in zip(values["results"], extra, strict=True)]
    return values


def render(comparison: Comparison, most: int | None) -> Iterator[RenderableType]:
    """Yields the parts of the report. Tables have `most` rows; None: all."""
    head = Table.grid(padding=(0, 2))
    head.add_row("first", Text(to_printable(comparison.first), overflow="fold"))
    head.add_row("second", Text(to_printable(comparison.second), overflow="fold"))
    yield head
    rows = [[key, shorten(before), shorten(now)] for key, (before, now) in comparison.config.items()]
    yield from make_section("config", ["key", "first", "second"], rows, most=most)
    for category in CATEGORIES:
        differences: Sequence[Difference] = getattr(comparison, category)
        missing = [name for name, each in comparison.unknown.items() if category in each]
        if missing:
            yield Text(f"\n{category}: {NOT_KNOWN}; the {' and the '.join(missing)} run has no record of it")
        elif category == "code":
            rows = [[each.name, describe_change(each)] for each in differences]
            yield from make_section(category, ["file", "what"], rows, most=most)
            for text in comparison.code_diff.values():
                yield color_diff(text.splitlines(), most and MOST_LINES)
        else:
            rows = [[each.name, shorten(each.before), shorten(each.now)] for each in differences]
            yield from make_section(category, ["what", "first", "second"], rows, most=most)
    metrics = [each for each in comparison.results if not each.name.startswith("perf/") or each.name in SHOWN_SPEED]
    rows = [render_metric(each) for each in (metrics if most else comparison.results)]
    yield from make_section("results", ["metric", "first", "second", "difference", "more than noise"], rows, most=most)
    yield Text(f"\nreproduced: {describe_verdict(comparison.verdict)}")


def make_section(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], most: int | None
) -> Iterator[RenderableType]:
    """Yields a title, and a table unless nothing differs."""
    yield Text(f"\n{title}{'' if rows else ': the same'}", style="bold" if rows else "")
    if not rows:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, name in enumerate(head):
        table.add_column(name, no_wrap=number == 0 and most is not None, overflow="ellipsis")
    for row in rows[:most]:
        table.add_row(*(Text(to_printable(cell), overflow="fold") for cell in row))
    yield table
    if most is not None and len(rows) > most:
        yield Text(f"and {len(rows) - most} more; --html FILE and --json have all")


def color_diff(lines: Sequence[str], most: int | None) -> Text:
    """Returns a unified diff, cut after `most` lines, as what the colors say its first letters say, too."""
    colors = {"+": "#3f9f50", "-": "#d05050", "@": "#3f9fb0"}  # readable on white and on black
    shown = [(f"{to_printable(line)}\n", colors.get(line[:1], "")) for line in lines[:most]]
    more = [f"and {len(lines) - most} more lines\n"] if most is not None and len(lines) > most else []
    text = Text.assemble(*shown, *more)
    text.rstrip()
    return text


def describe_change(each: Difference) -> str:
    if each.name == COMMIT:
        return f"{each.before or 'none'} -> {each.now or 'none'}"
    what = "only in the second" if each.before is None else "only in the first" if each.now is None else "changed"
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
    """Returns a value for a table."""
    text = "-" if value is None else value
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 3]}..."
