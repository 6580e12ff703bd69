import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaleflow.errors import ConfigError, StoreUnreachable
from scaleflow.interfaces import IDENTITY, Point, Status, Tracker
from scaleflow.interfaces.events import DatasetDescribed, ReportMade, RunEnded, StepsProfiled
from scaleflow.launcher.recording import recorder as recorder_module
from scaleflow.launcher.recording import request_cursor
from scaleflow.launcher.recording.recorder import Recorder
from scaleflow.launcher.recording.recovery import send_all
from scaleflow.launcher.recording.store_record import StoreRecord
from scaleflow.launcher.recording.store_transfer import TRIES_OF_A_FILE, EventTransfer
from scaleflow.runs import RunFolder, RunState
from tests.event_files import EventWriter

Call = tuple[Any, ...]
BEGAN = 1_700_000_000_000

#: Seconds to wait for what has to come. A busy machine may take long.
PATIENCE = 60


class FakeTracker:
    """Keeps what it takes. `fails` is asked before each call, and may raise."""

    run_id: str | None = None
    adopted_run_id: str | None = None
    uri: str | None = "http://user:word@host"
    experiment: str | None = None
    follows: str | None = None
    model_uri: str | None = None

    def __init__(self) -> None:
        self.descriptions: list[str] = []
        self.calls: list[Call] = []
        self.tried: list[Call] = []
        self.fails: Callable[[Call], None] = lambda call: None

    def take(self, *call: Any) -> None:
        self.tried.append(call)
        self.fails(call)
        self.calls.append(call)

    def connect(self) -> None:
        self.take("connect")

    def check_experiment(self) -> None: ...

    def find_folder(self, run_id: str) -> str:
        raise NotImplementedError

    def select_run(self, run_id: str) -> None:
        self.take("select", run_id)
        self.run_id = run_id

    def check_run(self, run_id: str) -> None:
        self.take("check", run_id)

    def reopen(self) -> None:
        self.take("reopen")

    def start(self, name: str, tags: Mapping[str, str], began: int) -> None:
        self.take("start", name, dict(tags), began)
        self.run_id = "run-7"

    def log_params(self, values: Mapping[str, str]) -> None:
        self.take("params", dict(values))

    def log_metrics(self, points: Sequence[Point]) -> None:
        self.take("metrics", list(points))

    def set_tags(self, values: Mapping[str, str]) -> None:
        self.take("tags", dict(values))

    def describe(self, text: str) -> None:
        self.fails(("describe", text))
        self.descriptions.append(text)

    def log_artifact(self, path: Path, folder: str | None) -> None:
        self.take("artifact", path, folder)

    def log_dataset(self, dataset: DatasetDescribed) -> None:
        self.take("data", dataset.name)

    def log_model(self, path: Path, step: int) -> None:
        self.take("model", path, step)
        self.model_uri = f"models:/m-{step}"

    def finish(self, status: Status, ended: int) -> None:
        self.take("finish", status, ended)

    def steps(self) -> list[int]:
        return [point.step for call in self.calls if call[0] == "metrics" for point in call[1]]

    def words(self) -> list[str]:
        return [call[0] for call in self.calls]


