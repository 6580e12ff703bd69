"""Wall time of the default job, process start to exit, against the same job written by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.measure import (
    Benchmark,
    Results,
    Row,
    check_store,
    expect_accuracy,
    metric,
    row,
    run_by_hand,
    run_scaleflow,
)

LEAST_ACCURACY = 0.93


def benchmark() -> Benchmark:
    """One row; both record in the same SQLite store, which exists already."""
    return Benchmark({"scaleflow": ours, "by hand": by_hand}, rows, prepare=warm_up)


def rows(results: Results) -> list[Row]:
    against = "by hand: fit, MLflow, export"
    return [row("the default job, wall time", against, results["scaleflow"], results["by hand"], "s", at_most=0.9)]


def warm_up(folder: Path) -> None:
    """Makes the store and both experiments."""
    ours(folder)
    by_hand(folder)


def ours(folder: Path, is_warm: bool = False) -> float:
    events, seconds = run_scaleflow([], folder, is_warm=is_warm)
    expect_accuracy("scaleflow", metric(events, "test/accuracy")[-1], LEAST_ACCURACY)
    return seconds


def by_hand(folder: Path) -> float:
    shutil.rmtree(folder / "saved_model", ignore_errors=True)
    said, seconds = run_by_hand("digits_job.py", [], folder)
    expect_accuracy("by hand", said["accuracy"], LEAST_ACCURACY)
    check_store(folder)
    return seconds
