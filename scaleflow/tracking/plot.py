"""Draws the tables of a run as pictures."""

from __future__ import annotations

import csv
from pathlib import Path

from scaleflow.pages.charts import compose_picture, draw_confusion_matrix

#: With more classes no picture is drawn, because the names would be too small to read.
MAX_CLASSES = 100


def draw_confusion(table: Path, split: str) -> Path | None:
    """Draws a confusion matrix as an SVG file next to its table. Returns its path, or None with too many classes.

    The table is a CSV file: a header, then one row per true class with its name and the counts. `split` is for the
    title.
    """
    with table.open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    names = head[1:]
    if len(names) > MAX_CLASSES:
        return None
    counts = []
    correct = 0
    total = 0
    for index, row in enumerate(rows):
        row_counts = [int(cell) for cell in row[1:]]
        counts.append(row_counts)
        correct += row_counts[index]
        total += sum(row_counts)
    matrix = draw_confusion_matrix("confusion matrix", counts, names)
    return write_picture(table, f"{split}: {correct:,} of {total:,} correct", matrix)


def write_picture(table: Path, title: str, chart: str) -> Path:
    """Writes a chart as an SVG file next to its table, and returns its path."""
    picture = table.with_suffix(".svg")
    picture.write_text(compose_picture(title, [[chart]]), encoding="utf-8")
    return picture