class Setting:
    """A tracker, an `events.jsonl` and what records the one in the other."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "events.jsonl"
        self.state = RunFolder(folder).record
        self.tracker = FakeTracker()
        self.write = EventWriter(self.path)

    def begin(self, goes_on: bool = False, offline: bool = False) -> Recorder:
        tracker: Tracker = self.tracker
        before = self.path.stat().st_size if goes_on else 0
        recorder = Recorder(EventTransfer(tracker, self.path), before, is_resumed=goes_on, offline=offline)
        recorder.start()
        return recorder

    @property
    def known(self) -> dict[str, Any]:
        return dict(json.loads(self.state.read_text()))

    @property
    def identity(self) -> str:
        return str(self.known["id"])

    def time_of_the_last(self) -> int:
        return int(json.loads(self.path.read_text().splitlines()[-1])["time"])

    def ready(self, **more: Any) -> None:
        run = {"name": "a-run", "tags": {"team": "vision"}, "began": BEGAN, "params": {"model": "mlp"}}
        self.write("ready", **run, steps=9, epochs=3, **more)

    def metrics(self, *steps: int) -> None:
        for step in steps:
            self.write("metrics", step=step, values={"train/loss": 1 / step, "train/accuracy": 0.5}, rate=10.0)

    def end(self, status: str = "FINISHED", **more: str) -> None:
        self.write("end", status=status, **more)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "PASS_SECONDS", 0.01)
    monkeypatch.setattr(recorder_module, "MAX_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(recorder_module, "CONNECT_SECONDS", 0.05)


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    yield made
    made.tracker.fails = lambda call: None  # lets a recorder that is still at it come to its end
    made.end()
    for thread in threading.enumerate():
        if thread.name == "recorder":
            thread.join(PATIENCE)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "did not come about"
        time.sleep(0.005)


def unreachable(call: Call) -> None:
    raise ConnectionError("the store is away\nand more")


class Times:
    """Fails the first `count` calls of one kind."""

    def __init__(self, word: str, count: int) -> None:
        self.word = word
        self.left = count

    def __call__(self, call: Call) -> None:
        if call[0] == self.word and self.left:
            self.left -= 1
            raise ConnectionError("not now")


def test_a_run_is_told_in_the_order_of_its_events(setting: Setting, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.touch()
    setting.ready()
    setting.write("note", text="only for the terminal")
    setting.metrics(1, 2)
    setting.write("epoch", epoch=1, epochs=3, step=2, values={})
    setting.write("artifact", path="/x/plot.png", folder="plots")
    setting.metrics(3)
    setting.write("model", path="/x/model", step=3)
    setting.end()
    assert setting.begin().finish(PATIENCE)
    calls = setting.tracker.calls
    assert [call[0] for call in calls] == [
        *("connect", "start", "params", "metrics", "artifact", "artifact", "model", "tags", "finish")
    ]
    assert calls[1:3] == [
        ("start", "a-run", {"team": "vision", "scaleflow.folder": str(tmp_path), IDENTITY: setting.identity}, BEGAN),
        ("params", {"model": "mlp"}),
    ]
    assert setting.tracker.steps() == [1, 1, 2, 2, 3, 3]
    assert calls[4:] == [
        ("artifact", config, None),
        ("artifact", Path("/x/plot.png"), "plots"),
        ("model", Path("/x/model"), 3),
        ("tags", {"scaleflow.status": "FINISHED"}),
        ("finish", "FINISHED", setting.time_of_the_last()),
    ]


def test_the_dataset_is_handed_on_and_a_table_of_classes_with_its_picture(setting: Setting, tmp_path: Path) -> None:
    table = tmp_path / "confusion_matrix.csv"
    table.write_text("true,cat,dog\ncat,3,1\ndog,0,2\n")
    setting.ready()
    setting.write("data", name="pets", splits={})
    setting.write("confusion", path=str(table), folder="plots", split="test")
    recorder = setting.begin()
    until(lambda: ("artifact", table, "plots") in setting.tracker.calls)
    setting.end()
    assert recorder.finish(PATIENCE)
    assert setting.tracker.calls[3:6] == [
        ("data", "pets"),
        ("artifact", tmp_path / "confusion_matrix.svg", "plots"),
        ("artifact", table, "plots"),
    ]
    assert table.with_suffix(".svg").stat().st_size > 1000


def test_a_run_is_described_when_it_begins_and_when_it_ends(setting: Setting) -> None:
    setting.ready()
    recorder = setting.begin()
    until(lambda: bool(setting.tracker.descriptions))
    setting.metrics(4)
    setting.write("model", path="/x/model", step=4)
    setting.end()
    assert recorder.finish(PATIENCE)
    first, last = setting.tracker.descriptions
    assert first.startswith("**RUNNING.**")
    assert last.startswith("**FINISHED** after 4 steps: train loss 0.25, train accuracy 0.5.")
    assert 'set_tracking_uri("http://host")' in last  # without the credentials
    assert 'load_model("models:/m-4")' in last
    assert setting.known["model_uri"] == "models:/m-4"


def test_the_end_is_described_once_the_store_takes_it(setting: Setting) -> None:
    setting.ready()
    setting.tracker.fails = Times("describe", 3)
    setting.end("FAILED", error="the loss is not finite")
    assert setting.begin().finish(PATIENCE)
    assert "the loss is not finite" in setting.tracker.descriptions[-1]
    assert [call[0] for call in setting.tracker.calls].count("finish") >= 1


def test_an_end_that_is_in_no_file_is_described(setting: Setting) -> None:
    setting.ready()
    recorder = setting.begin()
    recorder.transfer.unwritten_end = RunEnded("FAILED", "the disk is full")
    recorder.wake()
    assert recorder.finish(PATIENCE)
    assert "the disk is full" in setting.tracker.descriptions[-1]


def test_a_run_that_goes_on_is_described_as_running_again(setting: Setting) -> None:
    setting.ready()
    setting.end("KILLED", error="stopped by SIGINT")
    assert setting.begin().finish(PATIENCE)
    setting.ready(resumed=3)
    recorder = setting.begin(goes_on=True)
    until(lambda: setting.tracker.descriptions[-1].startswith("**RUNNING.**"))
    setting.end()
    assert recorder.finish(PATIENCE)
    assert setting.tracker.descriptions[-1].startswith("**FINISHED**")
    assert "SIGINT" not in setting.tracker.descriptions[-1]


def test_a_model_that_comes_late_is_in_the_description(setting: Setting) -> None:
    def fail(call: Call) -> None:
        if call[0] == "model":
            raise ConnectionError("not now")

    transfer = EventTransfer(setting.tracker, setting.path, tries_of_a_file=1)
    setting.ready()
    setting.write("model", path="/x/model", step=3)
    setting.end()
    setting.tracker.fails = fail
    transfer.open()
    transfer.send()
    assert "load_model" not in setting.tracker.descriptions[-1]
    setting.tracker.fails = lambda call: None
    send_all(transfer)
    assert 'load_model("models:/m-3")' in setting.tracker.descriptions[-1]


def test_a_sweep_describes_itself(setting: Setting, tmp_path: Path) -> None:
    RunFolder(tmp_path).ledger.write_text("{}")
    setting.ready()
    setting.write("description", text="a table")
    setting.end()
    assert setting.begin().finish(PATIENCE)
    assert setting.tracker.descriptions == ["a table"]


def test_a_point_has_the_step_and_the_time_of_its_event(setting: Setting) -> None:
    setting.ready()
    setting.metrics(4)
    event = json.loads(setting.path.read_text().splitlines()[-1])
    setting.end()
    assert setting.begin().finish(PATIENCE)
    (points,) = [call[1] for call in setting.tracker.calls if call[0] == "metrics"]
    assert points == [
        Point("train/loss", 0.25, 4, event["time"]),
        Point("train/accuracy", 0.5, 4, event["time"]),
    ]


def test_points_of_many_events_go_in_one_call(setting: Setting) -> None:
    setting.ready()
    setting.metrics(*range(1, 101))
    setting.end()
    assert setting.begin().finish(PATIENCE)
    assert setting.tracker.words().count("metrics") == 1
    assert setting.tracker.steps() == [step for step in range(1, 101) for _ in range(2)]


def test_a_failure_and_its_reason_are_recorded(setting: Setting) -> None:
    setting.ready()
    setting.end("FAILED", error="NotFinite: the loss")
    assert setting.begin().finish(PATIENCE)
    assert setting.tracker.calls[-2:] == [
        ("tags", {"scaleflow.status": "FAILED", "scaleflow.error": "NotFinite: the loss"}),
        ("finish", "FAILED", setting.time_of_the_last()),
    ]


def test_events_are_recorded_while_the_run_is_on(setting: Setting) -> None:
    setting.ready()
    recorder = setting.begin()
    until(lambda: "params" in setting.tracker.words())
    setting.metrics(1)
    until(lambda: setting.tracker.steps() == [1, 1])
    assert not recorder.done.is_set()
    assert recorder.is_alive()  # the launcher asks, before it would start one
    setting.end()
    assert recorder.finish(PATIENCE)


def test_no_run_is_made_for_what_was_refused(setting: Setting) -> None:
    setting.write("refused", message="no")
    assert setting.begin().finish(PATIENCE)
    assert setting.tracker.words() == ["connect"]


def test_an_event_that_this_version_does_not_know_counts_as_sent(setting: Setting) -> None:
    unknown = b'{"event": "of-a-later-version", "time": 1}\n'
    setting.ready()
    for write in (lambda: setting.metrics(1), lambda: setting.write("artifact", path="/x/plot.png"), setting.end):
        setting.path.write_bytes(setting.path.read_bytes() + unknown)
        write()
    setting.path.write_bytes(setting.path.read_bytes() + unknown)
    assert setting.begin().finish(PATIENCE)
    assert setting.tracker.words() == ["connect", "start", "params", "metrics", "artifact", "tags", "finish"]
    assert setting.known["file_offset"] == setting.known["offset"]
    assert setting.known["offset"] == setting.path.stat().st_size
    assert EventTransfer(setting.tracker, setting.path).record.is_complete


@pytest.mark.parametrize("word", ["start", "params", "metrics", "artifact", "model", "tags", "finish"])
def test_failed_call_is_sent_again_verbatim_and_nothing_is_skipped(setting: Setting, word: str) -> None:
    setting.tracker.fails = Times(word, 2)
    setting.ready()
    setting.metrics(1, 2)
    setting.write("artifact", path="/x/plot.png")
    setting.write("model", path="/x/model", step=2)
    setting.metrics(3)
    setting.end()
    assert setting.begin().finish(PATIENCE)
    tried = [call for call in setting.tracker.tried if call[0] == word]
    distinct = [call for i, call in enumerate(tried) if call not in tried[:i]]
    assert len(tried) >= 3
    assert tried[0] == tried[1] == tried[2]
    assert [call for call in setting.tracker.calls if call[0] == word][-len(distinct) :] == distinct
    assert set(setting.tracker.steps()) == {1, 2, 3}
    assert setting.tracker.words()[-1] == "finish"


def test_portions_before_the_failing_one_are_not_sent_again(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_cursor, "EVENTS_A_PASS", 3)

    def after_step_5(call: Call) -> None:
        if call[0] == "metrics" and call[1][-1].step > 5 and len(setting.tracker.tried) < 12:
            raise ConnectionError("not now")

    setting.tracker.fails = after_step_5
    setting.ready()
    setting.metrics(*range(1, 10))
    setting.end()
    assert setting.begin().finish(PATIENCE)
    assert setting.tracker.steps() == [step for step in range(1, 10) for _ in range(2)]


def test_a_run_has_its_end_also_where_the_store_takes_no_tensorboard_files(setting: Setting) -> None:
    board = setting.path.parent / "tensorboard" / "events.out"
    board.parent.mkdir()
    board.touch()
    setting.tracker.fails = lambda call: unreachable(call) if call[0] == "artifact" else None
    setting.ready()
    setting.end()
    recorder = setting.begin()
    assert not recorder.finish(PATIENCE)
    assert "check" in setting.tracker.words()  # the store is there, and does not take this file
    assert ("finish", "FINISHED", setting.time_of_the_last()) in setting.tracker.calls
    assert recorder.reason == "ConnectionError: the store is away"
    setting.tracker.fails = lambda call: None
    transfer = EventTransfer(setting.tracker, setting.path)
    send_all(transfer)
    assert transfer.record.is_complete
    assert setting.tracker.calls[-1] == ("artifact", board, "tensorboard")


class Profiles:
    """Reads a profile for as long as it is held."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def read(self, event: StepsProfiled, at: int) -> ReportMade:
        self.begun.set()
        assert self.may_end.wait(PATIENCE)
        values = {"profile/step_ms": 2.0}
        return ReportMade(at, [("/x/trace", "profile")], values, 3, "steps 2 to 3: 2 ms", time=event.time)


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Profiles]:
    made = Profiles()
    monkeypatch.setattr("scaleflow.profiler.analyze_window", made.read)
    yield made
    made.may_end.set()


