"""The time of events, and durations, of a run during which the machine's clock may be set.

Durations are measured by the monotonic clock. The time of an event is the machine's, but does not go back: if the clock
is set back, it goes on from where it was, so that no run ends before it began.
"""

import functools
import os
import threading
import time


class SteadyClock:
    """The machine's clock, in seconds since the epoch, without its steps back."""

    def __init__(self) -> None:
        self.begin()

    def begin(self, at_least: float = 0.0) -> None:
        """Forgets earlier steps back. A run that began at a time `at_least` has no earlier events."""
        self._lock = threading.Lock()
        self._last, self._ticks = at_least, time.monotonic()
        self._added = 0.0

    def read(self) -> float:
        """Returns the time: at least that of the last call, and of the time that has passed since."""
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

os.register_at_fork(after_in_child=CLOCK.begin)  # a server may have begun long ago


@functools.lru_cache(maxsize=1024)
def anchor(began: float) -> tuple[float, float]:
    """Returns the seconds since a time in seconds since the epoch, and the monotonic clock at the first call for it."""
    return max(0.0, time.time() - began), time.monotonic()


def measure_since(began: float) -> float:
    """Returns the seconds since a time in seconds since the epoch. The clock may be set after the first call for it."""
    earlier, ticks = anchor(began)
    return earlier + time.monotonic() - ticks
