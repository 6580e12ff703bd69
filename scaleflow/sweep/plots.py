"""Pictures of a sweep: throughput, results over each swept value, and the curves of all jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scaleflow.sweep.repeats import RepeatedJob

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scaleflow.sweep.report import Report

#: Of more jobs bars and curves could not be told apart.
MOST_SHOWN = 40
LONGEST_LABEL = 48

Labelled = Sequence[tuple[str, RepeatedJob]]


def draw_plots(report: Report, jobs: Labelled, folder: Path) -> list[Path]:
    """Draws what there is to draw, as PNG files in a folder; gives them."""
    ready = [(label, told) for label, told in jobs if told.is_ready][:MOST_SHOWN]
    if not ready:
        return []
    figures = {"throughput": plot_throughput(ready), "curves": plot_curves(ready)}
    figures |= {f"over-{key.replace('/', '-')}": plot_over_key(key, ready) for key in report.choices}
    found = []
    for name, figure in figures.items():
        if figure is not None:
            path = folder / f"{name}.png"
            figure.savefig(path)
            found.append(path)
    return found


def plot_throughput(jobs: Labelled) -> Figure | None:
    """Examples a second of each job, as bars; of repeats the median, with a line from the least to the most."""
    rated = [(label, told.rate, told.rates) for label, told in jobs if told.rate]
    if not rated:
        return None
    below = [rate - min(rates) for _, rate, rates in rated]
    above = [max(rates) - rate for _, rate, rates in rated]
    spread = [below, above] if any((*below, *above)) else None
    figure = make_figure(8.0, 1.2 + 0.4 * len(rated))
    axes = figure.add_subplot()
    bars = axes.barh(
        [shorten_label(label) for label, *_ in rated], [rate for _, rate, _ in rated], xerr=spread, capsize=3
    )
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("examples/s")
    return figure


def plot_curves(jobs: Labelled) -> Figure | None:
    """The training and validation losses of all jobs."""
    keys = [key for key in ("train/loss", "val/loss") if any(key in told.curves for _, told in jobs)]
    if not keys:
        return None
    figure = make_figure(6.5 * len(keys), 5.0)
    for at, key in enumerate(keys, 1):
        axes = figure.add_subplot(1, len(keys), at)
        for label, told in jobs:
            if points := told.curves.get(key):
                steps, values = zip(*points, strict=True)
                axes.plot(
                    steps, values, label=shorten_label(label), linewidth=1.2, marker="." if len(points) < 30 else None
                )
        axes.set_xlabel("step")
        axes.set_title(key)
    figure.axes[-1].legend(fontsize=8)
    return figure


def plot_over_key(key: str, jobs: Labelled) -> Figure | None:
    """A result over the values of one swept key; numbers on an axis, words side by side."""
    metric = choose_main_metric(jobs)
    found = [
        (told.params[key], told.results[metric]) for _, told in jobs if key in told.params and metric in told.results
    ]
    if len({value for value, _ in found}) < 2:
        return None
    figure = make_figure(6.0, 4.5)
    axes = figure.add_subplot()
    numbers = [value for value in (parse_number(value) for value, _ in found) if value is not None]
    if len(numbers) == len(found):
        axes.plot(numbers, [result for _, result in found], "o")
        if min(numbers) > 0 and max(numbers) >= 50 * min(numbers):
            axes.set_xscale("log")
    else:
        names = [shorten_label(value) for value, _ in found]
        axes.plot(names, [result for _, result in found], "o")
        axes.tick_params(axis="x", rotation=30 if max(map(len, names)) > 8 else 0)
    axes.set_xlabel(key)
    axes.set_ylabel(metric)
    return figure


def choose_main_metric(jobs: Labelled) -> str:
    """What jobs are compared by: their accuracy, or another metric, or the loss."""
    keys = [*dict.fromkeys(key for _, told in jobs for key in told.results)]
    better = [key for key in keys if not key.endswith("/loss")]
    return next(iter([*better, *keys]), "")


def parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def make_figure(width: float, height: float) -> Figure:
    """A figure without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def shorten_label(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "\u2026"
