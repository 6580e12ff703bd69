"""Examples per second with the whole loop compiled by XLA, against the same runs without XLA.

The MLPs take the data of `benchmarks.steps`. The transformer has two blocks of width 128, and takes sequences of 64
words: most words of a sequence are from the half of the vocabulary that the target names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.measure import Benchmark, Results, Row, row, run_scaleflow
from benchmarks.steps import BATCH_SIZE, MLP, Shape, rate, rate_of
from scaleflow.interfaces import Arrays, Inputs, Outputs

WIDE = replace(
    MLP, examples=64 * BATCH_SIZE, epochs=10, overrides=("dataset.shape=[28,28,1]", "model.units=[1024,1024]")
)

#: Examples x epochs x 1.7 million parameters are as much as `hardware.xla=auto` compiles for.
WORDS, VOCABULARY, SEQUENCES, SEQUENCE_EPOCHS, SEQUENCE_BATCH_SIZE = 64, 10_000, 4_608, 4, 32
TRANSFORMER = Shape(
    "transformer",
    SEQUENCES,
    SEQUENCE_EPOCHS,
    ("model.width=128", "model.units=512", "model.blocks=2", f"training.batch_size={SEQUENCE_BATCH_SIZE}"),
    0.9,
)

#: With random numbers, which XLA draws, too.
DROPOUT = replace(MLP, overrides=(*MLP.overrides, "model.dropout=0.2"), least_accuracy=0.8)

#: The shapes by their names, and the least ratio.
SHAPES: dict[str, tuple[Shape, float]] = {
    "mlp 784-128-10": (MLP, 1.9),
    "mlp 784-128-10 with dropout": (DROPOUT, 1.5),
    "mlp 1024-1024": (WIDE, 1.3),
    "transformer 2 x 128": (TRANSFORMER, 1.1),
}


def benchmark() -> Benchmark:
    contestants: dict[str, Callable[[Path], float]] = {}
    for name, (shape, _) in SHAPES.items():
        for value in ("auto", "false"):
            words = ("strategy=one_device", "checkpoint=none", f"hardware.xla={value}")
            contestants[f"{name}, {value}"] = functools.partial(measure, shape, words)
    return Benchmark(contestants, rows)


def measure(shape: Shape, words: tuple[str, ...], folder: Path) -> float:
    return measure_transformer(words, folder) if shape is TRANSFORMER else rate(shape, folder, *words)


def measure_transformer(words: tuple[str, ...], folder: Path) -> float:
    """Returns the examples per second of the median epoch but the first."""
    data = ("dataset._target_=benchmarks.xla.Sequences", "dataset.validation=null", "model=transformer")
    epochs = f"training.epochs={TRANSFORMER.epochs}"
    events, _ = run_scaleflow([*data, *TRANSFORMER.overrides, epochs, "hardware=cpu", *words], folder)
    return rate_of(TRANSFORMER, events)


class Sequences:
    """Words [64] by their numbers, and which half of the vocabulary most of them are from."""

    splits = ("train", "test")

    def __init__(self) -> None:
        self.inputs = Inputs((WORDS,), "int32", vocabulary=VOCABULARY)
        self.outputs = Outputs("binary", (1,))

    def load(self, split: str) -> Arrays:
        random = np.random.default_rng(split == "test")
        count = SEQUENCES if split == "train" else SEQUENCES // 10
        y = random.integers(2, size=(count, 1))
        is_high = (random.random((count, WORDS)) < 0.7) == (y == 1)
        numbers = random.integers(1, VOCABULARY // 2, (count, WORDS)) + is_high * (VOCABULARY // 2)
        return Arrays(numbers.astype(np.int32), y.astype(np.float32))


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