def test_metrics_and_the_end_do_not_wait_for_a_profile_to_be_read(setting: Setting, profiles: Profiles) -> None:
    setting.ready()
    setting.write("profile", folder="/x", first=2, last=3, artifacts="profile")
    setting.metrics(4)
    recorder = setting.begin()
    until(profiles.begun.is_set)
    until(lambda: setting.tracker.steps() == [4, 4])
    setting.end()
    until(lambda: "finish" in setting.tracker.words())
    assert setting.known["left"]  # sent by the next command, should this one die
    profiles.may_end.set()
    assert recorder.finish(PATIENCE)
    assert ("artifact", Path("/x/trace"), "profile") in setting.tracker.calls
    assert setting.tracker.steps() == [4, 4, 3]
    assert RunState.read(setting.path.parent).annotations.profiles == {3: "steps 2 to 3: 2 ms"}
    assert setting.known["left"] == {}


def test_a_profile_is_sent_by_a_later_command_which_waits_for_its_analysis(
    setting: Setting, profiles: Profiles
) -> None:
    setting.ready()
    setting.write("profile", folder="/x", first=2, last=3, artifacts="profile")
    setting.end()
    assert not setting.begin().finish(0.2)
    profiles.may_end.set()
    transfer = EventTransfer(setting.tracker, setting.path)
    send_all(transfer)
    assert transfer.record.is_complete
    assert ("artifact", Path("/x/trace"), "profile") in setting.tracker.calls
    assert setting.tracker.steps() == [3]


