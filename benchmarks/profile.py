"""What `profiler=trace` costs outside its window: the same run with and without.

Of the epochs behind the one in which steps are traced, the median one by wall time. The trace is read during the first
of them, with the lowest priority.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from pathlib import Path

from benchmarks.measure import Row, WrongResultError, alternate, median, metric, ratios, run_scaleflow, temporary_folder
from benchmarks.steps import BATCH_SIZE, MLP

EPOCHS = 20

WAYS = {"profiler=trace": ("profiler=trace",), "profiler=none": ("profiler=none",)}


def measure(rounds: int) -> list[Row]:
    """One row: examples per second of wall time, profiled to not."""
    with temporary_folder() as folder:
        rates = alternate({way: functools.partial(rate, way, folder) for way in WAYS}, rounds)
    ours, theirs = rates.values()
    return [
        Row(
            work="mlp, profiler=trace, outside the window, examples/s",
            against="profiler=none",
            ratios=ratios(ours, theirs),
            held_to=">= 0.99",
            ours=median(ours, "/s"),
            theirs=median(theirs, "/s"),
        )
    ]


def rate(way: str, folder: Path) -> float:
    """Examples per second of the median epoch, but for the first, which has the window."""
    overrides = [
        "dataset=synthetic",
        f"dataset.examples={MLP.examples * 5 // 4}",
        "dataset.validation=null",
        f"training.batch_size={BATCH_SIZE}",
        f"training.epochs={EPOCHS}",
        "strategy=one_device",
        "checkpoint=none",
        *MLP.overrides,
        *WAYS[way],
    ]
    events, _ = run_scaleflow(overrides, folder)
    (loss,) = metric(events, "train/loss")[-1:]
    traced = [event for event in events if event["event"] == "profile"]
    if bool(traced) == (way == "profiler=none") or not loss < 1:
        raise WrongResultError(f"{way}: {len(traced)} windows were traced, the last loss is {loss}")
    ends = [event["time"] for event in events if event["event"] == "epoch"]
    return MLP.examples / statistics.median(end - begin for begin, end in itertools.pairwise(ends)) * 1000
