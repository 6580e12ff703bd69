"""Memory and time of a step of a 12-block transformer with `hardware.remat=true`, against the same without.

The memory is the peak of the process's resident memory in the first epoch above that before it, which `step_memory.py`
measures: TensorFlow has no such count for a CPU. A text has 128 words of which all count.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.measure import Benchmark, Results, Row, WrongResultError, metric, row, run_scaleflow
from benchmarks.steps import ends_of
from scaleflow.interfaces import Arrays, Inputs, Outputs

TOKENS, VOCABULARY = 128, 1000
BATCH_SIZE, STEPS, EPOCHS = 32, 2, 4

#: By how much the losses of the epochs with and without may differ.
TOLERANCE = 1e-5

SHAPE = (
    *("model=transformer", "model.blocks=12", "model.width=128", "model.units=512", "model.dropout=0.1"),
    *("dataset._target_=benchmarks.remat.Texts", "dataset.validation=null", f"training.batch_size={BATCH_SIZE}"),
    *(f"training.epochs={EPOCHS}", "strategy=one_device", "hardware=cpu", "checkpoint=none", "hardware.xla=false"),
    "training.callbacks=[{_target_: benchmarks.step_memory.StepMemory}]",
)


def benchmark() -> Benchmark:
    """Two rows: memory and time."""
    seconds: dict[str, list[float]] = defaultdict(list)
    losses: list[list[float]] = []

    def measure(remat: str, folder: Path) -> float:
        events, _ = run_scaleflow([*SHAPE, f"hardware.remat={remat}"], folder)
        losses.append(metric(events, "train/loss"))
        if not np.allclose(losses[0], losses[-1], rtol=0, atol=TOLERANCE):
            raise WrongResultError(f"remat={remat}: the losses are {losses[-1]}, and those of another run {losses[0]}")
        between = [end - begin for begin, end in itertools.pairwise(ends_of(events))]
        seconds[remat].append(statistics.median(between) / STEPS)
        return metric(events, "train/step_mb")[0]

    def rows(results: Results) -> list[Row]:
        work, without = "a step of a 12-block transformer with remat", "without"
        return [
            row(f"{work}, MiB", without, results["true"], results["false"], "MiB", at_most=0.6),
            row(f"{work}, s", without, seconds["true"], seconds["false"], "s", at_most=1.45),
        ]

    return Benchmark({remat: functools.partial(measure, remat) for remat in ("true", "false")}, rows)


class Texts:
    """Random words, and whether the first is in the lower half of the vocabulary."""

    inputs = Inputs((TOKENS,), "int32", vocabulary=VOCABULARY)
    outputs = Outputs("binary", (1,))
    splits = ("train", "test")

    def load(self, split: str) -> Arrays:
        count = BATCH_SIZE * (STEPS if split == "train" else 1)
        words = np.random.default_rng(split == "test").integers(1, VOCABULARY, (count, TOKENS), np.int32)
        return Arrays(words, (words[:, :1] < VOCABULARY // 2).astype(np.float32))
