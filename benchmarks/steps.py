"""Examples per second of scaleflow's loop, tracking on, against Keras `fit` and loops written by hand.

Every contestant is a process of its own with the same shapes, optimizer, loss, metric and number of
examples; what is measured is the median epoch but the first, which compiles.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import (
    Row,
    alternate,
    expect_accuracy,
    median,
    metric,
    ratios,
    run_by_hand,
    run_scaleflow,
    temporary_folder,
)

BATCH_SIZE = 128

OURS = "scaleflow"
FIT = "fit"
#: Two good ways to feed a loop of one's own; the faster one is the opponent.
LOOPS = ("loop_pipeline", "loop_gather")


@dataclass(frozen=True)
class Shape:
    """One model on one kind of data.

    Attributes:
        model: its name, ours and by hand.
        examples: of the training split; whole calls of 64 steps by hand, whole batches everywhere, so
            that all take the same examples in the same number of steps.
        epochs: the first is not measured.
        overrides: scaleflow's.
        least_accuracy: on the training split in the last epoch.
        held_to: the least ratio against (`fit`, the faster loop).
    """

    model: str
    examples: int
    epochs: int
    overrides: Sequence[str]
    least_accuracy: float
    held_to: tuple[float, float]


MLP = Shape("mlp", 7 * 64 * BATCH_SIZE, 8, ("dataset.shape=[28,28,1]", "model.units=128"), 0.9, (1.5, 0.97))
CNN = Shape("cnn", 64 * BATCH_SIZE, 5, ("dataset.shape=[32,32,3]", "model.padding=valid"), 0.12, (1.0, 0.97))


def measure(shape: Shape, rounds: int) -> list[Row]:
    """Two rows: against `fit`, and against the faster loop by hand."""
    with temporary_folder() as folder:
        contestants: dict[str, Callable[[], float]] = {OURS: functools.partial(ours, shape, folder)}
        for name in (FIT, *LOOPS):
            contestants[name] = functools.partial(by_hand, shape, folder, name)
        rates = alternate(contestants, rounds)
    best = max(LOOPS, key=lambda name: statistics.median(rates[name]))
    opponents = zip((FIT, best), ("Keras fit", f"by hand: {best}"), shape.held_to, strict=True)
    return [
        Row(
            work=f"{shape.model}, examples/s",
            against=against,
            ratios=ratios(rates[OURS], rates[name]),
            held_to=f">= {held_to:g}",
            ours=median(rates[OURS], "/s"),
            theirs=median(rates[name], "/s"),
        )
        for name, against, held_to in opponents
    ]


def ours(shape: Shape, folder: Path) -> float:
    overrides = [
        "dataset=synthetic",
        f"dataset.examples={shape.examples * 5 // 4}",  # a fifth of them is the test split
        "dataset.validation=null",
        f"model={shape.model}",
        f"training.batch_size={BATCH_SIZE}",
        f"training.epochs={shape.epochs}",
        "strategy=one_device",
        *shape.overrides,
    ]
    events, _ = run_scaleflow(overrides, folder)
    expect_accuracy(OURS, metric(events, "train/accuracy")[-1], shape.least_accuracy)
    return statistics.median(metric(events, "perf/examples_per_second")[1:])


def by_hand(shape: Shape, folder: Path, name: str) -> float:
    arguments = [shape.model, "--examples", str(shape.examples), "--epochs", str(shape.epochs)]
    said, _ = run_by_hand(f"{name}.py", [*arguments, "--batch-size", str(BATCH_SIZE)], folder)
    expect_accuracy(name, said["accuracy"], shape.least_accuracy)
    return float(said["examples_per_second"])
