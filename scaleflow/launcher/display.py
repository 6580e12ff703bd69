"""Displays a run: its start, its training and its result, with a bar on a terminal and plain lines in a log."""

from __future__ import annotations

import functools
import io
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, TextIO

from scaleflow.interfaces.clock import measure_since
from scaleflow.interfaces.events import (
    EpochEnded,
    Event,
    MetricsLogged,
    Note,
    PhaseBegan,
    RunEnded,
    RunReady,
    RunRefused,
    StepsPlanned,
    UploadAwaited,
    Waiting,
)
from scaleflow.interfaces.formatting import format_elapsed
from scaleflow.launcher.command_exit import write_error
from scaleflow.launcher.lines import fit_columns, format_row, format_run_line, list_figures, measure_width, wrap_line
from scaleflow.launcher.progress import BAR_WIDTH, TrainingProgress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.status import Status
    from rich.text import Text


#: After this many seconds without a line, a log gets a line about the current work.
QUIET_SECONDS = 2.0

#: The same limit while TensorFlow is imported. The import is usually faster, so a normal start gets no such line.
IMPORT_QUIET_SECONDS = 10.0

#: The phase that begins with the import of TensorFlow.
IMPORTING = "importing TensorFlow"

#: In a long training, such lines become rarer: the pause is this share of the time so far.
QUIET_SHARE = 0.02

#: In a phase such a line has no news, so the pauses grow faster, up to `LONGEST_QUIET` seconds.
PHASE_SHARE = 0.5
LONGEST_QUIET = 600.0

#: A phase gets no such line in its first seconds, because it may end soon.
SHORTEST_SHOWN = 0.5

#: Seconds between two checks for such a line.
TICK_SECONDS = 0.1

#: A phase gets its own line at its end if it took at least this many seconds.
SHORTEST_PHASE = 0.1


def display_for(stream: TextIO | None = None, is_plain: bool = False, is_chief: bool = True) -> Display:
    """Makes a display: a progress bar on a terminal, plain lines elsewhere.

    Args:
        stream: receives the output; None: standard output.
        is_plain: whether to use plain lines even on a terminal. They come only from this thread, so that a debugger can
            be used.
        is_chief: whether to show the phases of the start and the end. Only one process of a run does so.
    """
    stream = stream or sys.stdout  # not a default argument, because a notebook replaces it
    if stream.isatty() and os.environ.get("TERM") != "dumb" and not is_plain:
        return BarDisplay(stream, is_chief)
    return Display(stream, is_chief, breaks_silence=is_chief and not is_plain)


def hidden_display() -> Display:
    """Makes a display that shows nothing, for the Python API."""
    return Display(io.StringIO(), shows_phases=False, breaks_silence=False)


#: If a phase was this many seconds longer by the worker's clock than by ours, the worker's clock was changed.
CLOCK_STEP = 60.0


@dataclass(frozen=True)
class ShownPhase:
    """A part of the work before or after training."""

    text: str
    began: float  # the start, in seconds of this process's monotonic clock
    began_ms: int | None = None  # the start in milliseconds of the worker's clock, if the worker reported the phase

    def measure(self, now_ms: int | None = None) -> float:
        """Returns the duration in seconds until now; with `now_ms`, until then by the worker's
        clock, which may differ.
        """
        own_seconds = time.monotonic() - self.began
        if now_ms is not None and self.began_ms is not None:
            seconds = (now_ms - self.began_ms) / 1000
            if 0 <= seconds < own_seconds + CLOCK_STEP:
                return seconds
        return own_seconds

    def describe(self) -> str:
        """Returns a line for a log that has had no line for some time."""
        return f"still {self.text} ({format_elapsed(self.measure())})"

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(f"{self.text} ({format_elapsed(self.measure())})")


