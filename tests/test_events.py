import json
import os
import threading
from pathlib import Path

import pytest

from scaleflow.events import EventReader, EventWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def numbers(reader: EventReader) -> list[int]:
    return [event["n"] for event in reader.read()]


def test_an_event_is_read_as_it_was_written_with_its_time(path: Path) -> None:
    write = EventWriter(path)
    write("metrics", step=3, values={"train/loss": 0.5}, rate=None)
    write.close()
    (event,) = EventReader(path).read()
    assert isinstance(event.pop("time"), int)
    assert event == {"event": "metrics", "step": 3, "values": {"train/loss": 0.5}, "rate": None}


def test_a_file_that_is_not_there_yet_has_no_events(path: Path) -> None:
    assert list(EventReader(path).read()) == []


def test_a_reader_gives_each_event_once_as_the_file_grows(path: Path) -> None:
    reader = EventReader(path)
    write = EventWriter(path)
    write("x", n=1)
    write("x", n=2)
    assert numbers(reader) == [1, 2]
    assert numbers(reader) == []
    write("x", n=3)
    assert numbers(reader) == [3]
    assert reader.offset == path.stat().st_size


def test_a_half_written_line_is_read_once_it_is_whole(path: Path) -> None:
    reader = EventReader(path)
    append(path, b'{"event": "x", "n": 1}\n{"event": "x", ')
    assert numbers(reader) == [1]
    assert reader.offset == 23
    append(path, b'"n": 2}')
    assert numbers(reader) == []
    append(path, b"\n")
    assert numbers(reader) == [2]


def test_a_line_cut_in_a_character_is_not_read(path: Path) -> None:
    reader = EventReader(path)
    line = json.dumps({"n": "größer"}, ensure_ascii=False).encode() + b"\n"
    cut = line.index("ö".encode()) + 1
    append(path, line[:cut])
    assert list(reader.read()) == []
    append(path, line[cut:])
    assert [event["n"] for event in reader.read()] == ["größer"]


def test_the_offset_moves_with_each_event_given_out(path: Path) -> None:
    append(path, b'{"n": 1}\n{"n": 2}\n')
    reader = EventReader(path)
    events = reader.read()
    next(events)
    assert reader.offset == 9
    next(events)
    assert reader.offset == 18


def test_a_reader_goes_on_from_an_offset(path: Path) -> None:
    append(path, b'{"n": 1}\n{"n": 2}\n')
    first = EventReader(path)
    next(first.read())
    assert numbers(EventReader(path, first.offset)) == [2]


def test_what_is_read_again_from_an_offset_is_the_same(path: Path) -> None:
    write = EventWriter(path)
    write("metrics", step=1, values={"a": 0.1 + 0.2, "b": float("inf")})
    assert list(EventReader(path).read()) == list(EventReader(path).read())
    (event,) = EventReader(path).read()
    assert event["values"] == {"a": 0.1 + 0.2, "b": float("inf")}


def test_many_threads_write_whole_lines(path: Path) -> None:
    write = EventWriter(path)
    text = "ü" * 5000

    def several(thread: int) -> None:
        for n in range(25):
            write("x", thread=thread, n=n, text=text)

    threads = [threading.Thread(target=several, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = list(EventReader(path).read())
    assert {event["text"] for event in events} == {text}
    for i in range(8):
        assert [event["n"] for event in events if event["thread"] == i] == list(range(25))


@pytest.mark.parametrize(
    "text", ["größer", "日本語", "🚂", "two\nlines", "line\u2028separator", "nul\x00", '"quoted"\\']
)
def test_any_text_comes_back(path: Path, text: str) -> None:
    write = EventWriter(path)
    write("note", text=text)
    write("note", text="after")
    assert [event["text"] for event in EventReader(path).read()] == [text, "after"]


def test_a_system_that_takes_a_few_bytes_at_a_time_still_gets_the_whole_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = EventWriter(path)
    whole = os.write
    monkeypatch.setattr(os, "write", lambda file, data: whole(file, bytes(data[:7])))
    write("note", text="a rather long line")
    assert [event["text"] for event in EventReader(path).read()] == ["a rather long line"]


def test_a_second_writer_appends(path: Path) -> None:
    EventWriter(path)("x", n=1)
    EventWriter(path)("x", n=2)
    assert numbers(EventReader(path)) == [1, 2]


def test_a_line_that_a_dead_writer_left_unfinished_does_not_swallow_the_next(path: Path) -> None:
    append(path, b'{"event": "x", "n": 1}\n{"event": "metr')
    reader = EventReader(path)
    assert numbers(reader) == [1]
    EventWriter(path)("x", n=2)
    assert numbers(reader) == [2]
