"""Examples per second with the whole loop compiled by XLA, against the same runs without XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import Benchmark, Results, Row, row
from benchmarks.steps import BATCH_SIZE, MLP, Shape, rate

WIDE = replace(
    MLP, examples=64 * BATCH_SIZE, epochs=5, overrides=("dataset.shape=[28,28,1]", "model.units=[1024,1024]")
)

#: The shapes by their names, and the least ratio.
SHAPES: dict[str, tuple[Shape, float]] = {"mlp 784-128-10": (MLP, 1.9), "mlp 1024-1024": (WIDE, 1.3)}


def benchmark() -> Benchmark:
    contestants: dict[str, Callable[[Path], float]] = {}
    for name, (shape, _) in SHAPES.items():
        for value in ("auto", "false"):
            words = ("strategy=one_device", "checkpoint=none", f"hardware.xla={value}")
            contestants[f"{name}, {value}"] = functools.partial(measure, shape, words)
    return Benchmark(contestants, rows)


def measure(shape: Shape, words: tuple[str, ...], folder: Path) -> float:
    return rate(shape, folder, *words)


def rows(results: Results) -> list[Row]:
    return [
        row(
            f"{name}, examples/s",
            "hardware.xla=false",
            results[f"{name}, auto"],
            results[f"{name}, false"],
            "/s",
            at_least=least,
        )
        for name, (_, least) in SHAPES.items()
    ]
