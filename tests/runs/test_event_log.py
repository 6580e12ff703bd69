import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces.events import (
    Event,
    MetricsLogged,
    Note,
    ReportMade,
    RunEnded,
    RunReady,
    parse_event,
    to_fields,
)
from scaleflow.runs import RunFolder
from scaleflow.runs.event_log import (
    TAIL_BYTES,
    DeduplicatingEmitter,
    EventReader,
    EventWriter,
    append_event,
    read_last_event,
)
from scaleflow.runs.state import is_finished


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def note_line(text: str) -> bytes:
    return json.dumps({"event": "note", "time": 1, "text": text}, ensure_ascii=False).encode() + b"\n"


def texts(reader: EventReader) -> list[str]:
    """The texts of the notes that a reader has not read yet; there are no other events."""
    events = list(reader.read())
    notes = [event for event in events if isinstance(event, Note)]
    assert len(notes) == len(events)
    return [note.text for note in notes]


def test_an_event_is_read_as_it_was_written_with_its_time(path: Path) -> None:
    write = EventWriter(path)
    event = MetricsLogged(3, {"train/loss": 0.5})
    write(event)
    write.close()
    assert list(EventReader(path).read()) == [event]
    fields = json.loads(path.read_text())
    assert fields == {"event": "metrics", "time": event.time, "step": 3, "values": {"train/loss": 0.5}}
    assert isinstance(event.time, int)


def test_each_kind_of_event_is_read_from_its_fields() -> None:
    event = RunReady("a-run", {"team": "vision"}, {"model": "mlp"}, began=1, steps=2, epochs=3, resumed=0, time=4)
    assert parse_event(to_fields(event)) == event
    assert parse_event(json.loads(json.dumps(to_fields(event)))) == RunReady(
        "a-run", {"team": "vision"}, {"model": "mlp"}, began=1, steps=2, epochs=3, search=[], resumed=0, time=4
    )


@pytest.mark.parametrize(
    "line",
    [
        {"event": "of-a-later-version", "time": 1, "text": "x"},
        {"event": "note", "time": 1},  # lacks `text`
        {"event": "end", "time": 1, "error": "no"},  # lacks `status`
        {"event": "note", "time": 1, "text": "x", "other": 2},
        {"time": 1, "text": "x"},
    ],
)
def test_an_event_that_is_unknown_or_incomplete_is_skipped(path: Path, line: dict[str, Any]) -> None:
    assert parse_event(line) is None
    reader = EventReader(path)
    append(path, note_line("before") + json.dumps(line).encode() + b"\n" + note_line("after"))
    assert texts(reader) == ["before", "after"]
    assert reader.offset == path.stat().st_size
    append(path, json.dumps(line).encode() + b"\n")
    assert texts(reader) == []
    assert reader.offset == path.stat().st_size


def test_a_file_that_does_not_exist_yet_has_no_events(path: Path) -> None:
    assert list(EventReader(path).read()) == []


def test_a_reader_yields_each_event_once_as_the_file_grows(path: Path) -> None:
    reader = EventReader(path)
    write = EventWriter(path)
    write(Note("1"))
    write(Note("2"))
    assert texts(reader) == ["1", "2"]
    assert texts(reader) == []
    write(Note("3"))
    assert texts(reader) == ["3"]
    assert reader.offset == path.stat().st_size


def test_a_half_written_line_is_read_once_it_is_complete(path: Path) -> None:
    reader = EventReader(path)
    append(path, note_line("1") + note_line("2")[:20])
    assert texts(reader) == ["1"]
    assert reader.offset == len(note_line("1"))
    append(path, note_line("2")[20:-1])
    assert texts(reader) == []
    append(path, b"\n")
    assert texts(reader) == ["2"]


def test_a_line_cut_in_a_character_is_not_read(path: Path) -> None:
    reader = EventReader(path)
    line = note_line("größer")
    cut = line.index("ö".encode()) + 1
    append(path, line[:cut])
    assert texts(reader) == []
    append(path, line[cut:])
    assert texts(reader) == ["größer"]


def test_the_offset_moves_with_each_event_that_is_yielded(path: Path) -> None:
    append(path, note_line("1") + note_line("2"))
    reader = EventReader(path)
    events = reader.read()
    next(events)
    assert reader.offset == len(note_line("1"))
    next(events)
    assert reader.offset == path.stat().st_size


def test_a_reader_continues_from_an_offset(path: Path) -> None:
    append(path, note_line("1") + note_line("2"))
    first = EventReader(path)
    next(first.read())
    assert texts(EventReader(path, first.offset)) == ["2"]


