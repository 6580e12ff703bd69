"""The calls of the compiled loop: their number of steps, and their traces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from scaleflow.profiler.tracer import StepTracer

TARGET_SECONDS = 0.5
MAX_GROWTH = 64


class StepsPerLoop:
    """Chooses the next call's number of steps from the last call's duration.

    A call should take about `TARGET_SECONDS`: long enough to make the cost of starting it negligible, short enough to
    answer a stop soon. The first call is not counted, because it compiles.

    Args:
        setting: `auto`, or a fixed number of steps.

    Attributes:
        calls: the number of calls so far. Calls of a single, traced step do not count.
    """

    def __init__(self, setting: int | Literal["auto"]) -> None:
        self.calls = 0
        self._is_fixed = setting != "auto"
        self._steps = 8 if setting == "auto" else setting

    def choose(self, is_resumed: bool) -> int:
        """Returns the number of steps of the next call.

        The first call takes a single step, because it compiles. In a resumed run a fixed number is used from the start,
        so that its calls begin where the calls of the uninterrupted run do.
        """
        is_warm = self.calls > 0 or (is_resumed and self._is_fixed)
        return self._steps if is_warm else 1

    def record_call(self, steps: int, seconds: float) -> None:
        """Adapts the number of steps to the duration of a call."""
        self.calls += 1
        if self._is_fixed or self.calls == 1:
            return
        target = int(TARGET_SECONDS * steps / max(seconds, 1e-6))
        self._steps = max(1, min(target, steps * MAX_GROWTH))


#: Seconds of training between a traced window and its report, if the epoch does not end earlier. The report compares
#: with untraced steps: these seconds outweigh the input that was prefetched while the trace was written.
SECONDS_TO_COMPARE = 30.0


class CallTracing:
    """Wraps calls with a tracer. Without a tracer it does nothing.

    Attributes:
        is_single: whether the current call takes a single, traced step.
    """

    def __init__(self, tracer: StepTracer | None) -> None:
        self.is_single = False
        self._tracer = tracer
        self._untraced_seconds = 0.0

    def steps_left(self, step: int) -> int | None:
        """Returns how many steps the call after `step` may take; None for any number."""
        if self._tracer is None:
            return None
        return self._tracer.steps_left(step)

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
        if self.is_single:
            self._untraced_seconds = 0.0
        else:
            self._untraced_seconds += seconds
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
