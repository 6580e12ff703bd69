"""Whether the jobs of a sweep share one GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.gpu.bench import Bench, Run, expect, expect_on
from benchmarks.gpu.models import MODELS, WITHOUT_TF32, find_difference, list_losses, train_on_cpu

#: The largest difference of a job's losses from those of the CPU, relative to losses above 1, without TF32.
DIFFERENCE = 1e-3

TOLERANCE = f"{DIFFERENCE:g} (TF32 off)"


def sweep(bench: Bench, words: Sequence[str], jobs: int) -> list[Run]:
    """Runs a sweep and returns its jobs, which must have finished on the device."""
    folder = bench.folder / "sweep"
    ended = bench.run(["-m", "scaleflow", "-m", *words, f"hydra.sweep.dir={folder}"], extra=WITHOUT_TF32)
    ledger: list[dict[str, Any]] = json.loads((folder / "sweep.json").read_text())["jobs"]
    statuses = [job["status"] for job in ledger]
    expect(statuses == ["FINISHED"] * jobs, f"the jobs ended as {statuses}")
    runs = [Run(folder / str(number), ended) for number in range(jobs)]
    for run in runs:
        expect_on(run, bench.device)
    bench.values["seconds of the command"] = ended.seconds
    return runs


def pack(bench: Bench, hardware: Sequence[str], jobs: int, at_once: int) -> None:
    """Runs jobs with the same config but for the width, `at_once` at a time; the first one is compared with the CPU."""
    model = MODELS["digits"]
    reference = train_on_cpu(bench, "digits")
    units = ",".join(["[128,128]", *(f"[{16 * number}]" for number in range(1, jobs))])
    plain = ("strategy=one_device", "checkpoint=none", "training.steps_per_loop=10")
    words = [*model.words, *plain, f"training.max_steps={model.steps}", f"model.units={units}", *hardware]
    runs = sweep(bench, [*words, f"hydra.launcher.n_jobs={at_once}"], jobs)
    difference = find_difference(list_losses(runs[0]), reference)
    bench.values |= {"jobs": jobs, "at a time": at_once, "difference": difference}
    expect(difference <= DIFFERENCE, f"losses of a job differ by {difference:.3g}, allowed is {DIFFERENCE:g}")


@pytest.mark.gpu(seconds=150, tolerance=TOLERANCE)
def test_sweep_shared(bench: Bench) -> None:
    """Two jobs at a time share a GPU with the default `hardware`: they take its memory as they need it."""
    pack(bench, ["hardware=cpu"] if bench.device.kind == "cpu" else ["hardware=auto"], jobs=4, at_once=2)


@pytest.mark.gpu(seconds=150, tolerance=TOLERANCE)
def test_sweep_limited(bench: Bench) -> None:
    """Three jobs at a time with a memory limit each."""
    pack(bench, bench.device.words(limit_mb=bench.device.limit_mb), jobs=3, at_once=3)


@pytest.mark.gpu(seconds=120, tolerance="all jobs finish")
def test_sweep_precisions(bench: Bench) -> None:
    """The recipe `mixed_vs_float32`: the report has the speed and the peak memory of both."""
    size = ["dataset.examples=2500", "dataset.shape=[16,16,3]"]
    sweep(bench, ["experiment=mixed_vs_float32", *size, "strategy=one_device", *bench.device.words()], 2)
    text = (bench.folder / "sweep" / "report.json").read_text()
    columns = json.loads(text)["columns"]
    wanted = {"examples/s", "device MB"} if bench.device.kind == "gpu" else {"examples/s"}
    expect(wanted <= set(columns), f"the report's columns are {columns}")
