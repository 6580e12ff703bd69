"""Mean and deviation of each configuration of a sweep over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from scaleflow.runs.state import drop_intervals
from scaleflow.sweep.repeats import RepeatedJob

SEED = "seed"

Row = dict[str, str | int | float | None]


def summarize_seeds(jobs: Sequence[RepeatedJob], choices: Sequence[str], metrics: Sequence[str]) -> list[Row]:
    """Returns a row for each configuration that finished with several seeds, in the order of the jobs.

    Args:
        jobs: the jobs, the best first.
        choices: the keys that vary.
        metrics: whose means and deviations are of interest.

    Returns:
        Rows with the values of the keys, the number of `seeds`, and `METRIC mean` and `METRIC deviation` (of a sample,
        with n - 1). Empty if the seed does not vary.
    """
    if SEED not in choices:
        return []
    keys = [key for key in choices if key != SEED]
    groups: dict[tuple[str, ...], list[RepeatedJob]] = {}
    for job in jobs:
        if job.is_finished:
            groups.setdefault(tuple(job.find_value(key) or "" for key in keys), []).append(job)
    rows = []
    for values, members in groups.items():
        if len({job.params.get(SEED) for job in members}) < 2:
            continue
        row: Row = {**dict(zip(keys, values, strict=True)), "seeds": len(members)}
        for metric in metrics:
            found = [value for job in members if (value := drop_intervals(job.metrics).get(metric)) is not None]
            if len(found) > 1:
                row |= {f"{metric} mean": mean(found), f"{metric} deviation": stdev(found)}
        rows.append(row)
    return rows
