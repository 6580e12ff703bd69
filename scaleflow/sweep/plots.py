"""Plots of a sweep: the throughput, a result over each swept key, and the losses of all jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from scaleflow.pages.charts import LETTER, Chart, choose_colours, compose_picture, draw_legend, draw_rates, shorten_name
from scaleflow.sweep.ranking import RepeatedJob

#: The maximum number of jobs in a plot. More bars and curves are unreadable.
MAX_JOBS = 40

#: The maximum length of a label, in characters.
MAX_LABEL = 48

#: Jobs with their labels.
Labelled = Sequence[tuple[str, RepeatedJob]]


def draw_plots(jobs: Labelled, choices: Sequence[str], folder: Path) -> list[Path]:
    """Draws plots as SVG files in a folder, and returns the files. A plot without data is left out.

    Args:
        jobs: the jobs, the best first.
        choices: the keys that vary.
    """
    begun_jobs = [(label, job) for label, job in jobs if job.has_begun]
    if not begun_jobs:
        return []
    first_jobs = sort_by_number(begun_jobs[:MAX_JOBS])
    part = f" of {MAX_JOBS} of {len(begun_jobs):,} jobs" if len(begun_jobs) > MAX_JOBS else ""
    pictures = {
        "throughput": plot_throughput(first_jobs, f"examples/s{part}"),
        "curves": plot_curves(first_jobs, f"losses{part}"),
    }
    for key in choices:
        pictures[f"over-{key.replace('/', '-')}"] = plot_over_key(key, begun_jobs)
    paths = []
    for name, picture in pictures.items():
        if picture is not None:
            path = folder / f"{name}.svg"
            path.write_text(picture, encoding="utf-8")
            paths.append(path)
    return paths


def sort_by_number(jobs: Labelled) -> Labelled:
    return sorted(jobs, key=lambda labelled: labelled[1].entry.number)


def plot_throughput(jobs: Labelled, title: str) -> str | None:
    """Plots a bar for each job with its examples/s: the median over repeats, with a line from lowest to highest."""
    labels = []
    rates: list[tuple[float, float, float]] = []
    limit = 0.0
    for label, job in jobs:
        if not job.rate:
            continue
        lowest = min(job.rates)
        highest = max(job.rates)
        limit = max(limit, highest)
        labels.append(label)
        if highest > lowest:
            rates.append((job.rate, lowest, highest))
        else:
            rates.append((job.rate, math.nan, math.nan))  # no line
    if not rates:
        return None
    letters = min(MAX_LABEL, max(map(len, labels)))
    return compose_picture(title, [[draw_rates("throughput", labels, rates, limit=limit, letters=letters)]])


def plot_curves(jobs: Labelled, title: str) -> str | None:
    """Plots the training and validation losses of all jobs, with a legend."""
    colours = choose_colours(len(jobs))
    charts = []
    for key in ("train/loss", "val/loss"):
        chart = plot_losses(key, jobs, colours)
        if chart is not None:
            charts.append(chart)
    if not charts:
        return None
    legend = []
    for (label, _), colour in zip(jobs, colours, strict=True):
        legend.append((shorten_name(label, MAX_LABEL), colour))
    return compose_picture(title, [[*charts, draw_legend(legend)]])


def plot_losses(key: str, jobs: Labelled, colours: Sequence[str]) -> str | None:
    """Plots one loss of all jobs over the steps. Values that are not finite are left out."""
    lines: list[tuple[list[int], list[float], str]] = []
    all_steps: list[int] = []
    all_losses: list[float] = []
    for (_, job), colour in zip(jobs, colours, strict=True):
        steps = []
        losses = []
        for step, loss in job.curves.get(key, ()):
            if math.isfinite(loss):
                steps.append(step)
                losses.append(loss)
        if steps:
            lines.append((steps, losses, colour))
            all_steps += steps
            all_losses += losses
    if not lines:
        return None
    x_range = (min(all_steps), max(all_steps))
    y_range = (min(all_losses), max(all_losses))
    chart = Chart(key, x_range, y_range, labels=("step", key))
    for steps, losses, colour in lines:
        add = chart.add_line if len(steps) > 1 else chart.add_points
        add(steps, losses, colour=colour)
    return chart.to_svg()


def plot_over_key(key: str, jobs: Labelled) -> str | None:
    """Plots the main metric over the values of a swept key.

    If all values are numbers, they are on an axis, and all jobs are in the plot. Otherwise each value has a row, and
    the first `MAX_JOBS` jobs are in the plot.
    """
    metric = choose_main_metric(jobs)
    if any(parse_number(job.params.get(key, "0")) is None for _, job in jobs):
        jobs = sort_by_number(jobs[:MAX_JOBS])
    values: list[str] = []
    numbers: list[float] = []
    results: list[float] = []
    for _, job in jobs:
        result = job.results.get(metric, math.nan)
        if key not in job.params or not math.isfinite(result):
            continue
        values.append(job.params[key])
        results.append(result)
        number = parse_number(job.params[key])
        if number is not None:
            numbers.append(number)
    if len(set(values)) < 2:
        return None
    if len(numbers) == len(values):
        chart = plot_over_numbers(numbers, results, (key, metric))
    else:
        chart = plot_over_words(values, results, (metric, key))
    return compose_picture(f"{metric} over {key}", [[chart.to_svg()]])


def plot_over_numbers(numbers: Sequence[float], results: Sequence[float], labels: tuple[str, str]) -> Chart:
    """Plots results over numbers, on a logarithmic axis if the numbers span a factor of 50."""
    low = min(numbers)
    high = max(numbers)
    is_log = low > 0 and high >= 50 * low
    chart = Chart(labels[0], (low, high), (min(results), max(results)), labels=labels, log="x" if is_log else "")
    chart.add_points(numbers, results)
    return chart


def plot_over_words(words: Sequence[str], results: Sequence[float], labels: tuple[str, str]) -> Chart:
    """Plots results to the right, in a row for each distinct word. The first row is at the top."""
    distinct = list(dict.fromkeys(words))
    heights: dict[str, float] = {}
    names: dict[float, str] = {}
    for row, word in enumerate(distinct):
        heights[word] = -float(row)
        names[-float(row)] = shorten_name(word, MAX_LABEL)
    left = 40 + LETTER * max(map(len, names.values()))
    chart = Chart(
        labels[1],
        (min(results), max(results)),
        (0.5 - len(distinct), 0.5),
        labels=labels,
        size=(left + 380, 60 + 26 * len(distinct)),
        left=left,
        y_ticks=names,
    )
    chart.add_points(results, [heights[word] for word in words])
    return chart


def choose_main_metric(jobs: Labelled) -> str:
    """Returns the first metric of the results that is not a loss; if there are only losses, the first of them."""
    first_loss = ""
    for _, job in jobs:
        for metric in job.results:
            if not metric.endswith("/loss"):
                return metric
            first_loss = first_loss or metric
    return first_loss


def parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
