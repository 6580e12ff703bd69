"""The most memory of all processes of the default job, and of sweeps of it, against the same job written by hand.

Memory is the proportional set size: a page that several processes share, as forked ones do, counts once in their sum.
It is looked at ten times a second.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks import sweep, whole_job
from benchmarks.measure import Benchmark, Results, Row, row

#: Seconds between two looks.
PAUSE = 0.1

#: How many jobs of a sweep run at a time.
AT_A_TIME = 2, 8


def benchmark() -> Benchmark:
    """A row for the job, and one for each sweep; all record in the same SQLite store, which exists already."""
    contestants: dict[str, Callable[[Path], float]] = {
        "scaleflow": lambda folder: measure_peak(lambda: whole_job.ours(folder)),
        **{f"{n} jobs": lambda folder, n=n: measure_peak(lambda: sweep.ours(folder, n)) for n in AT_A_TIME},
        "by hand": lambda folder: measure_peak(lambda: whole_job.by_hand(folder)),
    }
    return Benchmark(contestants, rows, prepare=whole_job.warm_up)


def rows(results: Results) -> list[Row]:
    theirs, against = results["by hand"], "by hand: fit, MLflow, export"
    sweeps = [
        row(f"a sweep, {n} jobs at a time, most memory", against, results[f"{n} jobs"], theirs, "MB") for n in AT_A_TIME
    ]
    return [row("the default job, most memory", against, results["scaleflow"], theirs, "MB", at_most=1.2), *sweeps]


def measure_peak(work: Callable[[], object]) -> float:
    """Returns the most memory, in MB, of all processes that `work` starts."""
    peak, has_ended = [0], threading.Event()

    def watch() -> None:
        while not has_ended.wait(PAUSE):
            peak.append(sum(list_sizes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        has_ended.set()
        watcher.join()
    return max(peak) / 1e6


def list_sizes() -> Iterator[int]:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that has just ended
            yield process.memory_full_info().pss
