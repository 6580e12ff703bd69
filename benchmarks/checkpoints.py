"""What checkpoints cost: the same run with one every three seconds and with none.

Wall time, not the loop's own clock, which stands still while a checkpoint is taken. A run that is held to "every 30
seconds, under 2 %" is asked for ten times as many.
"""

from __future__ import annotations

import functools
from pathlib import Path

from benchmarks.measure import Row, WrongResultError, alternate, median, ratios, run_scaleflow, temporary_folder
from benchmarks.steps import BATCH_SIZE, MLP

SECONDS = 3
EPOCHS = 40

WAYS = {
    "every 3 s": (f"checkpoint.every_seconds={SECONDS}", "checkpoint.every_epochs=null"),
    "none": ("checkpoint=none",),
}


def measure(rounds: int) -> list[Row]:
    """One row: examples per second of wall time, with checkpoints to without."""
    with temporary_folder() as folder:
        rates = alternate({way: functools.partial(rate, way, folder) for way in WAYS}, rounds)
    ours, theirs = rates.values()
    return [
        Row(
            work=f"mlp, a checkpoint every {SECONDS} s, examples/s",
            against="no checkpoints",
            ratios=ratios(ours, theirs),
            held_to=">= 0.98",
            ours=median(ours, "/s"),
            theirs=median(theirs, "/s"),
        )
    ]


def rate(way: str, folder: Path) -> float:
    """Examples per second from the end of the first epoch to the end of the last."""
    overrides = [
        "dataset=synthetic",
        f"dataset.examples={MLP.examples * 5 // 4}",
        "dataset.validation=null",
        f"training.batch_size={BATCH_SIZE}",
        f"training.epochs={EPOCHS}",
        "strategy=one_device",
        *MLP.overrides,
        *WAYS[way],
    ]
    events, _ = run_scaleflow(overrides, folder)
    written = sum(event["event"] == "checkpoint" for event in events)
    if (written < 2) == (way != "none"):
        raise WrongResultError(f"checkpoints {way}: {written} were written")
    ends = [event["time"] for event in events if event["event"] == "epoch"]
    return (len(ends) - 1) * MLP.examples / (ends[-1] - ends[0]) * 1000
