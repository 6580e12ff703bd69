"""Many points: how long recording takes that nobody waits for, and that its memory does not grow with the run.

A run's folder is written as a worker would have, and sent to a new SQLite store by a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import sqlite3
import sys
from pathlib import Path

from benchmarks.measure import Benchmark, Results, Row, WrongResultError, row, run, say

#: The values of a call of the loop.
KEYS = ("train/loss", "train/accuracy", "perf/step_ms", "perf/examples_per_second")

MANY, FEW = 100_000, 10_000


def benchmark() -> Benchmark:
    """One row: peak memory with many points to that with a tenth of them."""
    return Benchmark({f"{n:,} points": functools.partial(peak, n) for n in (MANY, FEW)}, rows)


def rows(results: Results) -> list[Row]:
    many, few = results.values()
    return [row(f"{MANY:,} points to SQLite, MB", f"{FEW:,} points", many, few, "MB", at_most=1.05)]


def peak(points: int, folder: Path) -> float:
    """The recording process's largest resident memory in MB of 10^6 bytes; prints how long it took."""
    made = folder / f"points-{points}"
    made.mkdir(exist_ok=True)
    store = made / "mlflow.db"
    for old in made.glob("*"):
        old.unlink()
    write(made, points, f"sqlite:///{store}")
    output, seconds = run(["-m", "benchmarks.points", made], folder)
    check(store, points)
    say(f"    {points:,} points in {seconds:.1f} s")
    return float(output.split()[-1])


def write(folder: Path, points: int, uri: str) -> None:
    """A run's events: a call to each line."""
    (folder / "config.yaml").write_text(f"tracking: {{name: mlflow, uri: '{uri}'}}\n")
    ready = {"name": "many", "tags": {}, "params": {}, "began": 1}
    with (folder / "events.jsonl").open("w") as file:
        print(json.dumps({"event": "ready", "time": 1, **ready}), file=file)
        for step in range(1, points // len(KEYS) + 1):
            values = dict.fromkeys(KEYS, step / 7)
            print(json.dumps({"event": "metrics", "time": step, "step": step, "values": values}), file=file)
        print(json.dumps({"event": "end", "time": points, "status": "FINISHED"}), file=file)


def check(store: Path, points: int) -> None:
    with contextlib.closing(sqlite3.connect(store)) as opened:
        (there,) = opened.execute("SELECT count(*) FROM metrics").fetchone()
        (steps,) = opened.execute("SELECT count(DISTINCT step) FROM metrics WHERE key = 'train/loss'").fetchone()
    if (there, steps) != (points, points // len(KEYS)):
        raise WrongResultError(f"the store has {there} points at {steps} steps, expected {points}")


if __name__ == "__main__":
    from scaleflow.launcher.recording.recovery import repair

    if (standing := repair(Path(sys.argv[1]))).result != "recorded":
        sys.exit(f"{standing}")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6)
