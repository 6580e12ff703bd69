"""Traces the steps of a window in a worker, with the markers by which they are told apart."""

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

from scaleflow.interfaces import Emit, Profiler
from scaleflow.profiler.paths import window_name, xplane_path
from scaleflow.profiler.windows import Window, Windows

#: TensorFlow's own, of what is traced on the host; -1 where nothing is.
LEVEL = "_ZN3tsl8profiler8internal13g_trace_levelE"
NOTHING = -1

SECONDS_TO_COLLECT = 60.0
SECONDS_BETWEEN_LOOKS = 0.01

#: What x86-64 returns from a function by.
RETURN = b"\xc3"


class StepTracer:
    """A `Tracer` that leaves each window's xplane where TensorBoard looks for it.

    Args:
        options: which steps.
        folder: for what the run's profile is made of.
        worker: this process's name, which its trace has.
        emit: is told of each window; None in a worker that the run is not recorded by.
        facts: gives what the words about a profile need to know of the run, as plain values.
        apart: have a child process write what was traced.
    """

    def __init__(
        self,
        options: Profiler,
        folder: Path,
        worker: str,
        emit: Emit | None,
        facts: Callable[[], Mapping[str, Any]],
        apart: bool = False,
    ) -> None:
        self._windows = Windows(options.windows)
        self._is_alone = len(options.windows) == 1
        self._folder = folder
        self._worker = worker
        self._emit = emit
        self._facts = facts
        self._stop = stop_in_child if apart else tf.profiler.experimental.stop
        self._under_way: tuple[Window, int, str] | None = None
        self._written: list[tuple[int, int]] = []
        self._last = 0

    def steps_left(self, step: int) -> int | None:
        return self._windows.steps_left(step)

    @contextlib.contextmanager
    def trace_call(self, step: int) -> Iterator[bool]:
        if not self._windows.is_single(step):
            yield False
            return
        window = self._windows.find_window(step)
        if window is not None and self._under_way is None:
            self._begin(window, step)
        if self._under_way is None:
            yield True
            return
        # `_r` has xprof count by these; inside is no loop, by whose rounds it would count instead.
        with tf.profiler.experimental.Trace("train", step_num=step, _r=1):
            yield True

    def count_steps(self, step: int) -> None:
        self._last = step
        if self._under_way is not None and step >= self._under_way[0][1]:
            self.close()

    def close(self) -> None:
        if self._under_way is None:
            return
        window, first, folder = self._under_way
        self._under_way = None
        self._windows.end_window(window)
        try:
            self._stop()
            (found,) = Path(folder).rglob("*.xplane.pb")
            where = xplane_path(self._folder, (first, self._last), self._worker)
            where.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(found, where)
            self._written.append((first, self._last))
        except (tf.errors.OpError, OSError, ValueError) as error:  # a full disk, say: the training goes on
            self._note(f"profiler: the trace of steps {first} to {self._last} could not be written: {error}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def report(self, usual_ms: float | None) -> None:
        written, self._written = self._written, []
        if self._emit is None:
            return
        for first, last in written:
            own = "profile" if self._is_alone else f"profile/{window_name((first, last))}"
            self._emit(
                "profile",
                folder=str(self._folder),
                first=first,
                last=last,
                artifacts=own,
                usual_ms=usual_ms,
                facts=dict(self._facts()),
            )

    def finish(self, step: int) -> None:
        for first, last in self._windows.coming:
            if step < first:
                self._note(f"profiler: nothing of steps {first} to {last} was traced: the run ended at step {step}")

    def _begin(self, window: Window, step: int) -> None:
        folder = tempfile.mkdtemp(prefix="scaleflow-profile-")
        try:
            tf.profiler.experimental.start(folder)
        except tf.errors.OpError as error:  # a callback of the user's traces already
            shutil.rmtree(folder, ignore_errors=True)
            self._windows.end_window(window)
            self._note(f"profiler: steps {window[0]} to {window[1]} are not traced: {error.message}")
            return
        self._under_way = window, step, folder
        self._last = step - 1

    def _note(self, text: str) -> None:
        if self._emit is not None:
            self._emit("note", text=text)


def stop_in_child() -> None:
    """Ends the tracing, and has a child process write what was traced, which may die of it.

    For a process that is one of several. An operation that begins in one thread and ends in another, as the reduction
    over workers does, is put together from two events, of which TensorFlow 2.21 keeps the second by its place in
    memory while it moves it elsewhere (`TraceMeRecorder::Consume`): one run in ten of two workers died of that, on
    a loaded machine. A child that dies is followed by one that gives no memory back, so that what was left is there.

    Raises:
        OSError: if no child has come through, or one has said why it can't.
    """
    level = trace_level()
    if level is None:
        tf.profiler.experimental.stop()
        return
    traced, level.value = level.value, NOTHING
    try:
        ended = run_in_child(functools.partial(collect_trace, level, traced))
        if ended is None:
            ended = run_in_child(functools.partial(collect_trace, level, traced, frees=False))
    finally:
        tf.profiler.experimental.stop(save=False)
    if ended != "":
        raise OSError(ended or "TensorFlow's profiler has crashed")


def collect_trace(level: ctypes.c_int, traced: int, frees: bool = True) -> None:
    """In the child: goes on as if nothing had stopped the tracing, and ends it."""
    if not frees:
        disable_free()
    level.value = traced
    tf.profiler.experimental.stop()


def disable_free() -> None:
    """From here on `free` returns at once: for a process that has not long to live."""
    if platform.machine() != "x86_64":
        return
    libc = ctypes.CDLL(None)
    address = ctypes.cast(libc.free, ctypes.c_void_p).value or 0
    page = ctypes.c_void_p(address - address % mmap.PAGESIZE)
    everything = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    if libc.mprotect(page, ctypes.c_size_t(2 * mmap.PAGESIZE), everything) == 0:
        ctypes.memmove(address, RETURN, len(RETURN))


def trace_level() -> ctypes.c_int | None:
    """What TensorFlow looks at before it records anything on the host; None where that can't be reached."""
    try:
        library = ctypes.CDLL(str(Path(tf.sysconfig.get_lib()) / "libtensorflow_framework.so.2"))
        return ctypes.c_int.in_dll(library, LEVEL)
    except (OSError, ValueError):
        return None


def run_in_child(work: Callable[[], None]) -> str | None:
    """Works in a forked child; gives what it has to say against it ("" where that is nothing), None if it died."""
    heard, says = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(says, str(error).encode()[:4000] or b"?")
        finally:
            os._exit(0)
    os.close(says)
    with os.fdopen(heard, "rb") as reader:
        status = wait_for_child(child)
        return reader.read().decode(errors="replace") if status == 0 else None


def wait_for_child(child: int) -> int:
    """Waits for a child's end, and makes it where it does not come."""
    deadline = time.monotonic() + SECONDS_TO_COLLECT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]
