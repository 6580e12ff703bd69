"""Passes what a script prints to the launcher, line by line."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from typing import Any, TextIO

from scaleflow.features.script.events import ScriptPrinted
from scaleflow.interfaces.events import Emit, Event

#: Seconds between two events with printed lines.
SECONDS_BETWEEN_EVENTS = 0.1


class PrintedLines:
    """Collects printed lines, and emits them as events a few times per second, in order with all other events.

    Args:
        emit: takes the events of the process.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._pid = os.getpid()
        self._lines: list[str] = []
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._flush_repeatedly, name="printed lines", daemon=True)
        self._thread.start()

    def add(self, line: str) -> None:
        with self._lock:
            self._lines.append(line)

    def emit(self, event: Event) -> None:
        """Emits an event after the lines that were printed before it. A process that the script forks emits none."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self.flush()
            self._emit(event)

    def flush(self) -> None:
        """Emits the collected lines."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._lines:
                self._emit(ScriptPrinted("\n".join(self._lines)))
                self._lines = []

    def close(self) -> None:
        """Emits the last lines, and ends the thread."""
        self._closing.set()
        self._thread.join()
        self.flush()

    def _flush_repeatedly(self) -> None:
        while not self._closing.wait(SECONDS_BETWEEN_EVENTS):
            self.flush()


class LineStream(io.TextIOBase):
    """A stream for `sys.stdout` of a script. It writes to the log of the process, and collects whole lines.

    Of a line that is written several times with carriage returns, such as a progress bar, only the last text counts.

    Args:
        log: the log of the process.
        lines: collects the lines.
        descriptor: takes bytes, and the text of processes that the script forks.
        before_line: is called before a line is collected.
    """

    def __init__(
        self,
        log: TextIO,
        lines: PrintedLines,
        descriptor: int | None = None,
        before_line: Callable[[], None] = lambda: None,
    ) -> None:
        self._log = log
        self._lines = lines
        self._pid = os.getpid()
        self._descriptor = log.fileno() if descriptor is None else descriptor
        self._before_line = before_line
        self._buffer = os.fdopen(self._descriptor, "wb", buffering=0, closefd=False)
        self._started = ""  # the line that has no end yet
        self._lock = threading.Lock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def buffer(self) -> Any:
        """Takes bytes."""
        return self._buffer

    def reconfigure(self, **options: Any) -> None:
        """Does nothing: the log has the encoding and the buffering that scaleflow gave it."""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        if os.getpid() != self._pid:
            self._buffer.write(text.encode(errors="replace"))
            return len(text)
        self._log.write(text)
        self._before_line()
        self.collect(text)
        return len(text)

    def collect(self, text: str) -> None:
        """Collects text that is in the log already."""
        with self._lock:
            *whole, self._started = (self._started + text).split("\n")
            for line in whole:
                self._lines.add(line.rstrip("\r").rpartition("\r")[2])

    def flush(self) -> None:
        self._log.flush()

    def end_line(self) -> None:
        """Collects the line that has no end yet, at the end of the script."""
        with self._lock:
            if self._started:
                self._lines.add(self._started.rpartition("\r")[2])
                self._started = ""
