"""Examples per second of a run with `training.batch_size=auto`, against the best of a grid of batch sizes by hand.

Of the run with `auto` only its training counts, not the search before it. Accuracies are not compared: a larger batch
learns less in as many epochs.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import Benchmark, Results, Row, row, run_scaleflow, say
from benchmarks.steps import CNN, MLP, Shape, rate_of, words

GRID = tuple(2**power for power in range(5, 13))

AUTO = "auto"

#: The shapes by their names. The CNN takes 8,192 examples in 2.5 s, so three epochs are enough.
SHAPES = {
    "mlp": replace(MLP, least_accuracy=0.0),
    "cnn": replace(CNN, epochs=3, least_accuracy=0.0),
}


def benchmark(name: str) -> Benchmark:
    contestants: dict[str, Callable[[Path], float]] = {
        str(size): functools.partial(measure, SHAPES[name], size) for size in (AUTO, *GRID)
    }
    return Benchmark(contestants, functools.partial(rows, name))


def measure(shape: Shape, size: int | str, folder: Path) -> float:
    typed = words(shape, "strategy=one_device", "checkpoint=none", "hardware=cpu", f"training.batch_size={size}")
    events, _ = run_scaleflow(typed, folder)
    if size == AUTO:
        ready = next(event for event in events if event["event"] == "ready")
        say(f"  auto: {ready['params']['training.batch_size']}")
    return rate_of(shape, events)


def rows(name: str, results: Results) -> list[Row]:
    best = max(GRID, key=lambda size: statistics.median(results[str(size)]))
    against = f"best of {GRID[0]}..{GRID[-1]}: {best}"
    return [row(f"{name}, batch_size=auto", against, results[AUTO], results[str(best)], "/s", at_least=0.95)]
