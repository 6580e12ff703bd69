"""Draws the tables of a run as pictures. matplotlib is imported only when needed, and without a GUI."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: With more classes there is no picture: nobody could read their names.
MOST_CLASSES = 100

#: With more classes the counts are not written into the picture.
MOST_NUMBERED = 30


def import_figure() -> type[Figure] | None:
    """Imports matplotlib, which takes a third of a second; returns its class `Figure`, or None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure


def draw_confusion(table: Path, split: str) -> Path | None:
    """Draws a confusion matrix as a PNG next to its table, and returns its path.

    The CSV file has a header, then one row per true class with its name and the counts; `split` is for the title.
    Returns None if there are too many classes or matplotlib is not installed.
    """
    figure_class = import_figure()
    if figure_class is None:
        return None
    with table.open(newline="", encoding="utf-8") as file:
        (_, *names), *rows = csv.reader(file)
    if len(names) > MOST_CLASSES:
        return None
    counts = [[int(cell) for cell in row[1:]] for row in rows]
    shares = [[n / max(1, sum(row)) for n in row] for row in counts]
    is_numbered = len(names) <= MOST_NUMBERED
    side = max(4.5, 2.0 + (0.42 if is_numbered else 0.14) * len(names))
    size = 10 if is_numbered else 6
    rotation = 90 if not is_numbered else 45 if max(map(len, names)) > 3 else 0
    labels = [name if len(name) <= 20 else name[:19] + "\u2026" for name in names]
    figure = figure_class(figsize=(side + 1.0, side), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    axes.set_xticks(range(len(names)), labels, rotation=rotation, fontsize=size)
    axes.set_yticks(range(len(names)), labels, fontsize=size)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    correct = sum(row[i] for i, row in enumerate(counts))
    total = sum(map(sum, counts))
    axes.set_title(f"{split}: {correct:,} of {total:,} correct")
    if is_numbered:
        for i, row in enumerate(counts):
            for j, n in enumerate(row):
                colour = "white" if shares[i][j] > 0.5 else "black"
                axes.text(j, i, str(n) if n else "", ha="center", va="center", color=colour, fontsize=8)
    picture = table.with_suffix(".png")
    figure.savefig(picture)
    return picture


def draw_trial(table: Path, word: str, value: float) -> Path | None:
    """Draws the figures of a trial as a PNG next to their table, and returns its path.

    Args:
        table: a CSV file with a header. Its first column is the setting, the second is drawn as points, and
            `smoothed_loss`, if there is one, as a line.
        word: what was found, as it is typed.

    Returns None if matplotlib is not installed.
    """
    figure_class = import_figure()
    if figure_class is None:
        return None
    with table.open(newline="", encoding="utf-8") as file:
        (key, drawn, *others), *rows = csv.reader(file)
    points = [(float(row[0]), float(row[1])) for row in rows if row[1]]
    figure = figure_class(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    is_smoothed = "smoothed_loss" in others
    axes.plot(*zip(*points, strict=True), "." if is_smoothed else "o-", markersize=3 if is_smoothed else 6, label=drawn)
    if is_smoothed:
        smoothed = [float(row[2 + others.index("smoothed_loss")]) for row in rows]
        axes.plot([each for each, _ in points], smoothed, label="smoothed")
        low, high = min(smoothed), smoothed[0]
        axes.set_ylim(low - 0.2 * (high - low), high + 0.5 * (high - low))  # without the divergence
        axes.legend()
        axes.set_xscale("log")
    else:
        axes.set_xscale("log", base=2)
    axes.axvline(value, color="black", linestyle=":")
    axes.set_xlabel(key.replace("_", " "))
    axes.set_ylabel(drawn.replace("_", " "))
    axes.set_title(word)
    picture = table.with_suffix(".png")
    figure.savefig(picture)
    return picture
