"""Pictures beside the tables of a run. matplotlib is imported only when one is drawn, and without its windows."""

from __future__ import annotations

import csv
from pathlib import Path

#: Of more classes there is a table alone: nobody could read their names.
MOST_CLASSES = 100

#: Up to so many classes the counts are written into the picture.
MOST_NUMBERED = 30


def draw_confusion(table: Path, split: str) -> Path | None:
    """Draws a table of which classes were taken for which, as a PNG beside it.

    Args:
        table: CSV; a header, then a row to each true class: its name and the counts.
        split: what was evaluated, for the title.

    Returns:
        The picture; None where there are too many classes, or no matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
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
    turned = 90 if not is_numbered else 45 if longest_name(names) > 3 else 0
    figure = Figure(figsize=(side + 1.0, side), layout="constrained")
    axes = figure.add_subplot()
    shown = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    figure.colorbar(shown, ax=axes, label="share of the true class", shrink=0.8)
    axes.set_xticks(range(len(names)), [shorten_name(name) for name in names], rotation=turned, fontsize=size)
    axes.set_yticks(range(len(names)), [shorten_name(name) for name in names], fontsize=size)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    right = sum(row[i] for i, row in enumerate(counts))
    total = sum(map(sum, counts))
    axes.set_title(f"{split}: {right:,} of {total:,} right")
    if is_numbered:
        for i, row in enumerate(counts):
            for j, n in enumerate(row):
                colour = "white" if shares[i][j] > 0.5 else "black"
                axes.text(j, i, str(n) if n else "", ha="center", va="center", color=colour, fontsize=8)
    picture = table.with_suffix(".png")
    FigureCanvasAgg(figure)
    figure.savefig(picture)
    return picture


def shorten_name(name: str) -> str:
    return name if len(name) <= 20 else name[:19] + "\u2026"


def longest_name(names: list[str]) -> int:
    return max(map(len, names))
