"""Draws the measurements of a trial."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from scaleflow.pages.charts import Chart
from scaleflow.tracking.plot import write_picture

#: Maximum number of settings named on an axis.
MAX_NAMED = 8

#: Column of smoothed losses, drawn as a line.
SMOOTHED = "smoothed_loss"


def draw_trial(table: Path, word: str, value: float) -> Path:
    """Draws the measurements of a trial as an SVG file next to their table. Returns its path.

    Args:
        table: a CSV file with a header. Its first column is the setting. The second is drawn as points, and
            `smoothed_loss`, if present, as a line.
        word: the result, as the user types it.
        value: the chosen setting.
    """
    with table.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    rows = [row for row in rows if row[1]]
    settings = read_column(rows, 0)
    measured = read_column(rows, 1)
    if SMOOTHED in header:
        line = read_column(rows, header.index(SMOOTHED))
        first = line[0]
        least = min(line)
        low = least - 0.2 * (first - least)
        high = first + 0.5 * (first - least)  # without the divergence
        x_ticks = None
    else:
        line = measured
        low = 0.0
        high = 1.05 * max(measured)
        every = math.ceil(len(settings) / MAX_NAMED)
        x_ticks = {setting: f"{setting:g}" for setting in settings[::every]}
    chart = Chart(
        header[1],
        (min(settings), max(settings)),
        (low, high),
        labels=(header[0].replace("_", " "), header[1].replace("_", " ")),
        size=(640, 380),
        left=80,
        x_ticks=x_ticks,
        log="x",
    )
    chart.add_points(*select_points(settings, measured, low, high))
    chart.add_line(*select_points(settings, line, low, high))
    chart.add_line([value, value], [low, high], "rule")
    return write_picture(table, word, chart.to_svg())


def read_column(rows: Sequence[Sequence[str]], column: int) -> list[float]:
    return [float(row[column]) for row in rows]


def select_points(x: Sequence[float], y: Sequence[float], low: float, high: float) -> tuple[list[float], list[float]]:
    """Returns the coordinates of the points from `low` to `high`."""
    shown_x = []
    shown_y = []
    for one_x, one_y in zip(x, y, strict=True):
        if low <= one_y <= high:
            shown_x.append(one_x)
            shown_y.append(one_y)
    return shown_x, shown_y
