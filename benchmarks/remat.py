"""Memory and time of a step of a 12-block transformer with `hardware.remat=true`, against the same without.

The memory is the peak of the process's resident memory in the first epoch above that before it, which `step_memory.py`
measures: TensorFlow has no such count for a CPU. A text has 128 words of which all count.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Benchmark, Results, Row, WrongResultError, metric, row, run_scaleflow
from benchmarks.steps import ends_of
from scaleflow.interfaces import Arrays, Inputs, Outputs

TOKENS, VOCABULARY = 128, 1000
BATCH_SIZE, STEPS, EPOCHS = 32, 2, 4

#: By how much the losses of the first epoch with and without may differ.
TOLERANCE = 1e-5

SHAPE = (
    *("model=transformer", "model.blocks=12", "model.width=128", "model.units=512", "model.dropout=0.1"),
    *("dataset._target_=benchmarks.remat.Texts", "dataset.validation=null", f"training.batch_size={BATCH_SIZE}"),
    *("strategy=one_device", "hardware=cpu", "checkpoint=none", "hardware.xla=false"),
    "training.callbacks=[{_target_: benchmarks.step_memory.StepMemory}]",
)


def benchmark() -> Benchmark:
    """Two rows: memory and time."""
    contestants: dict[str, Callable[[Path], float]] = {
        f"{remat}, {unit}": functools.partial(measure, remat)
        for unit, measure in (("MiB", measure_memory), ("s", measure_time))
        for remat in ("true", "false")
    }
    return Benchmark(contestants, rows)


def rows(results: Results) -> list[Row]:
    return [
        row(
            f"a step of a 12-block transformer with remat, {unit}",
            "without",
            results[f"true, {unit}"],
            results[f"false, {unit}"],
            unit,
            at_most=most,
        )
        for unit, most in (("MiB", 0.6), ("s", 1.45))
    ]


def measure_memory(remat: str, folder: Path) -> float:
    return metric(train(remat, 1, folder), "train/step_mb")[0]


def measure_time(remat: str, folder: Path) -> float:
    """The seconds of a step in the median epoch but the first."""
    ends = ends_of(train(remat, EPOCHS, folder))
    return statistics.median(end - begin for begin, end in itertools.pairwise(ends)) / STEPS


def train(remat: str, epochs: int, folder: Path) -> list[dict[str, Any]]:
    """Returns the events of a run, whose first loss must be that of the run before."""
    events, _ = run_scaleflow([*SHAPE, f"hardware.remat={remat}", f"training.epochs={epochs}"], folder)
    loss, saved = metric(events, "train/loss")[0], folder / "loss"
    before = float(saved.read_text()) if saved.exists() else loss
    saved.write_text(repr(loss))
    if not abs(loss - before) < TOLERANCE:
        raise WrongResultError(f"remat={remat}: the first loss is {loss}, and that of the run before {before}")
    return events


class Texts:
    """Random words, and whether the first is in the lower half of the vocabulary."""

    inputs = Inputs((TOKENS,), "int32", vocabulary=VOCABULARY)
    outputs = Outputs("binary", (1,))
    splits = ("train", "test")

    def load(self, split: str) -> Arrays:
        count = BATCH_SIZE * (STEPS if split == "train" else 1)
        words = np.random.default_rng(split == "test").integers(1, VOCABULARY, (count, TOKENS), np.int32)
        return Arrays(words, (words[:, :1] < VOCABULARY // 2).astype(np.float32))
