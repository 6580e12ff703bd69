"""Writes and reads `events.jsonl`: one JSON object per line.

A writer appends whole lines. Each reader (the display, the recorder) has its own offset. If a process dies, its events
stay, and a reader that starts again at an offset sees the same events.
"""

import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from scaleflow.interfaces.events import Emit, Event, MetricsLogged, ReportMade, TagsSet, parse_event, to_fields
from scaleflow.interfaces.secret_masking import mask_secrets

TEST_PREFIX = "test/"

#: The last event is searched in this many bytes at the end of the file.
TAIL_BYTES = 65_536


class EventWriter:
    """Appends events to a file, with secrets masked; creates the file. It can be called from several threads."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        self._is_torn = False
        if not ends_with_newline(path):
            os.write(self._file, b"\n")

    def __call__(self, event: Event) -> None:
        """Appends an event. Raises OSError if it cannot be written, for instance because the disk is full."""
        data = memoryview(format_line(event))
        with self._lock:
            if self._is_torn:
                os.write(self._file, b"\n")  # the disk was full in the middle of a line
            self._is_torn = True
            while data:
                data = data[os.write(self._file, data) :]
            self._is_torn = False

    def close(self) -> None:
        os.close(self._file)


class EventReader:
    """Reads a growing event file from an offset. It skips an incomplete last line.

    The event read last begins at byte `event_offset` and ends before byte `offset`. Events of the classes `skipped` are
    not parsed.
    """

    def __init__(self, path: Path, offset: int = 0, skipped: Sequence[type[Event]] = ()) -> None:
        self._path = path
        self.event_offset = offset
        self.offset = offset
        self._skipped = tuple(f'{{"event": "{kind.event}",'.encode() for kind in skipped)

    def read(self) -> Iterator[Event]:
        """Yields the events that the file holds now. `offset` moves past each one."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.event_offset = self.offset
                self.offset += len(line)
                if line.startswith(self._skipped):
                    continue
                try:
                    event = parse_event(json.loads(line))
                except ValueError:  # an incomplete line: its writer died
                    continue
                if event is not None:
                    yield event


def read_event(path: Path, offset: int) -> Event:
    """Returns the event that begins at an offset of a file."""
    return next(EventReader(path, offset).read())


def read_last_event(path: Path) -> Event | None:
    """Returns the last event of a file, without reading all of it; None if its last line is not an event.

    It skips tags and reports, because they may follow the end of a run.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            *lines, rest = file.read().split(b"\n")
        if rest:  # the last line is incomplete
            return None
        for line in reversed(lines):
            event = parse_event(json.loads(line))
            if not isinstance(event, TagsSet | ReportMade):
                return event
    except (OSError, ValueError):
        pass
    return None


def append_event(path: Path, event: Event) -> None:
    """Appends one event to a file. Raises OSError if it cannot be written."""
    write = EventWriter(path)
    try:
        write(event)
    finally:
        write.close()


def format_line(event: Event) -> bytes:
    """Returns the line of an event, with secrets masked."""
    values = to_fields(event)
    for field in fields(event):
        if field.metadata.get("is_masked") and field.name in values:
            values[field.name] = mask_secrets(values[field.name])
    return (json.dumps(values) + "\n").encode()


def ends_with_newline(path: Path) -> bool:
    """Returns whether a file is empty, or its last line is complete."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        return not size or (file.seek(size - 1) >= 0 and file.read(1) == b"\n")


class DeduplicatingEmitter:
    """Drops metrics that the run's event file already has: a run that returns to a checkpoint repeats steps.

    Metrics of the test split are reported at the step of the exported model, which may be earlier than the step of the
    last attempt. So they may be reported at smaller steps than before, but only once per step.
    """

    def __init__(self, path: Path, emit: Emit) -> None:
        self._emit = emit
        self._last: dict[str, int] = {}
        self._tested: set[tuple[str, int]] = set()
        for event in EventReader(path).read():
            if isinstance(event, MetricsLogged):
                self._note(event)

    def __call__(self, event: Event) -> None:
        if isinstance(event, MetricsLogged):
            values = {key: value for key, value in event.values.items() if self._is_new(key, event.step)}
            event = replace(event, values=values)  # emitted even if empty: it shows progress to the launcher
            self._note(event)
        self._emit(event)

    def _note(self, event: MetricsLogged) -> None:
        for key in event.values:
            self._last[key] = event.step
            if key.startswith(TEST_PREFIX):
                self._tested.add((key, event.step))

    def _is_new(self, key: str, step: int) -> bool:
        if key.startswith(TEST_PREFIX):
            return (key, step) not in self._tested
        return step > self._last.get(key, -1)
