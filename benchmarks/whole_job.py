"""Wall time of the default job, process start to exit, against the same job written by hand."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

from benchmarks.measure import (
    Row,
    alternate,
    check_store,
    expect_accuracy,
    median,
    metric,
    ratios,
    run_by_hand,
    run_scaleflow,
    temporary_folder,
)

LEAST_ACCURACY = 0.93


def measure(rounds: int) -> list[Row]:
    """One row; both record in the same SQLite store, which exists already."""
    with temporary_folder() as folder:
        contestants = {"scaleflow": functools.partial(ours, folder), "by hand": functools.partial(by_hand, folder)}
        for warm_up in contestants.values():  # makes the store and both experiments
            warm_up()
        seconds = alternate(contestants, rounds)
    row = Row(
        work="the default job, wall time",
        against="by hand: fit, MLflow, export",
        ratios=ratios(seconds["scaleflow"], seconds["by hand"]),
        held_to="<= 1",
        ours=median(seconds["scaleflow"], "s"),
        theirs=median(seconds["by hand"], "s"),
    )
    return [row]


def ours(folder: Path) -> float:
    events, seconds = run_scaleflow([], folder)
    expect_accuracy("scaleflow", metric(events, "test/accuracy")[-1], LEAST_ACCURACY)
    return seconds


def by_hand(folder: Path) -> float:
    shutil.rmtree(folder / "saved_model", ignore_errors=True)
    said, seconds = run_by_hand("digits_job.py", [], folder)
    expect_accuracy("by hand", said["accuracy"], LEAST_ACCURACY)
    check_store(folder)
    return seconds
