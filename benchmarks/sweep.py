"""Wall time of a sweep of eight short digits jobs, against eight scripts by hand, one after the other."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

from benchmarks.measure import Row, WrongResultError, alternate, median, ratios, run, run_by_hand, temporary_folder

JOBS = 8


def measure(rounds: int) -> list[Row]:
    """One row; both record in the same SQLite store, which exists already."""
    with temporary_folder() as folder:
        contestants = {"scaleflow": functools.partial(ours, folder), "by hand": functools.partial(by_hand, folder)}
        run_by_hand("digits_job.py", [], folder)  # makes the store
        seconds = alternate(contestants, rounds)
    row = Row(
        work=f"a sweep of {JOBS} short digits jobs, wall time",
        against=f"{JOBS} scripts by hand, one after the other",
        ratios=ratios(seconds["scaleflow"], seconds["by hand"]),
        held_to="<= 0.3",
        ours=median(seconds["scaleflow"], "s"),
        theirs=median(seconds["by hand"], "s"),
    )
    return [row]


def ours(folder: Path) -> float:
    sweep = folder / "sweep"
    shutil.rmtree(sweep, ignore_errors=True)
    seeds = ",".join(map(str, range(JOBS)))
    words = ["-m", "scaleflow", "-m", f"seed={seeds}", f"hydra.sweep.dir={sweep}"]
    _, seconds = run([*words, "hydra.launcher.n_jobs=2"], folder)
    jobs = json.loads((sweep / "sweep.json").read_text())["jobs"]
    if [job["status"] for job in jobs] != ["FINISHED"] * JOBS:
        raise WrongResultError(f"not all jobs finished: {jobs}")
    return seconds


def by_hand(folder: Path) -> float:
    total = 0.0
    for _ in range(JOBS):
        shutil.rmtree(folder / "saved_model", ignore_errors=True)
        _, seconds = run_by_hand("digits_job.py", [], folder)
        total += seconds
    return total
