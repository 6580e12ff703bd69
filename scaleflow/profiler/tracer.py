"""Traces the steps of a window in a worker, with a marker around each step."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import platform
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from scaleflow.interfaces import Profiler
from scaleflow.interfaces.events import Emit, Note, StepsProfiled
from scaleflow.profiler.analysis_process import window_name, xplane_path
from scaleflow.profiler.windows import Window, Windows

#: The symbol of TensorFlow's host trace level, which is NO_TRACE while nothing is traced.
TRACE_LEVEL_SYMBOL = "_ZN3tsl8profiler8internal13g_trace_levelE"
NO_TRACE = -1

COLLECT_SECONDS = 60.0
POLL_SECONDS = 0.01

#: The x86-64 instruction `ret`.
RETURN = b"\xc3"


class StepTracer:
    """Traces windows of steps, and writes each window's xplane file to the path that TensorBoard expects.

    All workers make the same calls. Steps count from 1.

    Args:
        options: the config group `profiler`.
        folder: the run's folder for traces.
        worker: this process's name, which becomes the name of the trace file.
        emit: receives an event `profile` for each window, and notes; None in a worker that records no events.
        facts: returns facts about the run for the summary, as plain values.
        in_child: whether a child process collects the trace (`stop_in_child`).
    """

    def __init__(
        self,
        options: Profiler,
        folder: Path,
        worker: str,
        emit: Emit | None,
        facts: Callable[[], Mapping[str, Any]],
        in_child: bool = False,
    ) -> None:
        self._windows = Windows(options.windows)
        self._is_alone = len(options.windows) == 1
        self._folder = folder
        self._worker = worker
        self._emit = emit
        self._facts = facts
        self._stop = stop_in_child if in_child else tf.profiler.experimental.stop
        self._under_way: tuple[Window, int, str] | None = None
        self._written: list[tuple[int, int]] = []
        self._last = 0

    def steps_left(self, step: int) -> int | None:
        """Returns how many steps the call after `step` may take, so that no window starts inside a call.

        None: any number.
        """
        return self._windows.steps_left(step)

    @contextlib.contextmanager
    def trace_call(self, step: int) -> Iterator[bool]:
        """Traces the call in the `with` block, which starts with `step`, if the step is in a window.

        Yields whether the call must take only this step.
        """
        if not self._windows.is_single(step):
            yield False
            return
        window = self._windows.find_window(step)
        if window is not None and self._under_way is None:
            self._begin(window, step)
        if self._under_way is None:
            yield True
            return
        # With `_r` xprof counts steps by these markers. The call contains no loop, whose rounds xprof would count.
        with tf.profiler.experimental.Trace("train", step_num=step, _r=1):
            yield True

    def count_steps(self, step: int) -> None:
        """Records that `step` steps are done. Writes the trace of a window that ends with this step."""
        self._last = step
        if self._under_way is not None and step >= self._under_way[0][1]:
            self.close()

    def close(self) -> None:
        """Writes the trace of the current window, if there is one."""
        if self._under_way is None:
            return
        window, first, folder = self._under_way
        self._under_way = None
        self._windows.end_window(window)
        try:
            self._stop()
            (xplane,) = Path(folder).rglob("*.xplane.pb")
            path = xplane_path(self._folder, (first, self._last), self._worker)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(xplane, path)
            self._written.append((first, self._last))
        except (tf.errors.OpError, OSError, ValueError) as error:  # for example a full disk; training continues
            self._note(f"profiler: the trace of steps {first} to {self._last} could not be written: {error}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def report(self, usual_ms: float | None) -> None:
        """Reports the written traces. Call it after all workers have written theirs.

        Args:
            usual_ms: the mean time of an untraced step in milliseconds, including waiting for input; None: unknown.
        """
        written = self._written
        self._written = []
        if self._emit is None:
            return
        for first, last in written:
            artifacts = "profile" if self._is_alone else f"profile/{window_name((first, last))}"
            self._emit(
                StepsProfiled(
                    folder=str(self._folder),
                    first=first,
                    last=last,
                    artifacts=artifacts,
                    usual_ms=usual_ms,
                    facts=dict(self._facts()),
                )
            )

    def finish(self, step: int) -> None:
        """Notes the windows that were never traced, because they start after `step`, the last step of the run."""
        for first, last in self._windows.coming:
            if step < first:
                self._note(f"profiler: steps {first} to {last} were not traced, because the run ended at step {step}")

    def _begin(self, window: Window, step: int) -> None:
        folder = tempfile.mkdtemp(prefix="scaleflow-profile-")
        try:
            tf.profiler.experimental.start(folder)
        except tf.errors.OpError as error:  # for example, a user's callback is already tracing
            shutil.rmtree(folder, ignore_errors=True)
            self._windows.end_window(window)
            self._note(f"profiler: steps {window[0]} to {window[1]} are not traced: {error.message}")
            return
        self._under_way = window, step, folder
        self._last = step - 1

    def _note(self, text: str) -> None:
        if self._emit is not None:
            self._emit(Note(text))


def stop_in_child() -> None:
    """Stops tracing, and lets a child process collect the trace, because collecting can crash.

    Use it in runs with several processes. If an operation starts in one thread and ends in another, such as the
    reduction over workers, TensorFlow joins two events. TensorFlow 2.21 keeps a pointer to the second event while it
    moves this event (`TraceMeRecorder::Consume`). On a loaded machine, one of ten runs with two workers crashed. If
    the first child crashes, a second one collects without freeing memory, so that the old location stays readable.

    Raises OSError if both children crash, or if one reports an error.
    """
    level = trace_level()
    if level is None:
        tf.profiler.experimental.stop()
        return
    traced_level = level.value
    level.value = NO_TRACE
    try:
        error = run_in_child(functools.partial(collect_trace, level, traced_level))
        if error is None:
            error = run_in_child(functools.partial(collect_trace, level, traced_level, frees=False))
    finally:
        tf.profiler.experimental.stop(save=False)
    if error != "":
        raise OSError(error or "TensorFlow's profiler has crashed")


def collect_trace(level: ctypes.c_int, traced: int, frees: bool = True) -> None:
    """Restores the trace level and stops tracing, which collects and writes the trace. Runs in the child."""
    if not frees:
        disable_free()
    level.value = traced
    tf.profiler.experimental.stop()


def disable_free() -> None:
    """Makes `free` do nothing, on x86-64. Only for a process that exits soon."""
    if platform.machine() != "x86_64":
        return
    libc = ctypes.CDLL(None)
    address = ctypes.cast(libc.free, ctypes.c_void_p).value or 0
    page = ctypes.c_void_p(address - address % mmap.PAGESIZE)
    everything = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    if libc.mprotect(page, ctypes.c_size_t(2 * mmap.PAGESIZE), everything) == 0:
        ctypes.memmove(address, RETURN, len(RETURN))


def trace_level() -> ctypes.c_int | None:
    """Returns TensorFlow's host trace level as a writable value; None if its symbol is not found."""
    try:
        library = ctypes.CDLL(str(Path(tf.sysconfig.get_lib()) / "libtensorflow_framework.so.2"))
        return ctypes.c_int.in_dll(library, TRACE_LEVEL_SYMBOL)
    except (OSError, ValueError):
        return None


def run_in_child(work: Callable[[], None]) -> str | None:
    """Runs `work` in a forked child. Returns its error message, "" on success, or None if the child crashed."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(write_end, str(error).encode()[:4000] or b"?")
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as reader:
        status = wait_for_child(child)
        return reader.read().decode(errors="replace") if status == 0 else None


def wait_for_child(child: int) -> int:
    """Waits for a child's exit and returns its status. Kills it after `COLLECT_SECONDS`."""
    deadline = time.monotonic() + COLLECT_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(POLL_SECONDS)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]
