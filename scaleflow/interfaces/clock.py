"""Measures times and durations of a run, even if the machine's clock is changed meanwhile.

Durations use the monotonic clock. The time of an event is the machine's time, but never goes back: if the clock is set
back, our time continues from where it was, so that no run ends before it began.
"""

import functools
import os
import threading
import time


class SteadyClock:
    """The machine's clock, in seconds since the epoch, which never goes back."""

    def __init__(self) -> None:
        self.begin()

    def begin(self, at_least: float = 0.0) -> None:
        """Forgets earlier corrections. The time is never before `at_least`, when the run began."""
        self._lock = threading.Lock()
        self._last = at_least
        self._ticks = time.monotonic()
        self._added = 0.0

    def read(self) -> float:
        """Returns the time. It never goes back, and advances at least as fast as the monotonic
        clock after a step back.
        """
        with self._lock:
            ticks = time.monotonic()
            now = time.time()
            if now >= self._last:
                self._added = 0.0
            elif now + self._added < self._last:
                self._added = self._last + (ticks - self._ticks) - now
            self._last = now + self._added
            self._ticks = ticks
            return self._last


#: The clock of this process.
CLOCK = SteadyClock()

os.register_at_fork(after_in_child=CLOCK.begin)  # a fork server may have begun long ago


@functools.lru_cache(maxsize=1024)
def anchor(began: float) -> tuple[float, float]:
    """Returns the seconds since `began` (seconds since the epoch), and the monotonic clock, both at the first call."""
    return max(0.0, time.time() - began), time.monotonic()


def measure_since(began: float) -> float:
    """Returns the seconds since `began` (seconds since the epoch). The clock may change after the first call for it."""
    earlier, ticks = anchor(began)
    return earlier + time.monotonic() - ticks
