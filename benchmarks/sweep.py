"""Wall time of a sweep of eight short digits jobs, against eight scripts by hand, one after the other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks import whole_job
from benchmarks.measure import Benchmark, Results, Row, WrongResultError, row, run

JOBS = 8


def benchmark() -> Benchmark:
    """One row; both record in the same SQLite store, which exists already."""
    return Benchmark({"scaleflow": ours, "by hand": by_hand}, rows, prepare=whole_job.by_hand)


def rows(results: Results) -> list[Row]:
    against = f"{JOBS} scripts by hand, one after the other"
    work = f"a sweep of {JOBS} short digits jobs, wall time"
    return [row(work, against, results["scaleflow"], results["by hand"], "s", at_most=0.3)]


def ours(folder: Path, at_a_time: int = 2) -> float:
    sweep = folder / "sweep"
    shutil.rmtree(sweep, ignore_errors=True)
    seeds = ",".join(map(str, range(JOBS)))
    words = ["-m", "scaleflow", "-m", f"seed={seeds}", f"hydra.sweep.dir={sweep}"]
    _, seconds = run([*words, f"hydra.launcher.n_jobs={at_a_time}"], folder)
    jobs = json.loads((sweep / "sweep.json").read_text())["jobs"]
    if [job["status"] for job in jobs] != ["FINISHED"] * JOBS:
        raise WrongResultError(f"not all jobs finished: {jobs}")
    return seconds


def by_hand(folder: Path) -> float:
    return sum(whole_job.by_hand(folder) for _ in range(JOBS))
