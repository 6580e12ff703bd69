"""Draws charts as SVG, which is readable on a light and on a dark page, and without colour.

matplotlib takes half a second to import and a tenth to draw each, which the end of a short run has no time for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from scaleflow.interfaces.formatting import format_number

#: The colours, which a page and a file of one chart share.
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

LEFT, RIGHT, TOP, BOTTOM = 56, 14, 10, 42

#: The most characters of a label.
MOST_LETTERS = 24

#: With more classes, the cells of a confusion matrix have no numbers, and its labels are small.
MOST_NUMBERED = 24

Array = np.ndarray[Any, Any]


class Chart:
    """Axes, to which marks are added.

    Args:
        title: of the chart, also read aloud.
        size: (width, height) in pixels.
    """

    def __init__(
        self,
        title: str,
        x: tuple[float, float],
        y: tuple[float, float],
        labels: tuple[str, str],
        size: tuple[int, int] = (420, 290),
    ) -> None:
        self.title = title
        self._size = size
        self._ends = tuple((low, high if high > low else low + 1) for low, high in (x, y))
        self._parts: list[str] = []
        bottom, right = size[1] - BOTTOM, size[0] - RIGHT
        for tick in choose_ticks(*self._ends[0]):
            self._text(self._x(tick), bottom + 16, format_number(tick), "middle", "faint")
        for tick in choose_ticks(*self._ends[1]):
            at = self._y(tick)
            self._parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
            self._text(LEFT - 6, at + 4, format_number(tick), "end", "faint")
        self._text((LEFT + right) / 2, size[1] - 8, labels[0], "middle")
        self._parts.append(f'<g transform="rotate(-90)">{text(-(TOP + bottom) / 2, 13, labels[1], "middle")}</g>')

    def _x(self, value: Any) -> Any:
        low, high = self._ends[0]
        return LEFT + (value - low) / (high - low) * (self._size[0] - LEFT - RIGHT)

    def _y(self, value: Any) -> Any:
        low, high = self._ends[1]
        return self._size[1] - BOTTOM - (value - low) / (high - low) * (self._size[1] - TOP - BOTTOM)

    def _text(self, x: float, y: float, words: str, anchor: str, kind: str = "") -> None:
        self._parts.append(text(x, y, words, anchor, kind))

    def add_line(self, x: Sequence[float] | Array, y: Sequence[float] | Array, kind: str = "line") -> Chart:
        """Adds a line; `kind` is its style: `line`, `line other` or `rule`."""
        points = " ".join(
            f"{a:.1f},{b:.1f}" for a, b in zip(self._x(np.asarray(x)), self._y(np.asarray(y)), strict=True)
        )
        self._parts.append(f'<polyline class="{kind}" points="{points}"/>')
        return self

    def add_points(self, x: Array, y: Array) -> Chart:
        dots = (f"M{a:.1f} {b:.1f}h0" for a, b in zip(self._x(x), self._y(y), strict=True))
        style = 'fill="none" stroke="var(--mark)" stroke-width="4" stroke-linecap="round" stroke-opacity="0.4"'
        self._parts.append(f'<path {style} d="{"".join(dots)}"/>')
        return self

    def add_bars(self, edges: Array, heights: Array, kind: str = "rest") -> Chart:
        """Adds bars between edges [n + 1] of heights [n]."""
        zero = self._y(0.0)
        for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True):
            x, width, top = self._x(left) + 1, self._x(right) - self._x(left) - 2, self._y(height)
            self._parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{zero - top:.1f}"/>'
            )
        return self

    def add_note(self, x: float, y: float, words: str) -> Chart:
        """Adds a text that begins at a point."""
        self._text(self._x(x), self._y(y), words, "start")
        return self

    def to_svg(self) -> str:
        return wrap_svg(self.title, *self._size, self._parts)


def draw_rates(title: str, names: Sequence[str], values: Sequence[Any], limit: float = 1.0) -> str:
    """Draws a bar with its interval for each name, from `Figure`s, the first at the top; 0 to `limit`."""
    width, step, left = 520, 20, 170
    scale = (width - left - 64) / (limit or 1.0)
    parts = []
    for n, (name, figure) in enumerate(zip(names, values, strict=True)):
        top = TOP + n * step
        value = 0.0 if math.isnan(figure.value) else min(max(figure.value, 0.0), limit)
        parts.append(text(left - 8, top + 13, shorten_name(name), "end"))
        parts.append(f'<rect class="rest" x="{left}" y="{top + 3}" width="{value * scale:.1f}" height="13"/>')
        if not math.isnan(figure.low):
            ends = [left + min(max(end, 0.0), limit) * scale for end in (figure.low, figure.high)]
            parts.append(f'<path class="whisker" d="M{ends[0]:.1f} {top + 9.5}H{ends[1]:.1f}"/>')
            parts += [f'<path class="whisker" d="M{end:.1f} {top + 6}v7"/>' for end in ends]
        parts.append(text(width - 58, top + 13, format_number(figure.value), "start"))
    return wrap_svg(title, width, 2 * TOP + len(names) * step, parts)


def draw_confusion_matrix(title: str, counts: Array, names: Sequence[str]) -> str:
    """Draws counts [true, predicted]; the shade is the share of the true class."""
    count = len(names)
    is_numbered = count <= MOST_NUMBERED
    cell = 34 if is_numbered else max(7, 760 // count)
    letters = max(len(shorten_name(name)) for name in names)
    size = 12 if is_numbered else max(6, min(10, cell))
    left = 30 + int(size * 0.62 * letters)
    side = left + count * cell
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-300)
    frame = f'x="{left}" y="{left}" width="{count * cell}" height="{count * cell}" fill="none"'
    parts = [f'<rect class="grid" {frame}/>']
    for true, predicted in zip(*np.nonzero(counts), strict=True):
        share, value = shares[true, predicted], counts[true, predicted]
        x, y = left + predicted * cell, left + true * cell
        label = f"{names[true]}, predicted as {names[predicted]}: {format_number(value)} ({share:.1%})"
        parts.append(
            f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" fill="var(--mark)" '
            f'fill-opacity="{0.08 + 0.82 * share:.2f}"><title>{escape(label)}</title></rect>'
        )
        if is_numbered:
            style = ' style="fill:#fff"' if share > 0.55 else ""
            words = format_number(value) if value < 1e4 else f"{value:.0e}"
            parts.append(text(x + cell / 2, y + cell / 2 + 4, words, "middle", more=style))
    for n, name in enumerate(names):
        middle = left + (n + 0.5) * cell + size / 3
        style = f' style="font-size:{size}px"'
        parts.append(text(left - 6, middle, shorten_name(name), "end", more=style))
        turned = text(-(left - 6), middle, shorten_name(name), "start", more=style)
        parts.append(f'<g transform="rotate(-90)">{turned}</g>')
    parts.append(f'<g transform="rotate(-90)">{text(-(left + side) / 2, 12, "true class", "middle")}</g>')
    parts.append(text((left + side) / 2, 12, "predicted class", "middle"))
    return wrap_svg(title, side + RIGHT, side + RIGHT, parts)


def text(x: float, y: float, words: str, anchor: str, kind: str = "", more: str = "") -> str:
    """Returns a text whose `anchor`, start, middle or end, is at a point."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def wrap_svg(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    """Returns a picture of its parts; the title is read aloud. A page may make it smaller and larger, but readable."""
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
    size += f'style="min-width:{0.68 * width:.0f}px;max-width:{1.5 * width:.0f}px"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}><title>{escape(title)}</title>'
    return f"{head}{''.join(parts)}</svg>"


def to_file(svg: str) -> str:
    """Returns a chart as the content of a file of its own."""
    return svg.replace("<title>", f"<style>{STYLE}</style><title>", 1)


def shorten_name(name: str) -> str:
    return name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 1] + "\u2026"


def choose_ticks(low: float, high: float) -> list[float]:
    """Returns three to seven round numbers between two."""
    raw = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]
