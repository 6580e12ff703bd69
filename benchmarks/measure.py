"""What the benchmarks share: runs in processes of their own, alternating rounds, ratios of pairs, one table."""

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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaleflow.interfaces.events import RunEnded
from scaleflow.launcher.processes.handover import WARM_ENV
from scaleflow.runs.event_log import read_last_event

ROOT = Path(__file__).parent.parent
BY_HAND = ROOT / "benchmarks" / "by_hand"

#: These would send a run elsewhere than into the benchmark's folder, or make it something else. Without byte code every
#: start compiles what it imports: nobody's does.
NOT_INHERITED = ("MLFLOW_", "TF_CONFIG", "HYDRA_", "PYTHONDONTWRITEBYTECODE")

#: What was measured of each contestant, round by round.
Results = Mapping[str, Sequence[float]]


class WrongResultError(Exception):
    """What was measured did not do the work, so its time means nothing."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        work: what was done.
        against: by whom else.
        ratios: ours to theirs, one to each round.
        ours, theirs: medians, as printed, to see what the ratio is made of.
        at_least, at_most: what is asked of the median ratio, at most one of them.
    """

    work: str
    against: str
    ratios: Sequence[float]
    ours: str
    theirs: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def asked(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"

    @property
    def verdict(self) -> str:
        """`met`, or `below` what is asked; empty where nothing is."""
        if self.at_least is not None:
            return "met" if self.ratio >= self.at_least else "below"
        return "" if self.at_most is None else "met" if self.ratio <= self.at_most else "below"


@dataclass(frozen=True)
class Benchmark:
    """Contestants for the same work.

    Attributes:
        contestants: each measures once, in a folder that is the benchmark's own and stays through all rounds.
        rows: what comes of the results.
        prepare: done once, before the first round.
    """

    contestants: Mapping[str, Callable[[Path], float]]
    rows: Callable[[Results], list[Row]]
    prepare: Callable[[Path], object] | None = None


def row(
    work: str, against: str, ours: Sequence[float], theirs: Sequence[float], unit: str, **asked: float | None
) -> Row:
    """A row of ours to theirs, round by round."""
    return Row(work, against, ratios(ours, theirs), median(ours, unit), median(theirs, unit), **asked)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def median(values: Sequence[float], unit: str) -> str:
    return (
        f"{statistics.median(values):,.4g} {unit}" if max(values) < 1000 else f"{statistics.median(values):,.0f} {unit}"
    )


# ---------------------------------------------------------------------------------------------
# Rounds
# ---------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """A benchmark and what it has come to.

    Attributes:
        results: of each contestant, as many as there were rounds.
        seconds: that the last round took.
        wrong: why it is worth nothing; empty where nothing is wrong.
    """

    name: str
    benchmark: Benchmark
    folder: Path
    results: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    wrong: str = ""

    @property
    def rows(self) -> list[Row]:
        return self.benchmark.rows(self.results) if self.results and not self.wrong else []

    def take_round(self, number: int) -> None:
        """Measures each contestant once, in turned order every other round."""
        begin = time.monotonic()
        names = list(self.benchmark.contestants)
        found: dict[str, float] = {}
        try:
            if number == 1 and self.benchmark.prepare is not None:
                self.benchmark.prepare(self.folder)
            for name in names if number % 2 else reversed(names):
                found[name] = self.benchmark.contestants[name](self.folder)
        except WrongResultError as wrong:
            self.wrong = str(wrong)
        except Exception:  # of one benchmark; what the others have measured is not lost
            self.wrong = traceback.format_exc()
        if self.wrong:
            say(f"  {self.name}: WRONG RESULT: {self.wrong}")
            return
        for name in names:
            self.results.setdefault(name, []).append(found[name])
        self.seconds = time.monotonic() - begin
        say(
            f"  {self.name}: " + ", ".join(f"{name} {found[name]:,.4g}" for name in names) + f"  ({self.seconds:.0f} s)"
        )


def take_rounds(benchmarks: Mapping[str, Benchmark], rounds: int, seconds: float) -> list[Measured]:
    """All benchmarks once, then all once more, so that what lasts for minutes falls on all rounds of none.

    Args:
        benchmarks: by name.
        rounds: how many at most, and one at least.
        seconds: after the first round none begins of which the last one says that it would end later than this.
    """
    begin = time.monotonic()
    with contextlib.ExitStack() as open_folders:
        all_of_them = [
            Measured(name, benchmark, open_folders.enter_context(temporary_folder()))
            for name, benchmark in benchmarks.items()
        ]
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}, after {(time.monotonic() - begin) / 60:.0f} min:")
            for each in all_of_them:
                has_time = time.monotonic() - begin + each.seconds <= seconds
                if not each.wrong and (number == 1 or (has_time and len_of(each) == number - 1)):
                    each.take_round(number)
    return all_of_them


def len_of(measured: Measured) -> int:
    """How many rounds it has had."""
    return max(map(len, measured.results.values()), default=0)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="scaleflow-benchmark-") as folder:
        yield Path(folder)


# ---------------------------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------------------------


def run(
    command: Sequence[str | Path], folder: Path, python: Path | None = None, *, is_warm: bool = False
) -> tuple[str, float]:
    """Runs a Python program with its output kept, the store in `folder`.

    Args:
        command: the arguments of the interpreter.
        folder: where it runs.
        python: the interpreter of another environment, which cannot import this checkout; None: this one.
        is_warm: whether scaleflow uses a warm server, whose socket is in `folder`; it ends when that is removed.

    Returns:
        (standard output, seconds of wall time from its start to its exit).

    Raises:
        WrongResultError: if it exits with anything but 0.
    """
    variables = environment(folder) | {WARM_ENV: str(int(is_warm)), "XDG_RUNTIME_DIR": str(folder)}
    if python is not None:
        del variables["PYTHONPATH"]  # its Hydra would load scaleflow's plugins
    begin = time.perf_counter()
    done = subprocess.run(
        [python or sys.executable, *map(str, command)],
        cwd=folder,
        env=variables,
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


def run_by_hand(
    script: str | Path, arguments: Sequence[str], folder: Path, python: Path | None = None
) -> tuple[dict[str, Any], float]:
    """Runs a script of `by_hand/`, or of an absolute path; gives the JSON of its last line, and its wall time."""
    output, seconds = run([BY_HAND / script, *arguments], folder, python)
    return json.loads(output.strip().splitlines()[-1]), seconds


def run_scaleflow(
    overrides: Sequence[str], folder: Path, name: str = "run", is_recorded: bool = True, *, is_warm: bool = False
) -> tuple[list[dict[str, Any]], float]:
    """Runs `python -m scaleflow` into `folder/name`; gives its events, and its wall time.

    Raises:
        WrongResultError: if the run did not finish, in its events or, where it is recorded there, in the store.
    """
    output = folder / name
    shutil.rmtree(output, ignore_errors=True)
    _, seconds = run(["-m", "scaleflow", *overrides, f"hydra.run.dir={output}"], folder, is_warm=is_warm)
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    last = read_last_event(output / "events.jsonl")
    if not isinstance(last, RunEnded) or last.status != "FINISHED":
        raise WrongResultError(f"the run did not finish: {last}")
    if is_recorded:
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


# ---------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------

HEAD = ("work", "ours", "against", "theirs", "asked", "ratio", "min..max", "rounds", "verdict")


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown, aligned."""
    cells = [HEAD]
    for each in rows:
        spread = f"{min(each.ratios):.2f}..{max(each.ratios):.2f}"
        figures = (each.asked, f"{each.ratio:.2f}", spread, str(len(each.ratios)), each.verdict)
        cells.append((each.work, each.ours, each.against, each.theirs, *figures))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)
