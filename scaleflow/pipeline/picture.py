"""Draws the graph of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: The colour of a box by the state of its stage.
COLOURS = {"FINISHED": "#cfe8cf", "reused": "#e4efe4", "RUNNING": "#fdf3c4", "FAILED": "#f4c7c3", "KILLED": "#f4c7c3"}

WIDTH, HEIGHT, GAP = 2.2, 0.7, 0.6


def place_stages(needs: Mapping[str, frozenset[str]]) -> dict[str, tuple[int, int]]:
    """Returns the column and the row of each stage: it is right of all that it needs."""
    columns: dict[str, int] = {}
    for name, before in needs.items():  # in the order in which they run
        columns[name] = 1 + max((columns[each] for each in before), default=-1)
    rows: dict[int, int] = {}
    places = {}
    for name, column in columns.items():
        places[name] = (column, rows.get(column, 0))
        rows[column] = rows.get(column, 0) + 1
    return places


def draw_stages(
    needs: Mapping[str, frozenset[str]], notes: Mapping[str, str], states: Mapping[str, str], path: Path
) -> None:
    """Draws a box for each stage, with a note, and an arrow from each stage that it needs, as a PNG file.

    Args:
        needs: by stage, those before it, in an order in which they can run.
        notes: by stage, the line under its name.
        states: by stage, what decides the colour.
        path: the file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    places = place_stages(needs)
    columns, rows = (1 + max(place[n] for place in places.values()) for n in (0, 1))
    size = (columns * (WIDTH + GAP), rows * (HEIGHT + GAP))
    figure = Figure(figsize=(max(4.0, size[0]), max(1.5, size[1])), layout="constrained")
    axes = figure.add_subplot(xlim=(-GAP / 2, size[0] - GAP / 2), ylim=(-size[1] + HEIGHT + GAP / 2, HEIGHT + GAP / 2))
    axes.set_axis_off()
    corners = {name: (column * (WIDTH + GAP), -row * (HEIGHT + GAP)) for name, (column, row) in places.items()}
    for name, (x, y) in corners.items():
        colour = COLOURS.get(states.get(name, ""), "#eeeeee")
        axes.add_patch(FancyBboxPatch((x, y), WIDTH, HEIGHT, "round,pad=0,rounding_size=0.1", fc=colour, ec="#555555"))
        axes.text(x + WIDTH / 2, y + HEIGHT * 0.62, name, ha="center", va="center", fontsize=9, fontweight="bold")
        axes.text(x + WIDTH / 2, y + HEIGHT * 0.27, notes.get(name, ""), ha="center", va="center", fontsize=7)
        for other in needs[name]:
            start = (corners[other][0] + WIDTH, corners[other][1] + HEIGHT / 2)
            axes.annotate("", (x, y + HEIGHT / 2), start, arrowprops={"arrowstyle": "->", "color": "#777777"})
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png")
