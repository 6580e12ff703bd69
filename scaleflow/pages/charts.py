"""Draws charts as SVG. They are readable on light and dark pages, and without colour.

Drawing takes milliseconds and needs no library, so a short run does not wait for its pictures at the end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from scaleflow.interfaces.formatting import format_number

#: The colours of pages and of files with one chart.
STYLE = """
:root { --page: #ffffff; --text: #1f2328; --faint: #6e7781; --grid: #d8dee4; --mark: #0969da; --other: #bc4c00;
  --box: #f6f8fa; --bad: #a40e26; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --text: #e6edf3; --faint: #9198a1; --grid: #30363d; --mark: #4493f8; --other: #f0883e;
    --box: #151b23; --bad: #ff7b72; }
}
svg { background: var(--page); font: 12px system-ui, sans-serif; }
svg text { fill: var(--text); } svg .faint { fill: var(--faint); } svg .grid { stroke: var(--grid); }
svg .line { fill: none; stroke: var(--mark); stroke-width: 2; } svg .line.other { stroke: var(--other);
  stroke-dasharray: 7 4; }
svg .mark { fill: var(--mark); } svg .rest { fill: var(--mark); fill-opacity: 0.35; }
svg .rule { stroke: var(--faint); stroke-dasharray: 4 3; fill: none; } svg .whisker { stroke: var(--text); }
"""

LEFT = 56
RIGHT = 14
TOP = 10
BOTTOM = 42

#: Maximum number of characters in a label.
MAX_LETTERS = 24

#: Width of a label's character, in pixels.
LETTER = 7

#: With more classes, a confusion matrix has small labels and no numbers in its cells.
MAX_NUMBERED = 24

#: If a chart has more points, they are small and faint, so that dense points stay distinguishable.
MAX_LARGE_DOTS = 60

#: Maximum number of ticks on a logarithmic axis.
MAX_TICKS = 8

Numbers = Iterable[float]


class Drawing(NamedTuple):
    """A chart of a page: the name of its file, its title, the SVG, and a caption."""

    name: str
    title: str
    svg: str
    caption: str = ""


class Chart:
    """A chart with two axes. Its methods add lines, points and bars.

    Args:
        title: the title, also for screen readers.
        x, y: the lowest and highest value of each axis.
        labels: the labels of the x axis and the y axis.
        size: (width, height) in pixels.
        left: pixels between the left edge and the y axis.
        x_ticks, y_ticks: position on the axis -> label; None: round numbers.
        log: the logarithmic axes: `x`, `y` or `xy`. Their lowest value must be above 0.
    """

    def __init__(
        self,
        title: str,
        x: tuple[float, float],
        y: tuple[float, float],
        labels: tuple[str, str],
        size: tuple[int, int] = (420, 290),
        *,
        left: int = LEFT,
        x_ticks: Mapping[float, str] | None = None,
        y_ticks: Mapping[float, str] | None = None,
        log: str = "",
    ) -> None:
        self.title = title
        self._size = size
        self._left = left
        self._ends = (widen_range(*x), widen_range(*y))
        self._is_log = "x" in log, "y" in log
        self._parts: list[str] = []
        bottom = size[1] - BOTTOM
        right = size[0] - RIGHT
        if x_ticks is None:
            x_ticks = self._label_ticks(0)
        if y_ticks is None:
            y_ticks = self._label_ticks(1)
        for place, label in x_ticks.items():
            at = min(self._x(place), size[0] - LETTER * len(label) / 2)  # keeps the last label inside the picture
            self._parts.append(text(at, bottom + 16, label, anchor="middle", kind="faint"))
        for place, label in y_ticks.items():
            at = self._y(place)
            self._parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
            self._parts.append(text(left - 6, at + 4, label, anchor="end", kind="faint"))
        self._parts.append(text((left + right) / 2, size[1] - 8, labels[0], anchor="middle"))
        turned = text(-(TOP + bottom) / 2, 13, labels[1], anchor="middle")
        self._parts.append(f'<g transform="rotate(-90)">{turned}</g>')

    def _label_ticks(self, axis: int) -> dict[float, str]:
        choose = choose_log_ticks if self._is_log[axis] else choose_ticks
        return {place: format_number(place) for place in choose(*self._ends[axis])}

    def _find_share(self, axis: int, value: float) -> float:
        """Returns the position of a value on an axis, from 0 to 1."""
        low, high = self._ends[axis]
        if self._is_log[axis]:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    def _x(self, value: float) -> float:
        return self._left + self._find_share(0, value) * (self._size[0] - self._left - RIGHT)

    def _y(self, value: float) -> float:
        return self._size[1] - BOTTOM - self._find_share(1, value) * (self._size[1] - TOP - BOTTOM)

    def add_line(self, x: Numbers, y: Numbers, kind: str = "line", colour: str = "") -> Chart:
        """Adds a line in the style `line`, `line other` or `rule`. A `colour` replaces the style's colour."""
        points = []
        for x_value, y_value in zip(x, y, strict=True):
            points.append(f"{self._x(x_value):.1f},{self._y(y_value):.1f}")
        style = f' style="stroke:{colour}"' if colour else ""
        self._parts.append(f'<polyline class="{kind}"{style} points="{" ".join(points)}"/>')
        return self

    def add_points(self, x: Numbers, y: Numbers, colour: str = "var(--mark)") -> Chart:
        dots = []
        for x_value, y_value in zip(x, y, strict=True):
            dots.append(f"M{self._x(x_value):.1f} {self._y(y_value):.1f}h0")
        width, opacity = (7, 0.8) if len(dots) <= MAX_LARGE_DOTS else (4, 0.4)
        style = f'style="stroke:{colour}" stroke-width="{width}" stroke-opacity="{opacity}" stroke-linecap="round"'
        self._parts.append(f'<path fill="none" {style} d="{"".join(dots)}"/>')
        return self

    def add_bars(
        self,
        edges: Sequence[float],
        heights: Sequence[float],
        kind: str = "rest",
        bottoms: Sequence[float] | None = None,
        colour: str = "",
    ) -> Chart:
        """Adds bars of heights [n] between edges [n + 1]. They start at `bottoms` [n], or at 0.

        A `colour` replaces the style's colour.
        """
        style = f' style="fill:{colour}"' if colour else ""
        for n, height in enumerate(heights):
            low = 0.0 if bottoms is None else bottoms[n]
            left = self._x(edges[n])
            right = self._x(edges[n + 1])
            gap = min(1.0, (right - left) / 4)
            top = self._y(low + height)
            bottom = self._y(low)
            place = f'x="{left + gap:.1f}" y="{top:.1f}" width="{right - left - 2 * gap:.1f}"'
            self._parts.append(f'<rect class="{kind}"{style} {place} height="{bottom - top:.1f}"/>')
        return self

    def to_svg(self) -> str:
        return wrap_svg(self.title, *self._size, self._parts)


