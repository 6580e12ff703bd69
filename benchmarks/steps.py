"""Examples per second of scaleflow's loop, tracking on, against Keras `fit` and loops written by hand.

Every contestant is a process of its own with the same shapes, optimizer, loss, metric and number of examples. What is
measured is the wall time of the median epoch but the first, which compiles: from the end of an epoch to the end of the
next, with whatever is done in between.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    Benchmark,
    Results,
    Row,
    WrongResultError,
    check_store,
    expect_accuracy,
    metric,
    row,
    run_by_hand,
    run_scaleflow,
)

BATCH_SIZE = 128

OURS = "scaleflow"
FIT, FIT_64, AUTOLOG = "Keras fit", "Keras fit(steps_per_execution=64)", "Keras fit + mlflow.tensorflow.autolog"
#: Two good ways to feed a loop of one's own; the faster one is the opponent.
LOOPS = ("loop_pipeline", "loop_gather")

#: What each is run by.
SCRIPTS = {
    FIT: ("fit.py",),
    FIT_64: ("fit.py", "--steps-per-execution", "64"),
    AUTOLOG: ("fit.py", "--autolog"),
    **{name: (f"{name}.py",) for name in LOOPS},
}


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
    """

    model: str
    examples: int
    epochs: int
    overrides: Sequence[str]
    least_accuracy: float


MLP = Shape("mlp", 7 * 64 * BATCH_SIZE, 8, ("dataset.shape=[28,28,1]", "model.units=128"), 0.9)
CNN = Shape("cnn", 64 * BATCH_SIZE, 5, ("dataset.shape=[32,32,3]", "model.padding=valid"), 0.12)

#: The least ratio to each opponent, "" the faster loop by hand.
ASKED = {MLP: {FIT: 1.8, FIT_64: 1.0, AUTOLOG: 2.0, "": 0.98}, CNN: {FIT: 1.0, "": 0.97}}


def against_one_device(shape: Shape) -> Benchmark:
    """Rows against each way of `fit`, and against the faster loop by hand."""
    ways = [way for way in ASKED[shape] if way]
    contestants: dict[str, Callable[[Path], float]] = {OURS: functools.partial(ours, shape)}
    contestants |= {way: functools.partial(by_hand, shape, way) for way in (*ways, *LOOPS)}
    return Benchmark(contestants, functools.partial(rows, shape))


def rows(shape: Shape, results: Results) -> list[Row]:
    best = max(LOOPS, key=lambda name: statistics.median(results[name]))
    named = {way: way or f"by hand: {best}" for way in ASKED[shape]}
    return [
        row(f"{shape.model}, examples/s", named[way], results[OURS], results[way or best], "/s", at_least=least)
        for way, least in ASKED[shape].items()
    ]


def ours(shape: Shape, folder: Path) -> float:
    return rate(shape, folder, "strategy=one_device", "checkpoint=none")


def by_hand(shape: Shape, way: str, folder: Path) -> float:
    found = said(shape, folder, *SCRIPTS[way])
    if way == AUTOLOG:
        check_store(folder)
    return found


# ---------------------------------------------------------------------------------------------
# What other benchmarks measure by, too
# ---------------------------------------------------------------------------------------------


def words(shape: Shape, *more: str, epochs: int | None = None) -> list[str]:
    """The overrides of a run on a shape's data; a fifth of what is made is the test split."""
    return [
        *("dataset=synthetic", f"dataset.examples={shape.examples * 5 // 4}", "dataset.validation=null"),
        *(f"model={shape.model}", *shape.overrides),
        *(f"training.batch_size={BATCH_SIZE}", f"training.epochs={epochs or shape.epochs}"),
        *more,
    ]


def rate(shape: Shape, folder: Path, *more: str) -> float:
    """Examples per second of the median epoch of a run that has learned."""
    events, _ = run_scaleflow(words(shape, *more), folder)
    return rate_of(shape, events)


def rate_of(shape: Shape, events: Sequence[dict[str, Any]]) -> float:
    """Examples per second of the median epoch but the first, by the clock on the wall."""
    expect_accuracy(OURS, metric(events, "train/accuracy")[-1], shape.least_accuracy)
    return shape.examples / statistics.median(b - a for a, b in itertools.pairwise(ends_of(events)))


def ends_of(events: Sequence[dict[str, Any]]) -> list[float]:
    """When each epoch ended, in seconds."""
    ends = [event["time"] / 1000 for event in events if event["event"] == "epoch"]
    if len(ends) < 3:
        raise WrongResultError(f"{len(ends)} epochs were told of")
    return ends


def said(shape: Shape, folder: Path, script: str, *options: str) -> float:
    """The same by a script of `by_hand/`."""
    size = ["--examples", str(shape.examples), "--epochs", str(shape.epochs), "--batch-size", str(BATCH_SIZE)]
    found, _ = run_by_hand(script, [shape.model, *size, *options], folder)
    expect_accuracy(" ".join([script, *options]), found["accuracy"], shape.least_accuracy)
    return float(found["examples_per_second"])
