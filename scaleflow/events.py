"""`events.jsonl`: what a worker tells, one JSON object to a line.

The worker only ever appends whole lines; the launcher's readers (the terminal, the recorder) each
keep an offset of their own. Whatever dies, what was written stays and is read again verbatim.

The events, in the order of a run's life:

    started   name, pid                                  a process of the run
    ready     name, tags, params, began, steps, epochs,  all is built; from here on there is a run,
              search, [resumed], [parent]                or it goes on at the step `resumed`; in a sweep with
                                                         its folder as `parent`
    tags      values                                     of the run
    checkpoint step, path                                one was written, and read again
    restart   number, reason                             the launcher starts the processes again
    rollback  number, reason                             numbers went bad, and the run has gone back
    waiting   peers, seconds                             the workers wait for each other, so long at most
    met       -                                          all are there
    note      text                                       something the user should know
    metrics   step, values, [epoch, rate]                values of metrics after `step` updates
    system    step, values                               what the launcher measured of this machine and its
                                                         workers, and heard of other machines; `step` counts
                                                         the measurements
    epoch     epoch, step, values                        an epoch is over; for the terminal
    weights   step, values                               how weights are distributed, for TensorBoard
    artifact  path, [folder]                             a file to keep with the run
    data      name, source, kind, classes, splits        the dataset; each split's size, digest, dtypes, shapes
    confusion path, folder, split                        the table of which classes were taken for which
    profile   folder, first, last, artifacts, usual_ms,  steps were traced; their traces are under `folder`
              facts
    model     path, step                                 the exported model's folder
    fault     error                                      what went wrong, if something did
    end       status, [error]                            how the run ended; of a fault the launcher says it
    refused   message, [keep, died]                      instead of `ready`: what was asked can't work;
                                                         `keep` where the log has more to say
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaleflow.secret_masking import mask_secrets

Event = dict[str, Any]

#: In a run's folder.
EVENTS = "events.jsonl"

#: Fields that hold words, in which there may be secrets; not those that something is found again by.
TEXTS = ("name", "tags", "params", "text", "error", "message", "reason", "source", "vain")


class EventWriter:
    """Appends events to a file, secrets masked in their words; safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        self._is_torn = False
        if not ends_with_newline(path):
            os.write(self._file, b"\n")

    def __call__(self, event: str, /, **fields: Any) -> None:
        told = {key: mask_secrets(value) if key in TEXTS else value for key, value in fields.items()}
        line = json.dumps({"event": event, "time": int(time.time() * 1000), **told}) + "\n"
        data = memoryview(line.encode())
        with self._lock:
            if self._is_torn:
                os.write(self._file, b"\n")  # a disk was full within a line
            self._is_torn = True
            while data:
                data = data[os.write(self._file, data) :]
            self._is_torn = False

    def close(self) -> None:
        os.close(self._file)


class EventReader:
    """Reads a growing file of events from an offset on, never a half-written line.

    Attributes:
        offset: the byte behind the last event that was given out.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self.offset = offset

    def read(self) -> Iterator[Event]:
        """The events that are there now; `member_offset` moves with each one given out."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                try:
                    event = json.loads(line)
                except ValueError:  # the half line of a writer that died in it
                    continue
                yield event


def ends_with_newline(path: Path) -> bool:
    """Whether a file is empty or its last line whole."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        return not size or (file.seek(size - 1) >= 0 and file.read(1) == b"\n")


def read_last_end(folder: Path) -> Event | None:
    """The last word on how the run in a folder ended; None where it has not."""
    end: Event | None = None
    for event in EventReader(folder / EVENTS).read():
        if event["event"] == "ready":
            end = None
        elif event["event"] == "end":
            end = event
    return end
