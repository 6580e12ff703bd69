"""What a run looks like while it runs: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scaleflow.events import Event

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.status import Status

METRICS_SHOWN = ("train/loss", "train/accuracy", "train/mae", "val/loss", "val/accuracy", "val/mae")


def display_for(stream: TextIO | None = None) -> Display:
    """A bar where someone is looking, lines where nobody is."""
    stream = stream or sys.stdout  # of now: a notebook has its own
    return BarDisplay(stream) if stream.isatty() else Display(stream)


class Display:
    """Plain lines: one to an epoch, one to a note, and the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begin: float | None = None
        self._first = 0
        self._steps = 0

    def show_event(self, event: Event) -> None:
        """Takes each event once, in order."""
        method = getattr(self, f"_{event['event']}", None)
        if method is not None:
            method(event)

    def print_line(self, text: str, style: str = "") -> None:
        """Prints a line; when whoever was reading has gone, or the disk of a log is full, the run goes on unseen."""
        try:
            self._print(text, style)
        except BrokenPipeError:
            self.close()
            silence_stream(self._stream)
        except OSError:  # there may be room again for the next one
            pass

    def _print(self, text: str, style: str) -> None:
        print(text, file=self._stream, flush=True)

    def print_error(self, text: str) -> None:
        """Says on standard error what went wrong."""
        write_error(text)

    def print_summary(self, rows: Sequence[tuple[str, str]]) -> None:
        """The last words: aligned rows of (word, value)."""
        width = max(len(word) for word, _ in rows)
        for word, value in rows:
            self.print_line(f"{word:<{width}}  {value}")

    def close(self) -> None:
        """No more events will come."""

    def _ready(self, event: Event) -> None:
        self._steps = event["steps"]
        self._begin = None
        resolved = {k.removeprefix("resolved."): v for k, v in event["params"].items() if k.startswith("resolved.")}
        if event.get("resumed"):
            self.print_line(f"goes on at step {event['resumed']}")
        self.print_line(
            f"{event['name']}: {resolved['parameters']} parameters, {resolved['replicas']} replica(s) on "
            f"{resolved['hardware']}, global batch {resolved['global_batch_size']}, {event['steps']} steps"
        )

    def _metrics(self, event: Event) -> None:
        """Counts the time from the end of the first call, which makes ready what later ones find."""
        if self._begin is None and "train/loss" in event["values"]:
            self._begin = time.monotonic()
            self._first = event["step"]

    def _note(self, event: Event) -> None:
        self.print_line(f"note: {event['text']}", "yellow")

    def _epoch(self, event: Event) -> None:
        epochs = f"{event['epoch']:>{len(str(event['epochs']))}}/{event['epochs']}"
        left = self._time_left(event["step"])
        self.print_line(f"epoch {epochs}  {format_metrics(event['values'])}" + (f"  {left} left" if left else ""))

    def _time_left(self, step: int) -> str:
        """The time left, judged by the time taken so far."""
        if self._begin is None or step <= self._first or step >= self._steps:
            return ""
        return format_duration((time.monotonic() - self._begin) / (step - self._first) * (self._steps - step))


class JobDisplay(Display):
    """One of several jobs: each line begins with its number, and the end is one line."""

    def __init__(self, stream: TextIO, number: int) -> None:
        super().__init__(stream)
        self._number = number

    def _print(self, text: str, style: str) -> None:
        super()._print(f"#{self._number} {text}", style)

    def print_error(self, text: str) -> None:
        super().print_error(f"#{self._number} {text}")

    def print_summary(self, rows: Sequence[tuple[str, str]]) -> None:
        (_, status), *rest = rows
        self.print_line(
            "  ".join([status, *(f"{word} {value}" for word, value in rest if word in self.SAID or "test" in word)])
        )

    #: Of the last words; the rest is in the sweep's report.
    SAID = ("output",)


class BarDisplay(Display):
    """The same lines above a progress bar, with a little colour."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        from rich.console import Console

        self._console = Console(file=stream, highlight=False)
        self._waiting: Status | None = self._console.status("starting TensorFlow")
        self._waiting.start()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, style=style or None, markup=False, soft_wrap=True)

    def show_event(self, event: Event) -> None:
        self._stop_waiting()
        super().show_event(event)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.stop()
            self._waiting = None

    def close(self) -> None:
        self._stop_waiting()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _ready(self, event: Event) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super()._ready(event)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("", total=event["steps"], text="")
        self._progress.start()

    def _metrics(self, event: Event) -> None:
        super()._metrics(event)
        if self._progress is not None and self._task is not None and "train/loss" in event["values"]:
            values = {**event["values"], "perf/examples_per_second": event.get("rate") or math.nan}
            self._progress.update(self._task, completed=event["step"], text=format_metrics(values))

    def _time_left(self, step: int) -> str:
        return ""  # the bar tells

    def _end(self, event: Event) -> None:
        self.close()


def write_error(text: str) -> None:
    """Says what is wrong where errors are read, if that can be written to."""
    with contextlib.suppress(OSError):
        print(f"scaleflow: {text}", file=sys.stderr, flush=True)


def silence_stream(stream: TextIO) -> None:
    """Sends what is written to a closed pipe nowhere, Python's own last flush too."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def format_metrics(values: Mapping[str, Any]) -> str:
    """`loss 0.312 accuracy 0.91 val loss 0.35 ... 61,000 examples/s`."""
    shown = [f"{k.removeprefix('train/').replace('/', ' ')} {values[k]:.4f}" for k in METRICS_SHOWN if k in values]
    rate = values.get("perf/examples_per_second")
    if rate is not None and math.isfinite(rate):
        shown.append(f"{rate:,.0f} examples/s")
    return "  ".join(shown)


def format_duration(seconds: float) -> str:
    """`8 s`, `4 min 10 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
