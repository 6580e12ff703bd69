"""How much micro-batches, and a second replica, make of two stages: examples per second against one micro-batch.

Two stages of three wide dense layers each, on two logical devices of one CPU. An operation has one
thread, so that a device is a core: else a single stage would have all cores, which no device lends
to another. With one micro-batch only one stage works at a time; what is measured is what
overlapping them adds. Two replicas, on four logical devices, work at the same time as well. Their global batch is the
same, so each step also copies the weights and sums the gradients.
"""

from __future__ import annotations

import functools
import statistics
from pathlib import Path

from benchmarks.measure import Benchmark, Results, Row, WrongResultError, metric, row, run_scaleflow

MICRO_BATCHES = (1, 2, 4, 8)
REPLICAS = "2 replicas"

WIDTH = 1024
BATCH_SIZE = 2048
STEPS = 4
#: Epochs; the first one compiles and is not measured.
EPOCHS = 4

STACK = (
    *("strategy=pipeline", "hardware=cpu", "hardware.intra_op_threads=1"),
    *("dataset=synthetic", f"dataset.shape=[{WIDTH}]", "dataset.validation=null"),
    f"dataset.examples={STEPS * BATCH_SIZE * 5 // 4}",  # a fifth of them is the test split
    f"model.units={[WIDTH] * 6}".replace(" ", ""),
    *(f"training.global_batch_size={BATCH_SIZE}", f"training.epochs={EPOCHS}", f"training.steps_per_loop={STEPS}"),
)


def benchmark() -> Benchmark:
    """Two rows: the best number of micro-batches against one, and two replicas of one micro-batch against one."""
    works = {str(n): functools.partial(examples_per_second, n, 1) for n in MICRO_BATCHES}
    return Benchmark({**works, REPLICAS: functools.partial(examples_per_second, 1, 2)}, rows)


def rows(results: Results) -> list[Row]:
    one, *more = map(str, MICRO_BATCHES)
    best = max(more, key=lambda count: statistics.median(results[count]))
    work = f"pipeline(2), {best} micro-batches, examples/s"
    return [
        row(work, "1 micro-batch", results[best], results[one], "/s", at_least=1.3),
        row(f"pipeline(2), {REPLICAS}, examples/s", "1 replica", results[REPLICAS], results[one], "/s", at_least=1.3),
    ]


def examples_per_second(micro_batches: int, replicas: int, folder: Path) -> float:
    division = [f"strategy.micro_batches={micro_batches}", f"strategy.replicas={replicas}"]
    events, _ = run_scaleflow([*STACK, *division, f"hardware.logical_devices={2 * replicas}"], folder)
    losses = metric(events, "train/loss")
    if not losses[-1] < losses[0]:
        raise WrongResultError(
            f"{micro_batches} micro-batches, {replicas} replicas: the loss went from {losses[0]} to {losses[-1]}"
        )
    return statistics.median(metric(events, "perf/examples_per_second")[1:])