def draw_rates(
    title: str,
    names: Sequence[str],
    values: Sequence[tuple[float, float, float]],
    limit: float = 1.0,
    letters: int = MAX_LETTERS,
) -> str:
    """Draws a horizontal bar for each name, the first at the top, with the interval of its value.

    Args:
        title: the title.
        names: the names, each cut to `letters` characters.
        values: (value, low end, high end) for each name; NaN for the ends if there is no interval.
        limit: the highest value of the axis, which starts at 0.
        letters: maximum number of characters in a name.
    """
    step = 20
    left = 20 + LETTER * letters
    width = left + 350
    scale = (width - left - 64) / (limit or 1.0)
    parts = []
    for n, (name, (value, *interval)) in enumerate(zip(names, values, strict=True)):
        top = TOP + n * step
        shown = 0.0 if math.isnan(value) else min(max(value, 0.0), limit)
        parts.append(text(left - 8, top + 13, shorten_name(name, letters), anchor="end"))
        parts.append(f'<rect class="rest" x="{left}" y="{top + 3}" width="{shown * scale:.1f}" height="13"/>')
        if not math.isnan(interval[0]):
            low, high = (left + min(max(end, 0.0), limit) * scale for end in interval)
            parts.append(f'<path class="whisker" d="M{low:.1f} {top + 9.5}H{high:.1f}"/>')
            parts.append(f'<path class="whisker" d="M{low:.1f} {top + 6}v7"/>')
            parts.append(f'<path class="whisker" d="M{high:.1f} {top + 6}v7"/>')
        parts.append(text(width - 58, top + 13, format_number(value), anchor="start"))
    return wrap_svg(title, width, 2 * TOP + len(names) * step, parts=parts)


