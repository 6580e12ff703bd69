"""A command that sends a run is killed at each request in turn: the next one sends the rest, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces import Point
from scaleflow.interfaces.events import ReportMade, StepsProfiled
from scaleflow.launcher.recording.recovery import send_all
from scaleflow.launcher.recording.store_transfer import EventTransfer
from scaleflow.runs import RunFolder, RunState
from tests.event_files import EventWriter
from tests.launcher.test_recorder import BEGAN, FakeTracker


class DiedError(BaseException):
    """The process was killed here."""


class Store(FakeTracker):
    """Keeps what it takes of one run, over several commands. A command dies at its request `dies_at`, before or after
    the store has taken it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dies_at, self.dies_after, self.refuses = -1, False, ""
        self.is_open = False

    def begin_command(self, dies_at: int = -1) -> None:
        self.run_id, self.tried, self.dies_at = None, [], dies_at

    def take(self, *call: Any) -> None:
        is_last = len(self.tried) == self.dies_at
        self.tried.append(call)
        if is_last and not self.dies_after:
            raise DiedError
        if call[0] == "artifact" and call[1].name == self.refuses:
            raise PermissionError("no")
        if call[0] in ("start", "reopen", "finish"):
            self.is_open = call[0] != "finish"
        elif call[0] in ("metrics", "artifact", "model", "data") and call not in self.calls and not self.is_open:
            assert any(word in str(call) for word in ("profile/", "confusion", "trace")), "only reports follow the end"
        self.calls.append(call)
        if is_last:
            raise DiedError

    @property
    def points(self) -> set[Point]:
        return {point for call in self.calls if call[0] == "metrics" for point in call[1]}

    @property
    def files(self) -> list[str]:
        return [call[1].name for call in self.calls if call[0] == "artifact"]


def analyze(event: StepsProfiled, at: int) -> ReportMade:
    return ReportMade(at, [("/x/trace", "profile")], {"profile/step_ms": 2.0}, event.last, "a line", time=event.time)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was resumed, with all kinds of events."""
    monkeypatch.setattr("scaleflow.profiler.analyze_window", analyze)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").touch()
    (folder / "confusion.csv").write_text("true,cat,dog\ncat,3,1\ndog,0,2\n")
    write = EventWriter(folder / "events.jsonl")
    ready = {"name": "a-run", "began": BEGAN, "params": {"model": "mlp"}}
    write("ready", **ready)
    write("data", name="pets", splits={})
    write("metrics", step=0, values={"baseline/loss": 2.0})
    for step in (1, 2):
        write("metrics", step=step, values={"train/loss": 1 / step, "perf/step_ms": 3.0})
    write("profile", folder="/x", first=1, last=2, artifacts="profile")
    write("artifact", path="/x/a.png", folder="plots")
    write("metrics", step=3, values={"train/loss": 0.1})
    write("end", status="KILLED", error="stopped")
    write("ready", **ready, resumed=3)
    write("metrics", step=4, values={"train/loss": 0.1, "perf/step_ms": 3.0})
    write("metrics", step=4, values={"test/loss": 0.2})
    write("confusion", path=str(folder / "confusion.csv"), folder="plots", split="test")
    write("artifact", path="/x/b.png")
    write("model", path="/x/model", step=4)
    write("end", status="FINISHED")
    return folder


def send(folder: Path, store: Store) -> EventTransfer:
    """Sends a run as `scaleflow sync` does."""
    transfer = EventTransfer(store, folder / "events.jsonl", tries_of_a_file=1)
    transfer.open()
    send_all(transfer)
    return transfer


def assert_is_whole(folder: Path, store: Store) -> None:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    reports = [line for line in lines if line["event"] == "report"]
    assert len(reports) == 2
    measured = [*reports, *(line for line in lines if line["event"] == "metrics")]
    assert store.points == {
        Point(k, v, line["step"], line["time"]) for line in measured for k, v in line["values"].items()
    }
    assert {*store.files} == {"config.yaml", "confusion.csv", "confusion.svg", "trace", "a.png", "b.png"}
    assert {"start", "params", "data", "model", "reopen"} <= {*store.words()}
    assert [call[1] for call in store.calls if call[0] == "finish"][-1] == "FINISHED"
    assert not store.is_open
    assert EventTransfer(store, folder / "events.jsonl").record.is_complete


@pytest.mark.parametrize("dies_after", [False, True])
def test_a_command_may_die_at_any_request(run: Path, tmp_path: Path, dies_after: bool) -> None:
    number, is_through = 0, False
    while not is_through:
        folder, store = tmp_path / str(number), Store()
        shutil.copytree(run, folder)
        store.begin_command(number)
        store.dies_after = dies_after
        try:
            send(folder, store)
            is_through = True
        except DiedError:
            store.begin_command()
            send(folder, store)
        assert_is_whole(folder, store)
        number += 1
    assert number > 20


def test_a_command_may_die_at_every_request(run: Path) -> None:
    """Each command dies one request later than the one before it."""
    store, number = Store(), -1
    is_through = False
    while not is_through:
        number += 1
        store.begin_command(number)
        with contextlib.suppress(DiedError):
            send(run, store)
            is_through = True
    assert number > 5
    assert_is_whole(run, store)


def test_a_refused_file_holds_nothing_back_and_is_sent_later(run: Path) -> None:
    store = Store()
    store.refuses = "a.png"
    send(run, store)
    known = RunFolder(run).read_record()
    assert list(known["left"].values()) == ["PermissionError: no"]
    assert known["offset"] == known["file_offset"] == (run / "events.jsonl").stat().st_size
    assert not store.is_open
    store.begin_command()
    store.refuses, store.is_open = "", True  # a file that was refused follows the end
    send(run, store)
    assert store.files[-1] == "a.png"
    store.is_open = False
    assert_is_whole(run, store)


def test_an_analysis_that_fails_is_reported_and_awaited_no_more(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(event: StepsProfiled, at: int) -> ReportMade:
        raise ValueError("the summary is damaged")

    monkeypatch.setattr("scaleflow.profiler.analyze_window", fail)
    transfer = send(run, Store())
    assert transfer.record.is_complete
    (line,) = RunState.read(run).annotations.profiles.values()
    assert line.startswith("no report of the event profile could be made: the summary is damaged")
