"""Plots of a sweep: the throughput, a result over each swept key, and the losses of all jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from scaleflow.pages.charts import LETTER, Chart, choose_colours, compose_picture, draw_legend, draw_rates, shorten_name
from scaleflow.sweep.ranking import RepeatedJob

#: The most jobs in a plot: more bars and curves are unreadable.
MAX_JOBS = 40
#: In characters.
MAX_LABEL = 48

Labelled = Sequence[tuple[str, RepeatedJob]]


def draw_plots(jobs: Labelled, choices: Sequence[str], folder: Path) -> list[Path]:
    """Draws the plots that the jobs, the best first, have data for, as SVG files in a folder, and returns them."""
    ready = [(label, job) for label, job in jobs if job.is_ready]
    if not ready:
        return []
    by_number = sorted(ready[:MAX_JOBS], key=lambda each: each[1].entry.number)
    part = f" of {MAX_JOBS} of {len(ready):,} jobs" if len(ready) > MAX_JOBS else ""
    pictures = {
        "throughput": plot_throughput(by_number, f"examples/s{part}"),
        "curves": plot_curves(by_number, f"losses{part}"),
    }
    for key in choices:
        pictures[f"over-{key.replace('/', '-')}"] = plot_over_key(key, ready)
    paths = []
    for name, picture in pictures.items():
        if picture is not None:
            path = folder / f"{name}.svg"
            path.write_text(picture, encoding="utf-8")
            paths.append(path)
    return paths


def plot_throughput(jobs: Labelled, title: str) -> str | None:
    """Plots a bar for each job with its examples/s: the median over repeats, with a line from least to most."""
    labels = []
    rates: list[tuple[float, float, float]] = []
    for label, job in jobs:
        if not job.rate:
            continue
        is_spread = max(job.rates) > min(job.rates)
        labels.append(label)
        rates.append((job.rate, min(job.rates), max(job.rates)) if is_spread else (job.rate, math.nan, math.nan))
    if not rates:
        return None
    limit = max(high if high > rate else rate for rate, _, high in rates)
    letters = min(MAX_LABEL, max(map(len, labels)))
    return compose_picture(title, [[draw_rates("throughput", labels, rates, limit=limit, letters=letters)]])


def plot_curves(jobs: Labelled, title: str) -> str | None:
    """Plots the training and validation losses of all jobs."""
    keys = [key for key in ("train/loss", "val/loss") if any(key in job.curves for _, job in jobs)]
    if not keys:
        return None
    colours = choose_colours(len(jobs))
    row = []
    for key in keys:
        lines = {}
        for number, (_, job) in enumerate(jobs):
            points = [(step, loss) for step, loss in job.curves.get(key, ()) if math.isfinite(loss)]
            if points:
                lines[number] = points
        steps = [step for points in lines.values() for step, _ in points]
        losses = [loss for points in lines.values() for _, loss in points]
        if not losses:
            continue
        chart = Chart(key, (min(steps), max(steps)), (min(losses), max(losses)), labels=("step", key))
        for number, points in lines.items():
            add = chart.add_line if len(points) > 1 else chart.add_points
            add([step for step, _ in points], [loss for _, loss in points], colour=colours[number])
        row.append(chart.to_svg())
    if not row:
        return None
    labels = [shorten_name(label, MAX_LABEL) for label, _ in jobs]
    legend = draw_legend(list(zip(labels, colours, strict=True)))
    return compose_picture(title, [[*row, legend]])


def plot_over_key(key: str, jobs: Labelled) -> str | None:
    """Plots the main metric over the values of a swept key: of all jobs on an axis if the values are numbers, otherwise
    of the first 40, with a row for each value.
    """
    metric = choose_main_metric(jobs)
    if any(parse_number(job.params.get(key, "0")) is None for _, job in jobs):
        jobs = sorted(jobs[:MAX_JOBS], key=lambda each: each[1].entry.number)
    points = []
    for _, job in jobs:
        if key in job.params and math.isfinite(job.results.get(metric, math.nan)):
            points.append((job.params[key], job.results[metric]))
    values = list(dict.fromkeys(value for value, _ in points))
    if len(values) < 2:
        return None
    results = [result for _, result in points]
    ends = min(results), max(results)
    numbers = [number for number in (parse_number(value) for value, _ in points) if number is not None]
    if len(numbers) == len(points):
        is_log = min(numbers) > 0 and max(numbers) >= 50 * min(numbers)
        chart = Chart(key, (min(numbers), max(numbers)), ends, labels=(key, metric), log="x" if is_log else "")
        chart.add_points(numbers, results)
        return compose_picture(f"{metric} over {key}", [[chart.to_svg()]])
    rows = {value: -float(place) for place, value in enumerate(values)}  # the first at the top
    names = {place: shorten_name(value, MAX_LABEL) for value, place in rows.items()}
    left = 40 + LETTER * max(map(len, names.values()))
    chart = Chart(
        key,
        ends,
        (0.5 - len(values), 0.5),
        labels=(metric, key),
        size=(left + 380, 60 + 26 * len(values)),
        left=left,
        y_ticks=names,
    )
    chart.add_points(results, [rows[value] for value, _ in points])
    return compose_picture(f"{metric} over {key}", [[chart.to_svg()]])


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
