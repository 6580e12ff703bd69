"""Draws how the metrics and the learning rate of a run went."""

import math
from collections.abc import Mapping, Sequence

from scaleflow.evaluation.charts import Chart
from scaleflow.evaluation.outputs import Drawing
from scaleflow.interfaces.formatting import format_number

#: The most metrics that are drawn.
MOST_METRICS = 4

Points = Sequence[tuple[float, float]]


def draw_learning_curves(curves: Mapping[str, Points], unit: str) -> list[Drawing]:
    """Draws the metrics of training and validation, the loss first, and the learning rate.

    Args:
        curves: points by the name of the metric: `train/loss`, `val/loss`, `learning_rate`.
        unit: what their first numbers count.
    """
    metrics = [name.removeprefix("train/") for name in curves if name.startswith("train/")]
    metrics.sort(key=lambda name: (name != "loss", f"val/{name}" not in curves))
    drawings = []
    for metric in metrics[:MOST_METRICS]:
        parts = {"training": curves[f"train/{metric}"], "validation": curves.get(f"val/{metric}", ())}
        drawing = draw_lines(metric, {name: points for name, points in parts.items() if points}, unit)
        drawings += [drawing] if drawing else []
    rate = draw_lines("learning rate", {"": curves.get("learning_rate", ())}, unit)
    return [*drawings, rate] if rate else drawings


def draw_lines(title: str, lines: Mapping[str, Points], unit: str) -> Drawing | None:
    """Draws lines by name, the second one dashed; None if one of them has less than two points."""
    known = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in lines.items()}
    if any(len(points) < 2 for points in known.values()):
        return None
    x, y = ([point[axis] for points in known.values() for point in points] for axis in (0, 1))
    chart = Chart(title, (min(x), max(x)), (min(y), max(y)), (unit, title))
    texts = []
    for kind, (name, points) in zip(("line", "line other"), known.items(), strict=False):
        chart.add_line([x for x, _ in points], [y for _, y in points], kind)
        if name:
            dashes = ", dashed" if kind != "line" else ""
            texts.append(f"{name}{dashes}: {format_number(points[-1][1])} at the end")
    caption = "; ".join(texts).capitalize()
    return Drawing(f"curve_{title.replace(' ', '_').replace('/', '_')}", title, chart.to_svg(), caption)
