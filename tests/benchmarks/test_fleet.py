"""The simulation of many workers, with a few of them: real launchers, and processes that only write events."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.fleet import STORE, Kind, WrongResultError, check_end, run_fleet
from scaleflow.interfaces.events import MetricsLogged
from scaleflow.runs import RunFolder
from scaleflow.runs.event_log import append_event
from tests.processes import FORKING

WORKERS, EVENTS, SECONDS = 5, 30, 0.6


@pytest.fixture
def folder(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("benchmarks.fleet.subprocess", FORKING)
    shutil.copy(empty_store, tmp_path / STORE)
    return tmp_path


def run(folder: Path, kind: Kind) -> dict[str, float]:
    """Runs a simulation. Workers that are stopped in mid-run have much left to do, however late the signal comes."""
    times = 1 if kind == "finish" else 100
    return run_fleet(folder, kind, WORKERS, times * EVENTS, times * SECONDS)


@pytest.mark.slow
def test_all_events_are_recorded_and_no_process_is_left(folder: Path) -> None:
    """`run_fleet` checks the end, the store and the processes; without one of the points it raises."""
    figures = run(folder, "finish")
    assert figures["events"] == WORKERS * EVENTS
    assert 0 < figures["delay"] <= figures["delay p95"]
    (place,) = folder.glob("finish-*")
    check_end(place, "finish", WORKERS, EVENTS)
    files = RunFolder(place / "run")
    last = files.events.read_text().splitlines(keepends=True)[-1]
    append_event(files.events, MetricsLogged(EVENTS + 1, {"train/loss": 1.0}))
    with files.events.open("a") as file:
        file.write(last)
    with pytest.raises(WrongResultError, match=f"expected {2 * EVENTS}"):
        check_end(place, "finish", WORKERS, EVENTS)


@pytest.mark.slow
def test_a_dead_worker_is_noticed(folder: Path) -> None:
    assert 0 < run(folder, "kill")["noticed"] < 120


@pytest.mark.slow
def test_all_workers_end_with_the_launcher(folder: Path) -> None:
    assert 0 < run(folder, "stop")["stopped"] < 120
