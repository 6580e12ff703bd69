"""Traces the steps of a window in a worker, with the markers by which they are told apart."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from scaleflow.interfaces import Emit, Profiler
from scaleflow.profiler.places import place_of, xplane_of
from scaleflow.profiler.windows import Window, Windows


class StepTracer:
    """A `Tracer` that leaves each window's xplane where TensorBoard looks for it.

    Args:
        options: which steps.
        folder: for what the run's profile is made of.
        worker: this process's name, which its trace has.
        emit: is told of each window; None in a worker that the run is not recorded by.
        facts: gives what the words about a profile need to know of the run, as plain values.
    """

    def __init__(
        self, options: Profiler, folder: Path, worker: str, emit: Emit | None, facts: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._windows = Windows(options.windows)
        self._is_alone = len(options.windows) == 1
        self._folder = folder
        self._worker = worker
        self._emit = emit
        self._facts = facts
        self._under_way: tuple[Window, int, str] | None = None
        self._written: tuple[Window, int, int] | None = None
        self._last = 0

    def steps_left(self, step: int) -> int | None:
        return self._windows.steps_left(step)

    @contextlib.contextmanager
    def watching(self, step: int) -> Iterator[bool]:
        if not self._windows.is_single(step):
            yield False
            return
        window = self._windows.traced(step)
        if window is not None and self._under_way is None:
            self._begin(window, step)
        if self._under_way is None:
            yield True
            return
        # `_r` has xprof count by these; inside is no loop, by whose rounds it would count instead.
        with tf.profiler.experimental.Trace("train", step_num=step, _r=1):
            yield True

    def took(self, step: int) -> None:
        self._last = step
        if self._under_way is not None and step >= self._under_way[0][1]:
            self.close()

    def close(self) -> None:
        if self._under_way is None:
            return
        window, first, folder = self._under_way
        self._under_way = None
        self._windows.end(window)
        try:
            tf.profiler.experimental.stop()
            (found,) = Path(folder).rglob("*.xplane.pb")
            where = xplane_of(self._folder, (first, self._last), self._worker)
            where.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(found, where)
            self._written = window, first, self._last
        except (tf.errors.OpError, OSError, ValueError) as error:  # a full disk, say: the training goes on
            self._note(f"profiler: the trace of steps {first} to {self._last} could not be written: {error}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def tell(self, usual_ms: float | None) -> None:
        if self._written is None or self._emit is None:
            self._written = None
            return
        _, first, last = self._written
        self._written = None
        own = "profile" if self._is_alone else f"profile/{place_of((first, last))}"
        self._emit(
            "profile",
            folder=str(self._folder),
            first=first,
            last=last,
            artifacts=own,
            usual_ms=usual_ms,
            facts=dict(self._facts()),
        )

    def ended(self, step: int) -> None:
        for first, last in self._windows.coming:
            if step < first:
                self._note(f"profiler: nothing of steps {first} to {last} was traced: the run ended at step {step}")

    def _begin(self, window: Window, step: int) -> None:
        folder = tempfile.mkdtemp(prefix="scaleflow-profile-")
        try:
            tf.profiler.experimental.start(folder)
        except tf.errors.OpError as error:  # a callback of the user's traces already
            shutil.rmtree(folder, ignore_errors=True)
            self._windows.end(window)
            self._note(f"profiler: steps {window[0]} to {window[1]} are not traced: {error.message}")
            return
        self._under_way = window, step, folder
        self._last = step - 1

    def _note(self, text: str) -> None:
        if self._emit is not None:
            self._emit("note", text=text)