def test_a_profile_is_tried_again_if_the_store_fails_after_the_end(setting: Setting, profiles: Profiles) -> None:
    setting.ready()
    setting.write("profile", folder="/x", first=2, last=3, artifacts="profile")
    setting.end()
    recorder = setting.begin()
    until(lambda: "finish" in setting.tracker.words())
    setting.tracker.fails = lambda call: unreachable(call) if call[0] in ("artifact", "check") else None
    profiles.may_end.set()
    until(lambda: [call[0] for call in setting.tracker.tried].count("artifact") > TRIES_OF_A_FILE)
    setting.tracker.fails = lambda call: None
    assert recorder.finish(PATIENCE)
    assert RunState.read(setting.path.parent).annotations.profiles == {3: "steps 2 to 3: 2 ms"}


def test_a_file_that_was_left_is_sent_before_the_end(setting: Setting) -> None:
    setting.tracker.fails = lambda call: unreachable(call) if call[0] == "artifact" else None
    setting.ready()
    setting.write("artifact", path="/x/plot.png")
    setting.metrics(1)
    recorder = setting.begin()
    until(lambda: bool(setting.tracker.steps()) and bool(setting.known["left"]))
    assert list(setting.known["left"].values()) == ["ConnectionError: the store is away"]
    setting.tracker.fails = lambda call: None
    setting.metrics(2)
    until(lambda: setting.tracker.steps() == [1, 1, 2, 2])
    assert "artifact" not in setting.tracker.words()
    setting.end()
    assert recorder.finish(PATIENCE)
    assert setting.tracker.words()[-3:] == ["artifact", "tags", "finish"]


