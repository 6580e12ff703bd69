"""The events of runs that may still be written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def events_in(path: Path, offset: int = 0) -> list[dict[str, Any]]:
    """The whole events of a file, which may still be written, after an offset.

    Without the reports of the launcher: it appends them when they are made, which may be after the end of the run.
    """
    if not path.exists():
        return []
    return [event for event in whole_lines(path.read_bytes()[offset:]) if event["event"] != "report"]


def whole_lines(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.split(b"\n")[:-1]:
        try:
            yield json.loads(line)
        except ValueError:  # half a line of a writer that died in it, or a blank one after that
            continue
