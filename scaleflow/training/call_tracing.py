"""Traces some of the engine's calls, and reports the traced windows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from scaleflow.interfaces import Tracer

#: Seconds of training between a traced window and its report, if the epoch does not end earlier. The report compares
#: with untraced steps: these seconds outweigh the input that was prefetched while the trace was written.
SECONDS_TO_COMPARE = 30.0


class CallTracing:
    """The calls that a tracer wraps; without one, it does nothing.

    Attributes:
        is_single: whether the current call takes a single, traced step.
    """

    def __init__(self, tracer: Tracer | None) -> None:
        self.is_single = False
        self._tracer = tracer
        self._untraced_seconds = 0.0

    def steps_left(self, step: int) -> int | None:
        """Returns how many steps the call after `step` may take; None for any number."""
        return None if self._tracer is None else self._tracer.steps_left(step)

    @contextlib.contextmanager
    def trace_call(self, step: int) -> Iterator[bool]:
        """Wraps the call that begins with `step`; yields whether it must take that step only."""
        if self._tracer is None:
            yield False
            return
        with self._tracer.trace_call(step) as self.is_single:
            yield self.is_single

    def count_steps(self, step: int) -> None:
        """Records that `step` steps were taken."""
        if self._tracer is not None:
            self._tracer.count_steps(step)

    def end_call(self, seconds: float, is_last: bool, usual_ms: float | None) -> None:
        """Reports a traced window after enough untraced steps to compare with, or after the last call of an epoch."""
        self._untraced_seconds = 0.0 if self.is_single else self._untraced_seconds + seconds
        if self._tracer is not None and (is_last or self._untraced_seconds >= SECONDS_TO_COMPARE):
            self._tracer.report(usual_ms)

    def close(self, usual_ms: float | None, wait: Callable[[], object] = lambda: None) -> None:
        """Writes and reports a window that has begun; `wait` returns when every worker has written its trace."""
        if self._tracer is not None:
            self._tracer.close()
            wait()
            self._tracer.report(usual_ms)

    def finish(self, step: int) -> None:
        """Reports the windows after the run's last step."""
        if self._tracer is not None:
            self._tracer.finish(step)