def test_a_profile_that_takes_too_long_is_named(setting: Setting, profiles: Profiles) -> None:
    setting.ready()
    setting.write("profile", folder="/x", first=2, last=3, artifacts="profile")
    setting.end()
    recorder = setting.begin()
    until(lambda: "finish" in setting.tracker.words())
    assert not recorder.finish(0.2)
    assert recorder.reason == "the profile of steps 2 to 3 is still being analyzed"


def test_nothing_is_sent_once_finish_has_given_up(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "STOP_SECONDS", PATIENCE)
    asked, answer = threading.Event(), threading.Event()

    def slowly(call: Call) -> None:
        if call[0] == "params":
            asked.set()
            assert answer.wait(PATIENCE)

    setting.tracker.fails = slowly
    setting.ready()
    setting.metrics(1)
    setting.end("KILLED")
    recorder = setting.begin()
    until(asked.is_set)

    def answer_and_join(seconds: float) -> None:
        answer.set()
        threading.Thread.join(recorder, seconds)

    monkeypatch.setattr(recorder, "join", answer_and_join)
    assert not recorder.finish(0)
    assert not recorder.is_alive()  # its last request was answered while `finish` waited
    assert setting.tracker.words() == ["connect", "start", "params"]


def test_a_run_that_goes_on_waits_for_the_last_request_of_its_earlier_recorder(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "STOP_SECONDS", 0.01)
    asked, answer = threading.Event(), threading.Event()

    def slowly(call: Call) -> None:
        if call[0] == "finish" and not asked.is_set():
            asked.set()
            assert answer.wait(PATIENCE)

    setting.tracker.fails = slowly
    setting.ready()
    setting.end("KILLED")
    earlier = setting.begin()
    until(asked.is_set)
    assert not earlier.finish(0)
    recorder = setting.begin(goes_on=True)
    setting.ready(resumed=0)
    threading.Timer(0.3, answer.set).start()
    until(lambda: "reopen" in setting.tracker.words())
    earlier.join(PATIENCE)
    setting.end()
    assert recorder.finish(PATIENCE)
    words = setting.tracker.words()
    assert words[words.index("reopen") :] == ["reopen", "tags", "finish"]


