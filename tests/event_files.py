"""Writes and reads events by their names and fields, as a test states them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaleflow import runs
from scaleflow.interfaces.events import Event, parse_event, to_fields


def make_event(event: str, /, **fields: Any) -> Event:
    """The event of this name; a field that a test leaves out has its default."""
    made = parse_event({"event": event, **fields})
    assert made is not None, f"there is no event {event} with {', '.join(fields)}"
    return made


class EventWriter(runs.EventWriter):
    """Writes `write("note", text="...")`."""

    def __call__(self, event: Event | str, /, **fields: Any) -> None:
        super().__call__(make_event(event, **fields) if isinstance(event, str) else event)


class EventReader:
    """Gives events as their lines have them."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._reader = runs.EventReader(path, offset)

    @property
    def offset(self) -> int:
        return self._reader.offset

    def read(self) -> Iterator[dict[str, Any]]:
        return map(to_fields, self._reader.read())