class Display:
    """Prints plain lines: one per phase, per epoch and per note, and the summary.

    Args:
        breaks_silence: whether a thread prints the current work if nothing else is printed. Without it, a phase also
            gets a line at its start.
    """

    #: The monotonic time of the last line of any display of this process. All displays share one stream.
    printed_at: ClassVar[float] = time.monotonic()

    _lock: ClassVar[threading.RLock] = threading.RLock()

    #: Prints progress from the command's first line until another display takes over.
    greeting: ClassVar[Display | None] = None

    #: Whether it draws on a terminal, where a person looks at it.
    is_on_terminal: ClassVar[bool] = False

    #: The prefix of each line.
    _start = ""

    def __init__(self, stream: TextIO, shows_phases: bool = True, breaks_silence: bool = True) -> None:
        self._stream = stream
        self._shows_phases = shows_phases
        self._breaks_silence = breaks_silence
        self._noted: set[str] = set()
        self._phase: ShownPhase | None = None
        self._training: TrainingProgress | None = None
        self._closing = threading.Event()
        self._closing.set()  # no thread runs
        end_greeting()
        if time.monotonic() - self.printed_at > QUIET_SECONDS:
            Display.printed_at = time.monotonic()  # this run's silence begins now, not with an earlier run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def show_event(self, event: Event) -> None:
        """Shows an event. Each event must be passed once, in order."""
        with self._lock:
            match event:
                case PhaseBegan():
                    self._begin_phase(ShownPhase(event.text, time.monotonic(), event.time))
                case Waiting():
                    what = "the other processes" if event.peers else "the TPU"
                    self._begin_phase(ShownPhase(f"waiting for {what}", time.monotonic(), event.time))
                case UploadAwaited() if event.seconds:
                    self._begin_phase(ShownPhase("uploading the last checkpoint", time.monotonic(), event.time))
                case RunReady():
                    self._end_phase(event.time)
                    self._show_ready(event)
                case StepsPlanned() | MetricsLogged() | EpochEnded():
                    self._show_training(event)
                case Note() if event.text not in self._noted:
                    self._noted.add(event.text)
                    self.print_line(f"note: {event.text}", "yellow")
                case RunEnded() | RunRefused():
                    if isinstance(event, RunEnded) and event.status == "FINISHED":
                        self._end_phase(event.time)
                    self.close()

    # Lines ------------------------------------------------------------------------------------

    @property
    def _room(self) -> int | None:
        """The maximum length of a line; None if it is unlimited."""
        width = measure_width(self._stream)
        return None if width is None else width - len(self._start)

    def print_line(self, text: str, style: str = "") -> None:
        """Prints a line. On a terminal it is broken between words."""
        self._print_lines(wrap_line(text, self._room), style)

    def _print_lines(self, lines: Iterable[str], style: str = "") -> None:
        """Prints lines. The run continues if nobody reads the output, or if a log's disk is full."""
        with self._lock:
            Display.printed_at = time.monotonic()
            try:
                self._print("\n".join(f"{self._start}{line}" for line in lines), style)
            except BrokenPipeError:
                self.close()
                silence_stream(self._stream)
            except OSError:  # the disk is full; there may be room for the next line
                pass

    def _print(self, text: str, style: str) -> None:
        self._stream.write(f"{text}\n")  # one call, because other displays may print at the same time
        self._stream.flush()

    def print_error(self, text: str) -> None:
        """Prints an error to standard error."""
        write_error(text)

    def print_summary(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints the summary of the run: aligned rows of (label, value)."""
        column = max(len(label) for label, _ in rows) + 2
        for label, value in rows:
            self._print_lines(format_row(label, value, column, width=self._room))

    def close(self) -> None:
        """Ends the thread, the current phase and the bar. The display can be used again."""
        with self._lock:
            self._closing.set()
            self._phase = self._training = None

    # Phases -----------------------------------------------------------------------------------

    def begin_phase(self, text: str, since: float | None = None) -> None:
        """Shows the current phase until the next phase begins or the run is ready.

        Args:
            text: the work, such as `importing TensorFlow`.
            since: the start, in seconds since the epoch; None: now.
        """
        earlier = 0.0 if since is None else measure_since(since)
        with self._lock:
            self._begin_phase(ShownPhase(text, time.monotonic() - earlier))

    def end_phase(self) -> None:
        """Ends the phase, and prints how long it took."""
        with self._lock:
            self._end_phase()

    def _begin_phase(self, phase: ShownPhase) -> None:
        self._end_phase(phase.began_ms)
        self._training = None
        self._phase = phase
        self._show_phase(phase)

    def _end_phase(self, now_ms: int | None = None) -> None:
        phase = self._phase
        self._phase = None
        if phase is None:
            return
        self._hide_phase()
        seconds = phase.measure(now_ms)
        if self._shows_phases and seconds >= SHORTEST_PHASE:
            self.print_line(f"{phase.text} ({format_elapsed(seconds)})", "dim")

    def _show_phase(self, phase: ShownPhase) -> None:
        if self._breaks_silence:
            self._start_thread()
        elif self._shows_phases:
            self.print_line(phase.text)

    def _hide_phase(self) -> None:
        pass

    # Silence ----------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        if self._closing.is_set():
            self._closing = threading.Event()
            threading.Thread(target=self._tick, args=(self._closing,), name="display", daemon=True).start()

    def _tick(self, closing: threading.Event) -> None:
        while not closing.wait(TICK_SECONDS):
            with self._lock:
                if not closing.is_set():
                    self.break_silence()

    def break_silence(self) -> None:
        """Prints the current work if no line was printed for `QUIET_SECONDS`."""
        doing = self._phase or self._training
        if doing is None:
            return
        now = time.monotonic()
        elapsed = now - doing.began
        if isinstance(doing, ShownPhase):
            shortest = IMPORT_QUIET_SECONDS if doing.text.startswith(IMPORTING) else QUIET_SECONDS
            quiet = max(shortest, min(elapsed * PHASE_SHARE, LONGEST_QUIET))
        else:
            quiet = max(QUIET_SECONDS, elapsed * QUIET_SHARE)
        if elapsed >= SHORTEST_SHOWN and now - self.printed_at >= quiet:
            self.print_line(doing.describe() if isinstance(doing, ShownPhase) else doing.describe(self._room))

    # Training ---------------------------------------------------------------------------------

    def _show_ready(self, event: RunReady) -> None:
        self._training = TrainingProgress(event.steps)
        if event.resumed:
            self.print_line(f"resumed at step {event.resumed}")
        self.print_line(format_run_line(event))
        if self._breaks_silence:
            self._start_thread()

    def _show_training(self, event: StepsPlanned | MetricsLogged | EpochEnded) -> None:
        match event:
            case StepsPlanned():
                self._extend_training(event.steps)
            case MetricsLogged():
                self._show_metrics(event)
            case EpochEnded():
                self._show_epoch(event)

    def _extend_training(self, steps: int) -> None:
        if self._training is not None:
            self._training.extend(steps)

    def _show_metrics(self, event: MetricsLogged) -> None:
        if self._training is not None and "train/loss" in event.values:
            self._training.add(event)

    def _show_epoch(self, event: EpochEnded) -> None:
        if self._training is not None:
            self._training.end_epoch()
        start = f"epoch {event.epoch:>{len(str(event.epochs))}}/{event.epochs}"
        self.print_line(fit_columns(start, list_figures(event.values, self._time_left()), self._room))

    def _time_left(self) -> str:
        return "" if self._training is None else self._training.describe_time_left()


class JobDisplay(Display):
    """Shows one of several jobs: each line begins with the job's number, and the summary is one line.

    The set `noted` contains the notes that other jobs have already shown.
    """

    def __init__(self, stream: TextIO, number: int, noted: set[str] | None = None) -> None:
        super().__init__(stream, shows_phases=False)
        self._start = f"#{number} "
        self._noted = self._noted if noted is None else noted

    def print_error(self, text: str) -> None:
        super().print_error(f"{self._start}{text}")

    def print_summary(self, rows: Sequence[tuple[str, str]]) -> None:
        (_, status), *rest = rows
        self.print_line(
            "  ".join([status, *(f"{label} {value}" for label, value in rest if label in self.SAID or "test" in label)])
        )

    #: Rows of the summary to show, in addition to the status and the test metrics. The sweep's report has the other
    #: rows.
    SAID = ("output",)


class BarDisplay(Display):
    """Prints the same lines above a spinner or a progress bar, with some colour."""

    is_on_terminal = True

    def __init__(self, stream: TextIO, shows_phases: bool = True) -> None:
        super().__init__(stream, shows_phases, breaks_silence=False)
        from rich.console import Console

        self._console = Console(file=stream, highlight=False)
        self._spinner: Status | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, style=style or None, markup=False, soft_wrap=True)

    def close(self) -> None:
        super().close()
        self._hide_phase()
        self._hide_bar()

    def _show_phase(self, phase: ShownPhase) -> None:
        self._hide_bar()
        self._spinner = self._console.status(phase)
        self._spinner.start()

    def _hide_phase(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def _hide_bar(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _show_ready(self, event: RunReady) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, RenderableColumn

        super()._show_ready(event)
        self._hide_bar()  # the bar of the attempt before a restart
        assert self._training is not None
        columns = (BarColumn(BAR_WIDTH), MofNCompleteColumn(), RenderableColumn(self._training))
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("", total=event.steps or None)
        self._progress.start()

    def _extend_training(self, steps: int) -> None:
        super()._extend_training(steps)
        if self._progress is not None:
            for task in self._progress.tasks:
                task.total = steps or None  # `update` would keep the total if there is no other one

    def _show_metrics(self, event: MetricsLogged) -> None:
        super()._show_metrics(event)
        if self._progress is not None and self._task is not None and "train/loss" in event.values:
            self._progress.update(self._task, completed=event.step)

    def _time_left(self) -> str:
        return ""  # the progress bar shows it


@functools.cache
def greet(line: str) -> None:
    """Prints the first line of a training command, once, and shows progress until another display takes over."""
    display = Display(sys.stdout, shows_phases=False)
    display.print_line(line)
    display.begin_phase("reading the config")
    Display.greeting = display


def end_greeting() -> None:
    """Ends the greeting, if there is one. Called when the command ends or another display takes over."""
    if Display.greeting is not None:
        Display.greeting.close()
        Display.greeting = None


def silence_stream(stream: TextIO) -> None:
    """Redirects a stream whose pipe is closed to the null device, so that Python's last flush succeeds."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