def test_bytes_count_as_recorded_once_the_store_has_taken_them(setting: Setting) -> None:
    setting.ready()
    recorder = setting.begin()
    ready = setting.path.stat().st_size
    until(lambda: recorder.recorded == ready)
    asked, answer = threading.Event(), threading.Event()

    def slowly(call: Call) -> None:
        asked.set()
        assert answer.wait(PATIENCE)

    setting.tracker.fails = slowly
    setting.metrics(1)
    assert asked.wait(PATIENCE)
    while_asked = recorder.recorded
    answer.set()
    until(lambda: recorder.recorded == setting.path.stat().st_size)
    assert while_asked == ready


def test_a_refusal_from_connect_is_kept_and_ends_the_recorder(setting: Setting) -> None:
    def refuse(call: Call) -> None:
        raise ConfigError("tracking.uri=x: no")

    setting.tracker.fails = refuse
    setting.ready()
    setting.end()
    recorder = setting.begin()
    assert not recorder.finish(PATIENCE)
    assert str(recorder.refusal) == "tracking.uri=x: no"
    assert setting.tracker.calls == []


def test_a_refusal_from_a_later_call_is_kept_too(setting: Setting) -> None:
    def refuse(call: Call) -> None:
        if call[0] == "start":
            raise ConfigError("tracking.experiment=x: was deleted")

    setting.tracker.fails = refuse
    setting.ready()
    recorder = setting.begin()
    assert not recorder.finish(PATIENCE)
    assert str(recorder.refusal) == "tracking.experiment=x: was deleted"


