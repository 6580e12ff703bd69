"""What checkpoints cost: the same run with one every three seconds and with none.

Wall time, not the loop's own clock, which stands still while a checkpoint is taken. A run that is held to "every 30
seconds, under 2 %" is asked for ten times as many.
"""

from __future__ import annotations

import functools
from pathlib import Path

from benchmarks.measure import Benchmark, Results, Row, WrongResultError, row, run_scaleflow
from benchmarks.steps import MLP, ends_of, words

SECONDS = 3
EPOCHS = 40

WAYS = {
    "every 3 s": (f"checkpoint.every_seconds={SECONDS}", "checkpoint.every_epochs=null"),
    "none": ("checkpoint=none",),
}


def benchmark() -> Benchmark:
    """One row: examples per second of wall time, with checkpoints to without."""
    return Benchmark({way: functools.partial(rate, way) for way in WAYS}, rows)


def rows(results: Results) -> list[Row]:
    ours, theirs = results.values()
    work = f"mlp, a checkpoint every {SECONDS} s, examples/s"
    return [row(work, "no checkpoints", ours, theirs, "/s", at_least=0.98)]


def rate(way: str, folder: Path) -> float:
    """Examples per second from the end of the first epoch to the end of the last."""
    events, _ = run_scaleflow(words(MLP, "strategy=one_device", *WAYS[way], epochs=EPOCHS), folder)
    written = sum(event["event"] == "checkpoint" for event in events)
    if (written < 2) == (way != "none"):
        raise WrongResultError(f"checkpoints {way}: {written} were written")
    ends = ends_of(events)
    return (len(ends) - 1) * MLP.examples / (ends[-1] - ends[0])
