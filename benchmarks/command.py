"""Wall time of `python -m scaleflow --cfg job`, process start to exit, against that of a Hydra app of eight lines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.measure import BY_HAND, Benchmark, Results, Row, WrongResultError, row, run

#: A start takes a third of a second, so that one of them tells little: the median of these is a round's.
STARTS = 7


def benchmark() -> Benchmark:
    """One row; each has been started once before, so that there is byte code."""
    return Benchmark({"scaleflow": ours, "bare": bare}, rows, prepare=lambda folder: (ours(folder), bare(folder)))


def rows(results: Results) -> list[Row]:
    return [row("--cfg job, wall time", "a bare Hydra app's", results["scaleflow"], results["bare"], "s", at_most=1.5)]


def ours(folder: Path) -> float:
    return seconds(["-m", "scaleflow"], "strategy", folder)


def bare(folder: Path) -> float:
    return seconds([BY_HAND / "hydra_app.py"], "optimizer", folder)


def seconds(command: Sequence[str | Path], key: str, folder: Path) -> float:
    """Of the median start; the config has to have been shown."""
    found = []
    for _ in range(STARTS):
        output, took = run([*command, "--cfg", "job"], folder)
        if key not in yaml.safe_load(output):
            raise WrongResultError(f"{command}: its config has no {key}: {output}")
        found.append(took)
    return statistics.median(found)
