"""What a check works with: commands in a folder of its own, within its time, and the events of their runs."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.device import Device, join_environment
from benchmarks.measure import environment, metric

Value = float | str

#: Seconds that a command gets to end after SIGTERM.
END_SECONDS = 15.0

#: Lines of a command's output that a reason quotes.
LAST_LINES = 4


class OutOfTime(Exception):
    """The time of a check is over; `is_total`: that of all of them."""

    def __init__(self, is_total: bool) -> None:
        super().__init__("out of time")
        self.is_total = is_total


@dataclass(frozen=True)
class Options:
    """Options of the command that the measurements of speed use."""

    rounds: int = 1
    batch_size: int = 128
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def last_lines(self) -> str:
        return " | ".join((self.stdout + self.stderr).strip().splitlines()[-LAST_LINES:])


@dataclass(frozen=True)
class Run:
    """A training run that has ended: its folder, and the events of its chief."""

    folder: Path
    command: Ended

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def metric(self, name: str) -> list[float]:
        """Returns all values of a metric. Fails the check if there is none."""
        values = metric(self.events, name)
        expect(bool(values), f"the run in {self.folder.name} has no {name}")
        return values

    @property
    def params(self) -> Mapping[str, str]:
        return next((event["params"] for event in self.events if event["event"] == "ready"), {})

    @property
    def end(self) -> Mapping[str, str]:
        return next((event for event in reversed(self.events) if event["event"] == "end"), {})

    @property
    def notes(self) -> list[str]:
        return [event["text"] for event in self.events if event["event"] == "note"]


@dataclass
class Started:
    """A command that runs; its output goes to files."""

    process: subprocess.Popen[bytes]
    output: Path
    begin: float

    def text(self, stream: str) -> str:
        return self.output.with_suffix(stream).read_text(errors="replace")


@dataclass
class Bench:
    """What a check works with.

    Attributes:
        device: what its runs compute on.
        shared: a folder that all checks share, with the MLflow store.
        options: those of the command.
        folder: the check's own folder.
        deadline: when its commands are stopped, on the clock of `time.monotonic`.
        is_last: whether the time of all checks is over then.
        values: what it has measured, by name.
        remarks: rules of scaleflow's that the values contradict.
    """

    device: Device
    shared: Path
    options: Options = Options()
    folder: Path = Path()
    deadline: float = math.inf
    is_last: bool = False
    values: dict[str, Value] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    _started: list[Started] = field(default_factory=list)

    def start(self, arguments: Sequence[str | Path], extra: Mapping[str, str] | None = None) -> Started:
        """Starts a Python program in the check's folder, with further environment variables."""
        output = self.folder / f"command-{len(self._started)}"
        variables = join_environment(environment(self.shared), self.device.environment(), extra)
        with output.with_suffix(".out").open("wb") as out, output.with_suffix(".err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                cwd=self.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        started = Started(process, output, time.monotonic())
        self._started.append(started)
        return started

    def wait(self, started: Started) -> Ended:
        """Waits for the end of a command. Raises `OutOfTime` at the deadline."""
        try:
            code = started.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise OutOfTime(self.is_last) from None
        return Ended(code, started.text(".out"), started.text(".err"), time.monotonic() - started.begin)

    def stop_processes(self) -> None:
        """Ends the commands that still run; their workers end with them."""
        running = [each.process for each in self._started if each.process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()

    def run(self, arguments: Sequence[str | Path], code: int = 0, extra: Mapping[str, str] | None = None) -> Ended:
        """Runs a Python program. Fails the check if it ends with another exit code."""
        ended = self.wait(self.start(arguments, extra))
        expect(ended.code == code, f"exit code {ended.code}, expected {code}: {ended.last_lines}")
        return ended

    def train(
        self, words: Sequence[str], name: str = "run", extra: Mapping[str, str] | None = None, code: int = 0
    ) -> Run:
        """Runs `python -m scaleflow` into the folder `name`. Fails the check if it ends with another exit code."""
        folder = self.folder / name
        return Run(folder, self.run(["-m", "scaleflow", *words, f"hydra.run.dir={folder}"], code, extra))

    def reuse(self, name: str, make: Callable[[], list[float]]) -> list[float]:
        """Returns what `make` returned to the first check that needed it."""
        path = self.shared / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(make()))
        found: list[float] = json.loads(path.read_text())
        return found

    def read_store(self, run_id: str) -> dict[str, float]:
        """Returns the last value of each metric of a run in the store."""
        with contextlib.closing(sqlite3.connect(self.shared / "mlflow.db")) as store:
            return dict(store.execute("SELECT key, value FROM latest_metrics WHERE run_uuid = ?", [run_id]).fetchall())


def expect(holds: bool, reason: str) -> None:
    """Fails the check, with a reason in one line, if something does not hold."""
    if not holds:
        pytest.fail(reason, pytrace=False)


def expect_on(run: Run, device: Device, replicas: int = 1) -> None:
    """Checks that a run computed on the device, with this number of replicas."""
    found = run.params.get("resolved.hardware"), run.params.get("resolved.replicas")
    expect(found == (device.kind, str(replicas)), f"the run computed on {found}, expected {device.kind, str(replicas)}")


def expect_learned(losses: Sequence[float]) -> None:
    """Checks that losses are finite, and that the last one is below the first one."""
    expect(all(map(math.isfinite, losses)) and losses[-1] < losses[0], f"the losses are {losses}")