def test_whatever_connect_raises_is_a_refusal_without_a_traceback(setting: Setting) -> None:
    setting.tracker.fails = unreachable  # a traceback on stderr would be an unhandled exception to pytest
    recorder = setting.begin()
    assert not recorder.finish(PATIENCE)
    assert str(recorder.refusal) == "tracking: ConnectionError: the store is away"


def test_finish_gives_up_when_the_store_stays_away(setting: Setting) -> None:
    setting.ready()
    setting.end()
    setting.tracker.fails = lambda call: unreachable(call) if call[0] != "connect" else None
    recorder = setting.begin()
    until(lambda: bool(recorder.reason))
    before = time.monotonic()
    assert not recorder.finish(0.3)
    assert 0.2 < time.monotonic() - before < 60
    assert recorder.reason == "ConnectionError: the store is away"
    assert recorder.refusal is None
    assert recorder.recorded == 0


def test_an_outage_lasts_until_the_store_takes_the_run_again(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "OUTAGE_SECONDS", 0.1)
    setting.ready()
    recorder = setting.begin()
    until(lambda: bool(recorder.recorded))
    for error, outage in (
        (ConnectionError("it is away"), "does not take the run (ConnectionError: it is away)"),
        (StoreUnreachable("no file can be written"), "does not take the run (no file can be written)"),
    ):
        assert recorder.outage == ""

        def fail(call: Call, error: Exception = error) -> None:
            raise error

        setting.tracker.fails = fail
        setting.metrics(1)
        until(lambda: bool(recorder.outage))
        assert recorder.outage == outage
        setting.tracker.fails = lambda call: None
        until(lambda: not recorder.outage)


def test_a_parent_that_is_not_recorded_yet_is_no_outage(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "OUTAGE_SECONDS", 0.0)
    setting.ready(parent=str(setting.path.parent / "sweep"))
    recorder = setting.begin()
    until(lambda: "not recorded yet" in recorder.reason)
    assert recorder.outage == ""
    recorder.finish(0.1)


def test_finish_gives_up_on_a_store_that_never_opens(setting: Setting) -> None:
    setting.ready()
    setting.end()
    opened = threading.Event()
    setting.tracker.fails = lambda call: opened.wait(PATIENCE) and None
    recorder = setting.begin()
    assert not recorder.finish(0.3)
    assert recorder.recorded == 0
    assert recorder.reason == ""
    opened.set()


def test_finish_gives_up_when_it_is_told_to(setting: Setting) -> None:
    setting.ready()
    recorder = setting.begin()
    assert not recorder.finish(PATIENCE, lambda: True)


def test_finish_waits_its_whole_patience_also_for_a_store_that_was_away_before(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed)
    monkeypatch.setattr(recorder_module, "time", clock)
    setting.ready()
    setting.end()
    setting.tracker.fails = lambda call: unreachable(call) if call[0] != "connect" else None
    recorder = setting.begin()
    until(lambda: bool(recorder.reason))
    passed = 10.0 * PATIENCE
    questions = 0

    def come_back_later() -> bool:
        nonlocal questions
        questions += 1
        if questions == 3:
            setting.tracker.fails = lambda call: None
        return False

    assert recorder.finish(PATIENCE, come_back_later)


def test_finish_does_not_wait_for_the_next_pass(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "PASS_SECONDS", 600.0)
    setting.ready()
    setting.end()
    assert setting.begin().finish(PATIENCE)


def test_the_file_is_read_in_portions(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_cursor, "EVENTS_A_PASS", 10)
    setting.ready()
    setting.metrics(*range(1, 96))
    setting.end()
    assert setting.begin().finish(PATIENCE)
    sizes = [len(call[1]) for call in setting.tracker.calls if call[0] == "metrics"]
    assert max(sizes) <= 20
    assert setting.tracker.steps() == [step for step in range(1, 96) for _ in range(2)]


