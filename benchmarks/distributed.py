"""Examples per second over two replicas, against Keras `fit` and the tutorials' loop, and how well two workers scale.

By hand it is `strategy.run` with one step to a call, the way every tutorial of `tf.distribute` writes it. Keras 3's
`fit` does not work under MultiWorkerMirroredStrategy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.measure import Benchmark, Results, Row, row
from benchmarks.steps import CNN, FIT, MLP, OURS, Shape, rate, said

REPLICAS = 2
BY_HAND = "by hand: strategy.run"

#: The way to two replicas on one machine.
OVERRIDES = {
    "mirrored": ("strategy=mirrored", f"hardware.logical_devices={REPLICAS}"),
    "multi_worker": ("strategy=multi_worker", f"cluster.workers={REPLICAS}"),
}

#: Each worker computes in one thread, as if it had a machine with one core.
ONE_THREAD = ("hardware.intra_op_threads=1", "hardware.inter_op_threads=1")

#: The least ratio.
ASKED = {
    "mirrored": {MLP: {FIT: 1.7, BY_HAND: 1.0}, CNN: {FIT: 1.0, BY_HAND: 1.0}},
    "multi_worker": {MLP: {BY_HAND: 1.0}, CNN: {BY_HAND: 1.0}},
}


def against_by_hand(strategy: str) -> Benchmark:
    """Rows of each model: ours under a strategy against others under the same."""
    contestants: dict[str, Callable[[Path], float]] = {}
    for shape, opponents in ASKED[strategy].items():
        contestants[f"{shape.model} {OURS}"] = functools.partial(ours, shape, (*OVERRIDES[strategy], "checkpoint=none"))
        for opponent in opponents:
            way = ("fit.py", f"--{strategy}") if opponent == FIT else ("strategy_run.py", "--strategy", strategy)
            contestants[f"{shape.model} {opponent}"] = functools.partial(by_hand, shape, way)
    return Benchmark(contestants, functools.partial(rows, strategy))


def rows(strategy: str, results: Results) -> list[Row]:
    return [
        row(
            f"{shape.model}, {strategy}({REPLICAS}), examples/s",
            f"{opponent} under MirroredStrategy" if opponent == FIT else opponent,
            results[f"{shape.model} {OURS}"],
            results[f"{shape.model} {opponent}"],
            "/s",
            at_least=least,
        )
        for shape, opponents in ASKED[strategy].items()
        for opponent, least in opponents.items()
    ]


def efficiency() -> Benchmark:
    """The CNN on two workers with a thread each, against one worker, and against two runs beside each other."""
    words = (*ONE_THREAD, "checkpoint=none")
    alone = functools.partial(ours, CNN, ("strategy=one_device", *words))
    contestants = {
        "two": functools.partial(ours, CNN, (*OVERRIDES["multi_worker"], *words)),
        "one": alone,
        "unconnected": functools.partial(measure_beside, alone),
    }
    return Benchmark(contestants, efficiency_rows)


def measure_beside(measure: Callable[[Path], float], folder: Path) -> float:
    """The sum of what as many processes as there are replicas do at a time, each in a folder of its own."""
    folders = [folder / f"beside-{number}" for number in range(REPLICAS)]
    for each in folders:
        each.mkdir(exist_ok=True)
    with ThreadPoolExecutor(REPLICAS) as threads:
        return sum(threads.map(measure, folders))


def efficiency_rows(results: Results) -> list[Row]:
    ideal = [REPLICAS * rate for rate in results["one"]]
    work, two = f"cnn, multi_worker({REPLICAS}), a thread each", results["two"]
    return [
        row(work, f"{REPLICAS} x one worker", two, ideal, "/s", at_least=0.9),
        row(work, f"{REPLICAS} unconnected runs", two, results["unconnected"], "/s", at_least=0.95),
    ]


def ours(shape: Shape, overrides: tuple[str, ...], folder: Path) -> float:
    return rate(shape, folder, "hardware=cpu", *overrides)


def by_hand(shape: Shape, way: tuple[str, ...], folder: Path) -> float:
    return said(shape, folder, *way)
