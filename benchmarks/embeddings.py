"""Examples per second with an embedding table of a million rows, against the same with ten thousand.

An example is eight row numbers, drawn uniformly; a batch of 32 so has the same number of rows in either table. The
target tells whether the first is in the lower half of the table. A step that touches only the rows of its batch costs
about the same for both; one that touches all of them costs a hundred times as much.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Benchmark, Results, Row, WrongResultError, metric, row, run_scaleflow
from benchmarks.steps import ends_of
from scaleflow.interfaces import Arrays, Inputs, Outputs

ROWS, FEW_ROWS, WIDTH = 1_000_000, 10_000, 32
IDS, BATCH_SIZE, EPOCHS = 8, 32, 4

#: Steps of an epoch: a second or two.
STEPS = {"one_device": 2000, "parameter_server": 400}

STRATEGIES = {
    "one_device": ("strategy=one_device",),
    "parameter_server": ("strategy=parameter_server", "cluster.workers=1", "strategy.partitioner.max_shards=2"),
}

OPTIMIZERS = {
    "SGD": ("optimizer=sgd", "optimizer.momentum=0.0"),
    "Adagrad": ("optimizer=adagrad",),
    "lazy Adam": ("optimizer=lazy_adam",),
}


def benchmark() -> Benchmark:
    """A row for each strategy and optimizer."""
    cases = list(itertools.product(STRATEGIES, OPTIMIZERS))
    contestants: dict[str, Callable[[Path], float]] = {
        name(*case, rows): functools.partial(rate, *case, rows) for case in cases for rows in (ROWS, FEW_ROWS)
    }
    return Benchmark(contestants, rows_of)


def name(strategy: str, optimizer: str, rows: int) -> str:
    return f"{strategy} {optimizer} {rows:,} rows"


def rows_of(results: Results) -> list[Row]:
    return [
        row(
            f"{strategy}, {optimizer}, {ROWS:,} rows, examples/s",
            f"{FEW_ROWS:,} rows",
            results[name(strategy, optimizer, ROWS)],
            results[name(strategy, optimizer, FEW_ROWS)],
            "/s",
            at_least=0.7,
        )
        for strategy, optimizer in itertools.product(STRATEGIES, OPTIMIZERS)
    ]


def rate(strategy: str, optimizer: str, rows: int, folder: Path) -> float:
    """Examples per second of the median epoch but the first."""
    examples = STEPS[strategy] * BATCH_SIZE
    words = [
        *("dataset._target_=benchmarks.embeddings.Ids", f"+dataset.rows={rows}", f"+dataset.examples={examples}"),
        *("dataset.validation=null", "model=text", f"model.embedding={WIDTH}", "hardware=cpu", "checkpoint=none"),
        *(f"training.batch_size={BATCH_SIZE}", f"training.epochs={EPOCHS}", "optimizer.learning_rate=0.1"),
        *(*STRATEGIES[strategy], *OPTIMIZERS[optimizer]),
    ]
    events, _ = run_scaleflow(words, folder)
    losses = metric(events, "train/loss")
    if not losses or not losses[-1] < math.log(2) + 0.01:
        raise WrongResultError(f"{strategy} {optimizer}: the loss is {losses[-1:]}")
    return examples / statistics.median(b - a for a, b in itertools.pairwise(ends_of(events)))


class Ids:
    """Row numbers of a table, and whether the first is in its lower half.

    Args:
        rows: of the table.
        examples: of the training split; the test split has a tenth as many.
    """

    splits = ("train", "test")

    def __init__(self, rows: int, examples: int) -> None:
        self.inputs = Inputs((IDS,), "int32", vocabulary=rows)
        self.outputs = Outputs("binary", (1,))
        self._rows = rows
        self._examples = examples

    def load(self, split: str) -> Arrays:
        random = np.random.default_rng(split == "test")
        count = self._examples // (10 if split == "test" else 1)
        ids: np.ndarray[Any, Any] = random.integers(1, self._rows, (count, IDS), np.int32)
        return Arrays(ids, (ids[:, :1] < self._rows // 2).astype(np.float32))
