"""Times and durations of a run whose machine's clock is set meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scaleflow.interfaces import Status, Tracker, clock
from scaleflow.interfaces.clock import SteadyClock, measure_since
from scaleflow.interfaces.events import RunEnded, RunReady
from scaleflow.launcher.display import ShownPhase
from scaleflow.launcher.recording.request_cursor import RequestCursor
from scaleflow.launcher.recording.store_record import StoreRecord
from scaleflow.runs import RunFolder
from scaleflow.runs.event_log import append_event

HOUR = 3600.0

Set = Callable[[float, float], None]


@pytest.fixture
def set_clocks(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Sets the machine's clock, and the monotonic one."""

    def call(wall: float, ticks: float) -> None:
        monkeypatch.setattr(clock.time, "time", lambda: wall)
        monkeypatch.setattr(clock.time, "monotonic", lambda: ticks)

    return call


def test_the_clock_goes_on_if_it_is_set_back(set_clocks: Set) -> None:
    set_clocks(1000 * HOUR, 5.0)
    steady = SteadyClock()
    assert steady.read() == 1000 * HOUR
    set_clocks(998 * HOUR, 15.0)
    assert steady.read() == 1000 * HOUR + 10
    set_clocks(998 * HOUR + 7, 22.0)
    assert steady.read() == 1000 * HOUR + 17
    set_clocks(1001 * HOUR, 30.0)  # it is set right again
    assert steady.read() == 1001 * HOUR
    set_clocks(2 * HOUR, 31.0)
    steady.begin()
    assert steady.read() == 2 * HOUR


def test_a_process_that_starts_after_the_clock_was_set_back_begins_with_the_run(set_clocks: Set) -> None:
    set_clocks(998 * HOUR, 5.0)
    steady = SteadyClock()
    steady.begin(at_least=1000 * HOUR)
    assert steady.read() == 1000 * HOUR
    set_clocks(998 * HOUR + 3, 8.0)
    assert steady.read() == 1000 * HOUR + 3


def test_a_duration_does_not_depend_on_the_clock(set_clocks: Set) -> None:
    clock.anchor.cache_clear()
    set_clocks(1000 * HOUR + 2, 5.0)
    assert measure_since(1000 * HOUR) == 2.0
    for wall in (998 * HOUR, 1002 * HOUR):
        set_clocks(wall, 25.0)
        assert measure_since(1000 * HOUR) == 22.0
    phase = ShownPhase("exporting the model", 20.0, int(1000 * HOUR * 1000))
    assert phase.measure(int(1000 * HOUR * 1000) + 4000) == 4.0
    assert phase.measure(int(1002 * HOUR * 1000)) == 5.0  # the worker's clock was set
    assert phase.measure(int(998 * HOUR * 1000)) == 5.0


class EndTracker(Tracker):
    """Keeps when its run ended."""

    ended = 0

    def finish(self, status: Status, ended: int) -> None:
        self.ended = ended


def test_a_run_does_not_end_before_it_began(tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    append_event(files.events, RunReady("a-run", began=7_200_000, time=7_300_000))
    tracker = EndTracker()
    cursor = RequestCursor(StoreRecord(files.events, tracker), lambda: None)
    cursor.end_run(RunEnded("FINISHED", time=100_000))
    assert tracker.ended == 7_200_000
