"""What the benchmarks share: runs in processes of their own, alternating rounds, ratios of pairs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BY_HAND = ROOT / "benchmarks" / "by_hand"

#: These would send a run elsewhere than into the benchmark's folder, or make it something else.
NOT_INHERITED = ("MLFLOW_", "TF_CONFIG", "HYDRA_")


class WrongResultError(Exception):
    """What was measured did not do the work, so its time means nothing."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        work: what was done.
        against: by whom else.
        ratios: ours to theirs, one to each round.
        held_to: what the median is held to, as printed.
        ours, theirs: medians, as printed, to see what the ratio is made of.
    """

    work: str
    against: str
    ratios: Sequence[float]
    held_to: str
    ours: str
    theirs: str


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="scaleflow-benchmark-") as folder:
        yield Path(folder)


def alternate(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measures each contestant once a round, in turned order every other round.

    What the machine does beside it then falls on all of them alike.
    """
    results: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(rounds):
        names = list(contestants) if index % 2 == 0 else list(reversed(contestants))
        for name in names:
            results[name].append(contestants[name]())
        told = ", ".join(f"{name} {results[name][-1]:,.4g}" for name in contestants)
        print(f"  round {index + 1}/{rounds}: {told}", file=sys.stderr, flush=True)
    return results


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def median(values: Sequence[float], unit: str) -> str:
    return (
        f"{statistics.median(values):,.4g} {unit}" if max(values) < 1000 else f"{statistics.median(values):,.0f} {unit}"
    )


def run(command: Sequence[str | Path], folder: Path) -> tuple[str, float]:
    """Runs a Python program with its output kept, the store in `folder`.

    Returns:
        (standard output, seconds of wall time from its start to its exit).

    Raises:
        WrongResultError: if it exits with anything but 0.
    """
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise WrongResultError(f"{command} in {folder} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout, seconds


def environment(folder: Path) -> dict[str, str]:
    """The same for all: this checkout importable, an SQLite store in `folder`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(NOT_INHERITED)}
    return kept | {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}"}


def run_by_hand(script: str, arguments: Sequence[str], folder: Path) -> tuple[dict[str, Any], float]:
    """Runs a script of `by_hand/`; gives the JSON of its last line, and its wall time."""
    output, seconds = run([BY_HAND / script, *arguments], folder)
    return json.loads(output.strip().splitlines()[-1]), seconds


def run_scaleflow(overrides: Sequence[str], folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Runs `python -m scaleflow`; gives its events, and its wall time.

    Raises:
        WrongResultError: if the run did not finish, in its events or in the store.
    """
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    _, seconds = run(["-m", "scaleflow", *overrides, f"hydra.run.dir={output}"], folder)
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    if events[-1].get("status") != "FINISHED":
        raise WrongResultError(f"the run did not finish: {events[-1]}")
    check_store(folder)
    return events, seconds


def check_store(folder: Path) -> None:
    """The newest run in the store must be finished, with metrics."""
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as store:
        newest = store.execute("SELECT run_uuid, status FROM runs ORDER BY start_time DESC LIMIT 1").fetchone()
        if newest is None or newest[1] != "FINISHED":
            raise WrongResultError(f"the store's newest run is {newest}, expected a finished one")
        (points,) = store.execute("SELECT count(*) FROM metrics WHERE run_uuid = ?", newest[:1]).fetchone()
    if not points:
        raise WrongResultError(f"the store has no metrics of run {newest[0]}")


def metric(events: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """All values of one metric, in order."""
    return [event["values"][name] for event in events if event["event"] == "metrics" and name in event["values"]]


def expect_accuracy(who: str, accuracy: float, least: float) -> None:
    """Raises `WrongResultError` for a model that has not learned."""
    if not least <= accuracy <= 1:
        raise WrongResultError(f"{who}: accuracy {accuracy}, expected {least} to 1")


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    cells = [("work", "ours", "against", "theirs", "ratio", "min..max", "held to")]
    for row in rows:
        spread = f"{min(row.ratios):.2f}..{max(row.ratios):.2f}"
        ratio = f"{statistics.median(row.ratios):.2f}"
        cells.append((row.work, row.ours, row.against, row.theirs, ratio, spread, row.held_to))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "-|-".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