def test_the_state_says_how_far_the_store_has_come_and_where(setting: Setting) -> None:
    setting.ready()
    recorder = setting.begin()
    until(lambda: bool(recorder.recorded))
    ready = setting.path.stat().st_size
    known = {"run_id": "run-7", "uri": "http://****@host", "folder": str(setting.path.parent), "left": {}}
    known["uri_from"] = known["folder"]
    known["id"] = setting.identity
    until(lambda: setting.known == {**known, "offset": ready, "file_offset": ready, "done": False})
    setting.metrics(1)
    setting.end()
    assert recorder.finish(PATIENCE)
    recorder.join(PATIENCE)
    whole = setting.path.stat().st_size
    assert setting.known == {**known, "offset": whole, "file_offset": whole, "done": True}


def test_a_run_that_goes_on_is_recorded_from_where_it_was_recorded_to(setting: Setting, tmp_path: Path) -> None:
    setting.ready()
    setting.metrics(1)
    setting.metrics(2)
    setting.end("KILLED")
    assert setting.begin().finish(PATIENCE)
    state = json.loads(setting.state.read_text())
    setting.tracker = FakeTracker()
    (tmp_path / "resume-1.yaml").touch()
    recorder = setting.begin(goes_on=True)
    until(lambda: "select" in setting.tracker.words())
    setting.ready(resumed=2)
    setting.metrics(3)
    setting.write("restart", number=1, reason="worker 1 died")
    setting.end()
    assert recorder.finish(PATIENCE)
    assert state["done"]
    assert setting.tracker.words() == ["connect", "select", "reopen", "metrics", "tags", "artifact", "tags", "finish"]
    assert set(setting.tracker.steps()) == {3}
    assert ("tags", {"scaleflow.restarts": "1", "scaleflow.restart.1": "worker 1 died"}) in setting.tracker.calls


def test_unrecorded_events_are_recorded_when_the_run_goes_on(setting: Setting) -> None:
    """The launcher was killed before the store answered: the end of then is not the end of now."""
    setting.ready()
    setting.metrics(1)
    setting.end("KILLED")
    recorder = setting.begin(goes_on=True)
    until(lambda: "finish" in setting.tracker.words())
    setting.ready(resumed=1)
    setting.metrics(2)
    setting.end()
    assert recorder.finish(PATIENCE)
    words = ["connect", "start", "params", "metrics", "tags", "finish", "reopen", "metrics", "tags", "finish"]
    assert setting.tracker.words() == words
    assert sorted(set(setting.tracker.steps())) == [1, 2]


def test_the_state_stays_behind_what_failed(setting: Setting) -> None:
    setting.ready()
    recorder = setting.begin()
    until(lambda: bool(recorder.recorded))
    setting.tracker.fails = unreachable
    setting.metrics(1)
    ready = recorder.recorded
    until(lambda: bool(recorder.reason))
    assert setting.known["offset"] == ready < setting.path.stat().st_size


def test_the_state_is_written_when_finish_returns(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = StoreRecord.save

    def keep_slowly(record: StoreRecord, is_vital: bool = False) -> None:
        time.sleep(0.1)
        keep(record, is_vital)

    monkeypatch.setattr(StoreRecord, "save", keep_slowly)
    setting.ready()
    setting.end()
    assert setting.begin().finish(PATIENCE)
    assert json.loads(setting.state.read_text())["done"] is True


def test_a_store_that_takes_no_files_gets_the_end_of_the_run_also_with_files_of_the_end(setting: Setting) -> None:
    board = setting.path.parent / "tensorboard" / "events.out"
    board.parent.mkdir()
    board.touch()
    setting.tracker.fails = lambda call: unreachable(call) if call[0] in ("artifact", "model") else None
    setting.ready()
    for name in ("a", "b"):
        setting.write("artifact", path=f"/x/{name}.png")
    setting.write("model", path="/x/model", step=3)
    setting.end()
    recorder = setting.begin()
    until(recorder.done.is_set)
    assert not recorder.finish(PATIENCE)
    assert len(setting.known["left"]) == 4
    assert setting.known["done"]