def test_events_that_are_read_again_are_the_same(path: Path) -> None:
    write = EventWriter(path)
    values = {"a": 0.1 + 0.2, "b": float("inf")}
    write(MetricsLogged(1, values))
    assert list(EventReader(path).read()) == list(EventReader(path).read())
    (event,) = EventReader(path).read()
    assert isinstance(event, MetricsLogged)
    assert event.values == values


def test_many_threads_write_whole_lines(path: Path) -> None:
    write = EventWriter(path)
    text = "ü" * 5000

    def write_several(thread: int) -> None:
        for number in range(25):
            write(Note(f"{thread} {number} {text}"))

    threads = [threading.Thread(target=write_several, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    notes = [note.split() for note in texts(EventReader(path))]
    assert {note[2] for note in notes} == {text}
    for number in range(8):
        assert [int(note[1]) for note in notes if note[0] == str(number)] == list(range(25))


@pytest.mark.parametrize(
    "text", ["größer", "日本語", "🚂", "two\nlines", "line\u2028separator", "nul\x00", '"quoted"\\']
)
def test_any_text_is_read_as_it_was_written(path: Path, text: str) -> None:
    write = EventWriter(path)
    write(Note(text))
    write(Note("after"))
    assert texts(EventReader(path)) == [text, "after"]


def test_a_system_that_takes_a_few_bytes_at_a_time_still_gets_the_whole_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = EventWriter(path)
    whole = os.write
    monkeypatch.setattr(os, "write", lambda file, data: whole(file, bytes(data[:7])))
    write(Note("a rather long line"))
    assert texts(EventReader(path)) == ["a rather long line"]


def test_a_second_writer_appends(path: Path) -> None:
    EventWriter(path)(Note("1"))
    append_event(path, Note("2"))
    assert texts(EventReader(path)) == ["1", "2"]


def test_a_line_that_a_dead_writer_left_unfinished_does_not_swallow_the_next(path: Path) -> None:
    append(path, note_line("1") + b'{"event": "metr')
    reader = EventReader(path)
    assert texts(reader) == ["1"]
    EventWriter(path)(Note("2"))
    assert texts(reader) == ["2"]


def test_points_that_were_reported_before_are_left_out(path: Path) -> None:
    """After a rollback steps are repeated, and the exported model may be one of an earlier step than last time."""
    write = EventWriter(path)
    write(MetricsLogged(5, {"train/loss": 1.0}))
    write(MetricsLogged(9, {"test/loss": 1.0}))
    events: list[Event] = []
    emit = DeduplicatingEmitter(path, events.append)
    emit(MetricsLogged(5, {"train/loss": 2.0, "val/loss": 2.0}))
    emit(MetricsLogged(5, {"train/loss": 2.0, "val/loss": 2.0}))
    emit(MetricsLogged(6, {"train/loss": 2.0}))
    emit(Note("as it is"))
    emit(MetricsLogged(7, {"test/loss": 2.0}))
    emit(MetricsLogged(9, {"test/loss": 2.0}))
    points = [(event.step, dict(event.values)) for event in events if isinstance(event, MetricsLogged)]
    assert points == [(5, {"val/loss": 2.0}), (5, {}), (6, {"train/loss": 2.0}), (7, {"test/loss": 2.0}), (9, {})]
    assert [event.text for event in events if isinstance(event, Note)] == ["as it is"]


def test_the_last_event_is_read_from_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_last_event(path) is None
    path.touch()
    assert read_last_event(path) is None
    for step in range(2000):  # far more than the end that is read
        append_event(path, MetricsLogged(step, {"train/loss": 1.0}, time=5))
    assert path.stat().st_size > 2 * TAIL_BYTES
    assert read_last_event(path) == MetricsLogged(1999, {"train/loss": 1.0}, time=5)
    append_event(path, RunEnded("FINISHED", time=6))
    assert read_last_event(path) == RunEnded("FINISHED", time=6)
    append_event(path, ReportMade(0))  # the end of the run stays its last event
    assert read_last_event(path) == RunEnded("FINISHED", time=6)
    with path.open("a") as file:
        file.write('{"event": "metr')  # its writer died
    assert read_last_event(path) is None


def test_only_a_run_that_ended_last_is_finished(tmp_path: Path) -> None:
    events = RunFolder(tmp_path).events
    assert not is_finished(tmp_path)
    for event, expected in (
        (RunEnded("KILLED"), False),
        (RunEnded("FINISHED"), True),
        (RunReady("longer", resumed=3), False),
    ):
        append_event(events, event)
        assert is_finished(tmp_path) is expected
