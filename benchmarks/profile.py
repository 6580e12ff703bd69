"""What `profiler=trace` costs outside its window: the same run with and without.

Of the epochs after the one in which steps are traced, the median one by wall time. The trace is read during the first
of them, with the lowest priority.
"""

from __future__ import annotations

import functools
from pathlib import Path

from benchmarks.measure import Benchmark, Results, Row, WrongResultError, row, run_scaleflow
from benchmarks.steps import MLP, rate_of, words

EPOCHS = 20

WAYS = ("profiler=trace", "profiler=none")


def benchmark() -> Benchmark:
    """One row: examples per second of wall time, profiled to not."""
    return Benchmark({way: functools.partial(rate, way) for way in WAYS}, rows)


def rows(results: Results) -> list[Row]:
    ours, theirs = results.values()
    return [row("mlp, profiler=trace, outside the window, examples/s", WAYS[1], ours, theirs, "/s", at_least=0.99)]


def rate(way: str, folder: Path) -> float:
    """Examples per second of the median epoch, but for the first, which has the window."""
    events, _ = run_scaleflow(words(MLP, "strategy=one_device", "checkpoint=none", way, epochs=EPOCHS), folder)
    traced = [event for event in events if event["event"] == "profile"]
    if bool(traced) == (way == "profiler=none"):
        raise WrongResultError(f"{way}: {len(traced)} windows were traced")
    return rate_of(MLP, events)
