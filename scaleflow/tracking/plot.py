"""Draws the tables of a run as pictures."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from scaleflow.pages.charts import Chart, compose_picture, draw_confusion_matrix

#: With more classes there is no picture: nobody could read their names.
MOST_CLASSES = 100

#: The most settings that are named on an axis.
MOST_NAMED = 8


def draw_confusion(table: Path, split: str) -> Path | None:
    """Draws a confusion matrix as an SVG file next to its table, and returns its path.

    The CSV file has a header, then one row per true class with its name and the counts; `split` is for the title.
    Returns None if there are too many classes.
    """
    with table.open(newline="", encoding="utf-8") as file:
        (_, *names), *rows = csv.reader(file)
    if len(names) > MOST_CLASSES:
        return None
    counts = [[int(cell) for cell in row[1:]] for row in rows]
    correct = sum(row[i] for i, row in enumerate(counts))
    total = sum(map(sum, counts))
    matrix = draw_confusion_matrix("confusion matrix", counts, names)
    return write_picture(table, f"{split}: {correct:,} of {total:,} correct", matrix)


def draw_trial(table: Path, word: str, value: float) -> Path:
    """Draws the figures of a trial as an SVG file next to their table, and returns its path.

    Args:
        table: a CSV file with a header. Its first column is the setting, the second is drawn as points, and
            `smoothed_loss`, if there is one, as a line.
        word: what was found, as it is typed.
    """
    with table.open(newline="", encoding="utf-8") as file:
        (key, drawn, *others), *rows = csv.reader(file)
    rows = [row for row in rows if row[1]]
    settings = [float(row[0]) for row in rows]
    measured = [float(row[1]) for row in rows]
    if "smoothed_loss" in others:
        line = [float(row[2 + others.index("smoothed_loss")]) for row in rows]
        least, first = min(line), line[0]
        low, high = least - 0.2 * (first - least), first + 0.5 * (first - least)  # without the divergence
        x_ticks = None
    else:
        line = measured
        low, high = 0.0, 1.05 * max(measured)
        every = math.ceil(len(settings) / MOST_NAMED)
        x_ticks = {setting: f"{setting:g}" for setting in settings[::every]}
    chart = Chart(
        drawn,
        (min(settings), max(settings)),
        (low, high),
        labels=(key.replace("_", " "), drawn.replace("_", " ")),
        size=(640, 380),
        left=80,
        x_ticks=x_ticks,
        log="x",
    )
    points = [(x, y) for x, y in zip(settings, measured, strict=True) if low <= y <= high]
    chart.add_points([x for x, _ in points], [y for _, y in points])
    points = [(x, y) for x, y in zip(settings, line, strict=True) if low <= y <= high]
    chart.add_line([x for x, _ in points], [y for _, y in points])
    chart.add_line([value, value], [low, high], "rule")
    return write_picture(table, word, chart.to_svg())


def write_picture(table: Path, title: str, chart: str) -> Path:
    picture = table.with_suffix(".svg")
    picture.write_text(compose_picture(title, [[chart]]), encoding="utf-8")
    return picture
