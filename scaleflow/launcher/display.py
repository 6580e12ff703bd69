"""Shows a run while it trains: a progress bar on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scaleflow.events import EpochEnded, Event, MetricsLogged, Note, RunEnded, RunReady
from scaleflow.formatting import format_duration, format_number

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.status import Status

METRICS_SHOWN = ("train/loss", "train/accuracy", "train/mae", "val/loss", "val/accuracy", "val/mae")

#: The usual width of a number, so that the lines of epochs have columns.
NUMBER_WIDTH = 6


def display_for(stream: TextIO | None = None, is_plain: bool = False) -> Display:
    """Makes a display: a progress bar on a terminal, plain lines elsewhere.

    Args:
        stream: receives the output; None: standard output.
        is_plain: whether to use plain lines on a terminal, too.
    """
    stream = stream or sys.stdout  # not a default argument, because a notebook replaces it
    return BarDisplay(stream) if stream.isatty() and not is_plain else Display(stream)


class Display:
    """Prints plain lines: one per epoch, one per note, and the summary."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begin: float | None = None
        self._first = 0
        self._steps = 0

    def show_event(self, event: Event) -> None:
        """Shows an event. Each event must be passed once, in order."""
        match event:
            case RunReady():
                self._show_ready(event)
            case MetricsLogged():
                self._show_metrics(event)
            case Note():
                self.print_line(f"note: {event.text}", "yellow")
            case EpochEnded():
                self._show_epoch(event)
            case RunEnded():
                self._show_end()

    def print_line(self, text: str, style: str = "") -> None:
        """Prints a line. The run continues if nobody reads the output any more, or if the disk of a log is full."""
        try:
            self._print(text, style)
        except BrokenPipeError:
            self.close()
            silence_stream(self._stream)
        except OSError:  # the disk is full; there may be room for the next line
            pass

    def _print(self, text: str, style: str) -> None:
        print(text, file=self._stream, flush=True)

    def print_error(self, text: str) -> None:
        """Prints an error to standard error."""
        write_error(text)

    def print_summary(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints the summary of the run: aligned rows of (label, value)."""
        width = max(len(label) for label, _ in rows)
        for label, value in rows:
            self.print_line(f"{label:<{width}}  {value}")

    def close(self) -> None:
        """Ends the display: no more events will come."""

    def _show_ready(self, event: RunReady) -> None:
        self._steps = event.steps
        self._begin = None
        resolved = {k.removeprefix("resolved."): v for k, v in event.params.items() if k.startswith("resolved.")}
        if event.resumed:
            self.print_line(f"goes on at step {event.resumed}")
        self.print_line(
            f"{event.name}: {resolved['parameters']} parameters, {resolved['replicas']} replica(s) on "
            f"{resolved['hardware']}, global batch {resolved['global_batch_size']}, {event.steps} steps"
        )

    def _show_metrics(self, event: MetricsLogged) -> None:
        """Starts the clock after the first call of the training loop, which includes the compilation."""
        if self._begin is None and "train/loss" in event.values:
            self._begin = time.monotonic()
            self._first = event.step

    def _show_epoch(self, event: EpochEnded) -> None:
        epochs = f"{event.epoch:>{len(str(event.epochs))}}/{event.epochs}"
        left = self._time_left(event.step)
        self.print_line(f"epoch {epochs}  {format_metrics(event.values)}" + (f"  {left} left" if left else ""))

    def _show_end(self) -> None:
        pass

    def _time_left(self, step: int) -> str:
        """Estimates the time left from the speed so far; empty if it is not known."""
        if self._begin is None or step <= self._first or step >= self._steps:
            return ""
        return format_duration((time.monotonic() - self._begin) / (step - self._first) * (self._steps - step))


class JobDisplay(Display):
    """Shows one of several jobs: each line begins with the job's number, and the summary is one line."""

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
            "  ".join([status, *(f"{label} {value}" for label, value in rest if label in self.SAID or "test" in label)])
        )

    #: Rows of the summary that are shown besides the status and the test metrics. The sweep's report has the others.
    SAID = ("output",)


class BarDisplay(Display):
    """Prints the same lines above a progress bar, with some colour."""

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

    def _show_ready(self, event: RunReady) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super()._show_ready(event)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("", total=event.steps, text="")
        self._progress.start()

    def _show_metrics(self, event: MetricsLogged) -> None:
        super()._show_metrics(event)
        if self._progress is not None and self._task is not None and "train/loss" in event.values:
            values = {**event.values, "perf/examples_per_second": event.rate or math.nan}
            self._progress.update(self._task, completed=event.step, text=format_metrics(values))

    def _time_left(self, step: int) -> str:
        return ""  # the progress bar shows it

    def _show_end(self) -> None:
        self.close()


def write_error(text: str) -> None:
    """Prints an error to standard error, if that can be written."""
    with contextlib.suppress(OSError):
        print(f"scaleflow: {text}", file=sys.stderr, flush=True)


def silence_stream(stream: TextIO) -> None:
    """Redirects a stream to a closed pipe to the null device, so that Python's last flush does not fail either."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def format_metrics(values: Mapping[str, Any]) -> str:
    """Formats metrics as `loss 0.312   accuracy 0.91    val loss 0.35    61,000 examples/s`, in columns."""
    shown = [
        f"{name.removeprefix('train/').replace('/', ' ')} {format_number(values[name]):<{NUMBER_WIDTH}}"
        for name in METRICS_SHOWN
        if name in values
    ]
    rate = values.get("perf/examples_per_second")
    if rate is not None and math.isfinite(rate):
        shown.append(f"{rate:,.0f} examples/s")
    return "  ".join(shown).rstrip()
