"""Plots of a sweep: the throughput, a result over each swept key, and the losses of all jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scaleflow.sweep.ranking import RepeatedJob

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The most jobs in a plot: more bars and curves are unreadable.
MAX_JOBS = 40
#: In characters.
MAX_LABEL = 48

Labelled = Sequence[tuple[str, RepeatedJob]]


def draw_plots(jobs: Labelled, choices: Sequence[str], folder: Path) -> list[Path]:
    """Draws the plots that the jobs, the best first, have data for, as PNG files in a folder, and returns them."""
    ready = [(label, job) for label, job in jobs if job.is_ready]
    if not ready:
        return []
    by_number = sorted(ready[:MAX_JOBS], key=lambda each: each[1].entry.number)
    figures = {"throughput": plot_throughput(by_number), "curves": plot_curves(by_number)}
    figures |= {f"over-{key.replace('/', '-')}": plot_over_key(key, ready) for key in choices}
    if len(ready) > MAX_JOBS:
        for figure in (figures["throughput"], figures["curves"]):
            if figure is not None:
                figure.suptitle(f"{MAX_JOBS} of {len(ready):,} jobs")
    paths = []
    for name, figure in figures.items():
        if figure is not None:
            path = folder / f"{name}.png"
            figure.savefig(path)
            paths.append(path)
    return paths


def plot_throughput(jobs: Labelled) -> Figure | None:
    """Plots a bar for each job with its examples/s: the median over repeats, with an error bar from least to most."""
    measured = [(label, job.rate, job.rates) for label, job in jobs if job.rate]
    if not measured:
        return None
    below = [rate - min(rates) for _, rate, rates in measured]
    above = [max(rates) - rate for _, rate, rates in measured]
    spread = [below, above] if any((*below, *above)) else None
    figure = make_figure(8.0, 1.2 + 0.4 * len(measured))
    axes = figure.add_subplot()
    bars = axes.barh(
        [shorten_label(label) for label, *_ in measured], [rate for _, rate, _ in measured], xerr=spread, capsize=3
    )
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("examples/s")
    return figure


def plot_curves(jobs: Labelled) -> Figure | None:
    """Plots the training and validation losses of all jobs."""
    keys = [key for key in ("train/loss", "val/loss") if any(key in job.curves for _, job in jobs)]
    if not keys:
        return None
    figure = make_figure(6.5 * len(keys), 5.0)
    for at, key in enumerate(keys, 1):
        axes = figure.add_subplot(1, len(keys), at)
        for label, job in jobs:
            if points := job.curves.get(key):
                steps, values = zip(*points, strict=True)
                axes.plot(
                    steps, values, label=shorten_label(label), linewidth=1.2, marker="." if len(points) < 30 else None
                )
        axes.set_xlabel("step")
        axes.set_title(key)
    figure.axes[-1].legend(fontsize=8)
    return figure


def plot_over_key(key: str, jobs: Labelled) -> Figure | None:
    """Plots the main metric over the values of a swept key: of all jobs on an axis if the values are numbers, otherwise
    of the first 40 as categories.
    """
    metric = choose_main_metric(jobs)
    if any(parse_number(job.params.get(key, "0")) is None for _, job in jobs):
        jobs = sorted(jobs[:MAX_JOBS], key=lambda each: each[1].entry.number)
    points = [(job.params[key], job.results[metric]) for _, job in jobs if key in job.params and metric in job.results]
    numbers = [value for value in (parse_number(value) for value, _ in points) if value is not None]
    are_numbers = len(numbers) == len(points)
    if len({value for value, _ in points}) < 2:
        return None
    figure = make_figure(6.0, 4.5)
    axes = figure.add_subplot()
    if are_numbers:
        axes.plot(numbers, [result for _, result in points], "o")
        if min(numbers) > 0 and max(numbers) >= 50 * min(numbers):
            axes.set_xscale("log")
    else:
        categories = [shorten_label(value) for value, _ in points]
        axes.plot(categories, [result for _, result in points], "o")
        axes.tick_params(axis="x", rotation=30 if max(map(len, categories)) > 8 else 0)
    axes.set_xlabel(key)
    axes.set_ylabel(metric)
    return figure


def choose_main_metric(jobs: Labelled) -> str:
    """Returns the first metric of the results that is no loss; otherwise the first loss; empty if there are none."""
    keys = [*dict.fromkeys(key for _, job in jobs for key in job.results)]
    without_loss = [key for key in keys if not key.endswith("/loss")]
    return next(iter([*without_loss, *keys]), "")


def parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def make_figure(width: float, height: float) -> Figure:
    """Makes a figure without a window, for files only. The size is in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def shorten_label(label: str) -> str:
    return label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "\u2026"
