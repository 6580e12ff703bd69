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
            add_points(calls, event)
        elif isinstance(event, EpochEnded):
            ends.append(event.step)
            add_points(epochs, event)
    if len(ends) > 1:
        return scale_steps(select_curves(calls, trained=epochs), ends[0]), "epoch"
    return scale_steps(select_curves(calls, trained=calls), 1), "step"


def add_points(curves: dict[str, list[tuple[float, float]]], event: MetricsLogged | EpochEnded) -> None:
    for name, value in event.values.items():
        curves.setdefault(name, []).append((event.step, value))


def select_curves(logged: Mapping[str, Points], trained: Mapping[str, Points]) -> dict[str, Points]:
    """Returns the curves of training, from `trained`, of validation, and of values that change within an epoch."""
    curves: dict[str, Points] = {}
    for name, points in trained.items():
        if name.startswith("train/"):
            curves[name] = points
    for name, points in logged.items():
        if name.startswith("val/"):
            curves[name] = points
    for name in OF_STEPS:
        if logged.get(name):
            every = math.ceil(len(logged[name]) / MAX_POINTS)
            curves[name] = logged[name][::every]
    return curves


def scale_steps(curves: Mapping[str, Points], steps: int) -> dict[str, Points]:
    """Returns curves whose unit of x is `steps` steps."""
    scaled: dict[str, Points] = {}
    for name, points in curves.items():
        scaled[name] = [(step / steps, value) for step, value in points]
    return scaled


def draw_learning_curves(curves: Mapping[str, Points], unit: str) -> list[Drawing]:
    """Draws the metrics of training and validation (the loss first), the learning rate and the norm of the gradients.

    Args:
        curves: points by the name of the metric: `train/loss`, `val/loss`, `train/learning_rate`.
        unit: unit of the x axis.
    """
    metrics = []
    for name in curves:
        if name.startswith("train/") and name not in OF_STEPS:
            metrics.append(name.removeprefix("train/"))
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
    known: dict[str, tuple[list[float], list[float]]] = {}
    all_x: list[float] = []
    all_y: list[float] = []
    for name, points in lines.items():
        finite = [point for point in points if math.isfinite(point[1])]
        if len(finite) < 2:
            return None
        x = [point[0] for point in finite]
        y = [point[1] for point in finite]
        known[name] = (x, y)
        all_x += x
        all_y += y
    chart = Chart(title, (min(all_x), max(all_x)), (min(all_y), max(all_y)), labels=(unit, title))
    texts = []
    for kind, (name, (x, y)) in zip(("line", "line other"), known.items(), strict=False):
        chart.add_line(x, y, kind)
        if name:
            dashes = ", dashed" if kind != "line" else ""
            texts.append(f"{name}{dashes}: {format_number(y[-1])} at the end")
    caption = "; ".join(texts).capitalize()
    return Drawing(f"curve_{title.replace(' ', '_').replace('/', '_')}", title, chart.to_svg(), caption=caption)
