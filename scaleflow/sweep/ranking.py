"""Ranks the jobs of a sweep by a metric."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from scaleflow.runs.state import RunHistory
from scaleflow.sweep.repeats import RepeatedJob

Mode = Literal["min", "max"]

#: Ends of the names of metrics whose larger, or smaller, values are better. A run knows more: those of its objective.
LARGER_IS_BETTER = (
    "accuracy",
    "exact_match",
    "/auc",
    "/pr_auc",
    "/f1",
    "/f1_score",
    "/precision",
    "/recall",
    "/mean_iou",
    "/r2_score",
    "per_second",
    "/mfu",
)
SMALLER_IS_BETTER = (
    "/loss",
    "/mae",
    "/rmse",
    "/mse",
    "/mape",
    "/msle",
    "_error",
    "_ms",
    "_mb",
    "seconds_to_first_step",
)


def guess_mode(metric: str) -> Mode | None:
    """Returns by its name whether smaller or larger values of a metric are better; None if that is not known."""
    return "max" if metric.endswith(LARGER_IS_BETTER) else "min" if metric.endswith(SMALLER_IS_BETTER) else None


def choose_mode(metric: str, typed: str, direction: object, runs: Iterable[RunHistory]) -> Mode | None:
    """Chooses whether smaller or larger values of a metric are better.

    Args:
        metric: the metric.
        typed: the value of `sweep.mode`.
        direction: the sweeper's option of this name, which ends in `minimize` or `maximize`; None if it has none.
        runs: the runs of the jobs, which know their metrics.
    """
    if typed in ("min", "max"):
        return "max" if typed == "max" else "min"
    if direction is not None:
        return "max" if str(direction).lower().endswith("maximize") else "min"
    name = metric.partition("/")[2]
    known = next((run.ready.modes[name] for run in runs if run.ready and name in run.ready.modes), None)
    return "max" if known == "max" else "min" if known == "min" else guess_mode(metric)


def rank_jobs(jobs: Sequence[RepeatedJob], metric: str, mode: Mode | None) -> list[RepeatedJob]:
    """Sorts jobs by a metric, the best first. Jobs without it, and jobs that did not finish, are last.

    Args:
        jobs: the jobs.
        metric: the metric.
        mode: which values are better; None: not known, so that the jobs stay in their order.
    """

    def position(job: RepeatedJob) -> tuple[bool, float]:
        score = job.score(metric)
        return score is None, 0.0 if score is None else -score if mode == "max" else score

    return sorted(jobs, key=position) if mode is not None else list(jobs)
