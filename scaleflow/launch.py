"""The launcher's life: start the worker, show and record what it reports, decide how the run ended.

It imports no TensorFlow, and MLflow only in the recorder's thread, while the worker imports
TensorFlow in its own process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import OmegaConf

from scaleflow.errors import WorkerDied
from scaleflow.events import Event, Reader, Writer
from scaleflow.interfaces import Plan
from scaleflow.masking import masked, masked_override
from scaleflow.record import STATE, Recorder
from scaleflow.terminal import Display, display_for, duration
from scaleflow.tracking import tracker_for
from scaleflow.worker import EVENTS, LOG, Job, work

FINISHED, FAILED, REFUSED = 0, 1, 2

POLL_SECONDS = 0.02
GRACE_SECONDS = 30.0

KEPT = ("config.yaml", "overrides.yaml", "environment.txt")


def launch(plan: Plan, config: Any, overrides: Sequence[str], folder: Path, started: float) -> int:
    """Runs one plan from start to end.

    Args:
        plan: checked.
        config: the composed config, interpolations kept, for `config.yaml`.
        overrides: as typed, for `overrides.yaml`.
        folder: the run's own; exists and can be written.
        started: when the command began, in seconds since the epoch.

    Returns:
        The command's exit code.
    """
    display = display_for()
    tracker = tracker_for(plan.tracking)
    write_configs(folder, config, overrides)
    recorder = Recorder(tracker, folder / EVENTS, [folder / name for name in KEPT])
    job = Job(plan, folder.absolute(), started)
    run = InlineRun if plan.debug.inline else WorkerRun
    with stop_signals() as stop:
        outcome = run(job, recorder, display, stop).run()
    return conclude(plan, folder, started, recorder, display, outcome)


def write_configs(folder: Path, config: Any, overrides: Sequence[str]) -> None:
    """What was asked, secrets masked."""
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(masked(config))))
    (folder / "overrides.yaml").write_text(OmegaConf.to_yaml([masked_override(o) for o in overrides]))


def write_environment(folder: Path) -> None:
    """The versions of everything that is installed."""
    found = sorted({f"{d.name}=={d.version}" for d in distributions()}, key=str.lower)
    (folder / "environment.txt").write_text(f"python=={sys.version.split()[0]}\n" + "\n".join(found) + "\n")


class Stop:
    """Whether, and by which signal, the user or the system asked for an end."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.times = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.times += 1

    def is_set(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turns SIGINT and SIGTERM into a flag; elsewhere than in the main thread they stay as they are."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Outcome:
    """How a run ended.

    Attributes:
        code: the exit code.
        last: the last event, `end` or `refused`.
        test: the test metrics.
    """

    def __init__(self) -> None:
        self.code = FAILED
        self.last: Event = {}
        self.test: dict[str, float] = {}
        self.is_ready = False

    def take(self, event: Event) -> None:
        if event["event"] == "ready":
            self.is_ready = True
        elif event["event"] in ("end", "refused"):
            self.last = event
        elif event["event"] == "metrics":
            self.test.update({k: v for k, v in event["values"].items() if k.startswith("test/")})


class WorkerRun:
    """A run whose worker is a process of its own."""

    def __init__(self, job: Job, recorder: Recorder, display: Display, stop: Stop) -> None:
        self._job = job
        self._recorder = recorder
        self._display = display
        self._stop = stop
        self._reader = Reader(job.folder / EVENTS)
        self._outcome = Outcome()

    def run(self) -> Outcome:
        fault: Exception | None = None
        process: subprocess.Popen[bytes] | None = None
        try:
            with self._started() as process:
                write_environment(self._job.folder)
                self._recorder.start()
                self._watch(process)
        except Exception as error:  # of the launcher itself: the run has to end truthfully all the same
            traceback.print_exc()
            fault = error
        self._show_events()
        if not self._outcome.last:
            self._speak_for_the_dead(process, fault)
            self._show_events()
        self._display.close()
        self._outcome.code = self._code()
        return self._outcome

    @contextlib.contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        """The worker, its output in its log; ended on the way out if it is still there."""
        with (self._job.folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "scaleflow.worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=worker_environment(),
                process_group=0,  # Ctrl-C reaches the launcher alone
            )
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it died at once; its exit says why
                process.stdin.write(self._job.to_json().encode() + b"\n")
                process.stdin.flush()
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Shows events until the worker is gone, and hands on what asks for an end."""
        deadline: float | None = None
        while process.poll() is None:
            self._show_events()
            if self._recorder.refusal is not None:
                process.kill()
            if self._stop.is_set() and deadline is None:
                process.terminate()
                self._display.line(f"stopping ({signal.Signals(self._stop.signal or 0).name}); again to stop at once")
                deadline = time.monotonic() + GRACE_SECONDS
            if deadline is not None and (
                self._stop.times > 1 or time.monotonic() > deadline or not self._outcome.is_ready
            ):
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)

    def _show_events(self) -> None:
        for event in self._reader.read():
            self._outcome.take(event)
            self._display.show(event)

    def _speak_for_the_dead(self, process: subprocess.Popen[bytes] | None, fault: Exception | None) -> None:
        """Appends the last word that the worker could not say itself."""
        status = "FAILED"
        if fault is not None or process is None:
            error = f"the launcher failed: {type(fault).__name__}: {fault}"
        elif self._stop.is_set():
            status, error = "KILLED", f"stopped by {signal.Signals(self._stop.signal or 0).name}"
        else:
            error = str(WorkerDied(how_it_ended(process.returncode), last_lines(self._job.folder / LOG)))
        write = Writer(self._job.folder / EVENTS)
        if self._outcome.is_ready:
            write("end", status=status, error=error)
        else:
            write("refused", message=error, keep=True, died=True)
        write.close()

    def _code(self) -> int:
        if self._stop.is_set() and self._outcome.last.get("status") != "FINISHED":
            return 128 + (self._stop.signal or 0)
        if self._recorder.refusal is not None:
            return REFUSED
        if self._outcome.last["event"] == "refused":
            return FAILED if self._outcome.last.get("died") else REFUSED
        return FINISHED if self._outcome.last["status"] == "FINISHED" else FAILED


class InlineRun(WorkerRun):
    """A run whose worker is this very process: for pdb, with output where it falls."""

    def run(self) -> Outcome:
        write_environment(self._job.folder)
        self._recorder.start()
        write = Writer(self._job.folder / EVENTS)

        def emit(event: str, /, **fields: Any) -> None:
            write(event, **fields)
            self._show_events()

        work(self._job, emit, self._stop.is_set)
        self._display.close()
        self._outcome.code = self._code()
        return self._outcome


def worker_environment() -> dict[str, str]:
    """The worker's: Keras on TensorFlow whatever keras.json says, and its log written as it comes."""
    return {**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONUNBUFFERED": "1"}


def how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def last_lines(log: Path, count: int = 3) -> str:
    with log.open(errors="replace") as lines:
        return " | ".join(line.strip() for line in deque((line for line in lines if line.strip()), count))


def conclude(plan: Plan, folder: Path, started: float, recorder: Recorder, display: Display, outcome: Outcome) -> int:
    """Waits for the recorder, and tells the user how it ended and where to look."""
    refusal = recorder.refusal
    if outcome.last.get("event") == "refused" or refusal is not None:
        message = str(refusal) if refusal is not None else outcome.last["message"]
        print(f"scaleflow: {masked(message)}", file=sys.stderr)
        if recorder.is_alive():
            recorder.finish(0)  # a process that ends in a store's migration leaves half a store
        if refusal is not None or not outcome.last.get("keep"):
            discard(folder)
        return outcome.code
    is_recorded = recorder.finish(plan.tracking.flush_seconds)
    status = outcome.last["status"]
    error = outcome.last.get("error")
    if error:
        print(f"scaleflow: {error}", file=sys.stderr)
    rows = [("status", f"{status} in {duration(time.time() - started)}")]
    rows += [(k.replace("/", " "), f"{v:.4f}") for k, v in outcome.test.items()]
    rows += [("output", os.path.relpath(folder))]
    if is_recorded:
        rows += recorder.where()
    display.summary(rows)
    if not is_recorded:
        print(
            f"scaleflow: the store did not take everything within {plan.tracking.flush_seconds:g} s "
            f"({recorder.reason}); all of it is in {os.path.relpath(folder / EVENTS)}",
            file=sys.stderr,
        )
    return outcome.code


def discard(folder: Path) -> None:
    """Takes away what was written for a run that is not to be, and the folder if that was all."""
    for name in (*KEPT, EVENTS, LOG, STATE):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        for place in (folder, *folder.parents):
            if place == Path.cwd():
                break
            place.rmdir()
