"""Draws the tables of a run as pictures. matplotlib is imported only when needed, and without a GUI."""

from __future__ import annotations

import csv
from pathlib import Path

#: With more classes there is no picture: nobody could read their names.
MOST_CLASSES = 100

#: With more classes the counts are not written into the picture.
MOST_NUMBERED = 30


def draw_confusion(table: Path, split: str) -> Path | None:
    """Draws a confusion matrix as a PNG next to its table, and returns its path.

    The CSV file has a header, then one row per true class with its name and the counts; `split` is for the title.
    Returns None if there are too many classes or matplotlib is not installed.
    """
    try:
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
    rotation = 90 if not is_numbered else 45 if max(map(len, names)) > 3 else 0
    labels = [name if len(name) <= 20 else name[:19] + "\u2026" for name in names]
    figure = Figure(figsize=(side + 1.0, side), layout="constrained")
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