def draw_confusion_matrix(title: str, counts: Sequence[Sequence[float]], names: Sequence[str]) -> str:
    """Draws a confusion matrix. Cells are shaded by the share of the true class. `counts` is [true][predicted]."""
    count = len(names)
    is_numbered = count <= MAX_NUMBERED
    cell = 34 if is_numbered else max(7, 760 // count)
    letters = max(len(shorten_name(name)) for name in names)
    size = 12 if is_numbered else max(6, min(10, cell))
    left = 30 + int(size * 0.62 * letters)
    side = left + count * cell
    frame = f'x="{left}" y="{left}" width="{count * cell}" height="{count * cell}" fill="none"'
    parts = [f'<rect class="grid" {frame}/>']
    for true, row in enumerate(counts):
        total = sum(row)
        for predicted, value in enumerate(row):
            if not value:
                continue
            share = value / total
            x = left + predicted * cell
            y = left + true * cell
            label = f"{names[true]}, predicted as {names[predicted]}: {format_number(value)} ({share:.1%})"
            parts.append(
                f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" fill="var(--mark)" '
                f'fill-opacity="{0.08 + 0.82 * share:.2f}"><title>{escape(label)}</title></rect>'
            )
            if is_numbered:
                style = ' style="fill:#fff"' if share > 0.55 else ""
                words = format_number(value) if value < 1e4 else f"{value:.0e}"
                parts.append(text(x + cell / 2, y + cell / 2 + 4, words, anchor="middle", more=style))
    for n, name in enumerate(names):
        middle = left + (n + 0.5) * cell + size / 3
        style = f' style="font-size:{size}px"'
        parts.append(text(left - 6, middle, shorten_name(name), anchor="end", more=style))
        turned = text(-(left - 6), middle, shorten_name(name), anchor="start", more=style)
        parts.append(f'<g transform="rotate(-90)">{turned}</g>')
    parts.append(f'<g transform="rotate(-90)">{text(-(left + side) / 2, 12, "true class", anchor="middle")}</g>')
    parts.append(text((left + side) / 2, 12, "predicted class", anchor="middle"))
    return wrap_svg(title, side + RIGHT, side + RIGHT, parts=parts)


def draw_legend(entries: Sequence[tuple[str, str]]) -> str:
    """Draws a legend from (label, colour) pairs."""
    parts = []
    for n, (label, colour) in enumerate(entries):
        top = TOP + 18 * n
        parts.append(f'<rect x="0" y="{top + 3}" width="16" height="8" style="fill:{colour}"/>')
        parts.append(text(24, top + 11, label, anchor="start"))
    width = 32 + LETTER * max(len(label) for label, _ in entries)
    return wrap_svg("legend", width, 2 * TOP + 18 * len(entries), parts=parts)


def choose_colours(count: int) -> list[str]:
    """Returns `count` colours with equally spaced hues."""
    return [f"hsl({360 * n // count} 65% 50%)" for n in range(count)]


def text(x: float, y: float, words: str, anchor: str, kind: str = "", more: str = "") -> str:
    """Returns an SVG text. Its `anchor` (start, middle or end) is at (x, y)."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def wrap_svg(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    """Joins parts to an SVG picture with a title for screen readers. Pages can scale its width by 0.68 to 1.5."""
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
    size += f'style="min-width:{0.68 * width:.0f}px;max-width:{1.5 * width:.0f}px"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}><title>{escape(title)}</title>'
    return f"{head}{''.join(parts)}</svg>"


def find_size(svg: str) -> tuple[int, int]:
    """Returns the width and height of a chart in pixels; (0, 0) if the text is not a chart."""
    match = re.match(r'<svg [^>]*\bwidth="(\d+)" height="(\d+)"', svg)
    if match is None:
        return 0, 0
    return int(match[1]), int(match[2])


def to_file(svg: str) -> str:
    """Adds the style to a chart, so that it can be a separate file."""
    return svg.replace("<title>", f"<style>{STYLE}</style><title>", 1)


def compose_picture(title: str, rows: Iterable[Sequence[str]]) -> str:
    """Returns the content of an SVG file with rows of charts below a title."""
    parts = [text(TOP, 18, title, anchor="start", more=' style="font-weight:bold"')]
    width = 2 * TOP + 8 * len(title)
    top = 26
    for row in rows:
        left = 0
        row_height = 0
        for svg in row:
            svg_width, svg_height = find_size(svg)
            parts.append(svg.replace("<svg ", f'<svg x="{left}" y="{top}" ', 1))
            left += svg_width
            row_height = max(row_height, svg_height)
        top += row_height
        width = max(width, left)
    return to_file(wrap_svg(title, width, top, parts))


def shorten_name(name: str, letters: int = MAX_LETTERS) -> str:
    return name if len(name) <= letters else name[: letters - 1] + "\u2026"


def widen_range(low: float, high: float) -> tuple[float, float]:
    """Returns the ends of an axis: a range without a width gets the width 1."""
    return (low, high) if high > low else (low, low + 1)


def choose_ticks(low: float, high: float) -> list[float]:
    """Returns three to seven round numbers from `low` to `high`."""
    raw = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


def choose_log_ticks(low: float, high: float) -> list[float]:
    """Returns at most `MAX_TICKS` round numbers from `low` to `high`, for a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        ticks = []
        for power in powers:
            for factor in factors:
                tick = factor * 10.0**power
                if low <= tick <= high:
                    ticks.append(tick)
        if len(ticks) <= MAX_TICKS:
            return ticks
    return ticks[:: math.ceil(len(ticks) / MAX_TICKS)]
