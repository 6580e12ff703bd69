"""Reads the learning curves of a run from its events and draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from scaleflow.interfaces.events import EpochEnded, MetricsLogged
from scaleflow.interfaces.formatting import OF_STEPS, format_number
from scaleflow.pages.charts import Chart, Drawing
from scaleflow.runs import EventReader

#: Maximum number of points on the curve of a value that is logged every few steps.
MAX_POINTS = 200

#: Maximum number of metrics that are drawn.
MAX_METRICS = 4

Points = Sequence[tuple[float, float]]


def read_curves(events: Path) -> tuple[Mapping[str, Points], str]:
    """Returns the points (epoch, value) of training and validation metrics, and "epoch".

    For a run of at most one epoch, returns the points (step, value) logged within the epoch, and "step".
    """
    calls: dict[str, list[tuple[float, float]]] = {}
    epochs: dict[str, list[tuple[float, float]]] = {}
    ends: list[int] = []
    for event in EventReader(events).read():
        if isinstance(event, MetricsLogged):
            for name, value in event.values.items():
                calls.setdefault(name, []).append((event.step, value))
        elif isinstance(event, EpochEnded):
            ends.append(event.step)
            for name, value in event.values.items():
                epochs.setdefault(name, []).append((event.step, value))
    is_by_epoch = len(ends) > 1
    trained = epochs if is_by_epoch else calls
    curves: dict[str, Points] = {name: points for name, points in trained.items() if name.startswith("train/")}
    curves |= {name: points for name, points in calls.items() if name.startswith("val/")}
    for name in OF_STEPS:
        if calls.get(name):
            every = math.ceil(len(calls[name]) / MAX_POINTS)
            curves[name] = calls[name][::every]
    unit = ends[0] if is_by_epoch else 1
    scaled = {name: [(step / unit, value) for step, value in points] for name, points in curves.items()}
    return scaled, "epoch" if is_by_epoch else "step"


def draw_learning_curves(curves: Mapping[str, Points], unit: str) -> list[Drawing]:
    """Draws the metrics of training and validation (the loss first), the learning rate and the norm of the gradients.

    Args:
        curves: points by the name of the metric: `train/loss`, `val/loss`, `train/learning_rate`.
        unit: unit of the x axis.
    """
    metrics = [name.removeprefix("train/") for name in curves if name.startswith("train/") and name not in OF_STEPS]
    metrics.sort(key=lambda name: (name != "loss", f"val/{name}" not in curves))
    drawings = []
    for metric in metrics[:MAX_METRICS]:
        lines = {"training": curves[f"train/{metric}"]}
        if curves.get(f"val/{metric}"):
            lines["validation"] = curves[f"val/{metric}"]
        drawings.append(draw_lines(metric, lines, unit))
    for name, title in OF_STEPS.items():
        drawings.append(draw_lines(title, {"": curves.get(name, ())}, unit))
    return [drawing for drawing in drawings if drawing is not None]


def draw_lines(title: str, lines: Mapping[str, Points], unit: str) -> Drawing | None:
    """Draws lines by name, the second one dashed. Returns None if a line has fewer than two points."""
    known = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in lines.items()}
    if any(len(points) < 2 for points in known.values()):
        return None
    x = [point[0] for points in known.values() for point in points]
    y = [point[1] for points in known.values() for point in points]
    chart = Chart(title, (min(x), max(x)), (min(y), max(y)), labels=(unit, title))
    texts = []
    for kind, (name, points) in zip(("line", "line other"), known.items(), strict=False):
        chart.add_line([x for x, _ in points], [y for _, y in points], kind)
        if name:
            dashes = ", dashed" if kind != "line" else ""
            texts.append(f"{name}{dashes}: {format_number(points[-1][1])} at the end")
    caption = "; ".join(texts).capitalize()
    return Drawing(f"curve_{title.replace(' ', '_').replace('/', '_')}", title, chart.to_svg(), caption=caption)
