"""Examples per second over two replicas, against the tutorials' loop, and how well two workers scale.

By hand it is `strategy.run` with one step to a call, the way every tutorial of `tf.distribute` writes it.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
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
from benchmarks.steps import BATCH_SIZE, CNN, MLP, Shape

REPLICAS = 2

#: The way to two replicas on one machine.
OVERRIDES = {
    "mirrored": ("strategy=mirrored", f"hardware.logical_devices={REPLICAS}"),
    "multi_worker": ("strategy=multi_worker", f"cluster.workers={REPLICAS}"),
}

#: Each worker computes in one thread, as if it had a machine with one core.
ONE_THREAD = ("hardware.intra_op_threads=1", "hardware.inter_op_threads=1")


def against_by_hand(strategy: str, rounds: int) -> list[Row]:
    """A row to each model: ours under a strategy against the loop by hand under the same."""
    return [one_row(shape, strategy, rounds) for shape in (MLP, CNN)]


def one_row(shape: Shape, strategy: str, rounds: int) -> Row:
    with temporary_folder() as folder:
        rates = alternate(
            {
                "scaleflow": functools.partial(ours, shape, folder, OVERRIDES[strategy]),
                "by hand": functools.partial(by_hand, shape, folder, strategy),
            },
            rounds,
        )
    return Row(
        work=f"{shape.model}, {strategy}({REPLICAS}), examples/s",
        against="by hand: strategy.run",
        ratios=ratios(rates["scaleflow"], rates["by hand"]),
        held_to=">= 1",
        ours=median(rates["scaleflow"], "/s"),
        theirs=median(rates["by hand"], "/s"),
    )


def efficiency(rounds: int) -> list[Row]:
    """The CNN on two workers with a thread each, against twice what one worker with one thread does."""
    with temporary_folder() as folder:
        contestants: dict[str, Callable[[], float]] = {
            "two": functools.partial(ours, CNN, folder, (*OVERRIDES["multi_worker"], *ONE_THREAD)),
            "one": functools.partial(ours, CNN, folder, ("strategy=one_device", *ONE_THREAD)),
        }
        rates = alternate(contestants, rounds)
    ideal = [REPLICAS * rate for rate in rates["one"]]
    return [
        Row(
            work=f"cnn, multi_worker({REPLICAS}), a thread each",
            against=f"{REPLICAS} x one worker",
            ratios=ratios(rates["two"], ideal),
            held_to=">= 0.9",
            ours=median(rates["two"], "/s"),
            theirs=median(ideal, "/s"),
        )
    ]


def ours(shape: Shape, folder: Path, overrides: Sequence[str]) -> float:
    words = [
        "hardware=cpu",
        "dataset=synthetic",
        f"dataset.examples={shape.examples * 5 // 4}",  # a fifth of them is the test split
        "dataset.validation=null",
        f"model={shape.model}",
        f"training.batch_size={BATCH_SIZE}",
        f"training.epochs={shape.epochs}",
        *shape.overrides,
        *overrides,
    ]
    events, _ = run_scaleflow(words, folder)
    expect_accuracy("scaleflow", metric(events, "train/accuracy")[-1], shape.least_accuracy)
    return statistics.median(metric(events, "perf/examples_per_second")[1:])


def by_hand(shape: Shape, folder: Path, strategy: str) -> float:
    words = ["--strategy", strategy, "--examples", str(shape.examples), "--epochs", str(shape.epochs)]
    said, _ = run_by_hand("strategy_run.py", [shape.model, *words, "--batch-size", str(BATCH_SIZE)], folder)
    expect_accuracy("by hand", said["accuracy"], shape.least_accuracy)
    return float(said["examples_per_second"])
