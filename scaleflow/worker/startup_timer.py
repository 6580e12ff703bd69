"""Measures the time from the start of a command to the first training step, and its parts."""

from __future__ import annotations

import time


class StartupTimer:
    """Divides the time since the command began, in seconds since the epoch, into named parts.

    `known` parts were measured elsewhere, in seconds. They do not count towards the part that ends first.
    """

    def __init__(self, began: float, **known: float) -> None:
        self._began = began
        self._last = began + sum(known.values())
        self.seconds: dict[str, float] = dict(known)

    def end_part(self, part: str) -> None:
        """Ends a part, which began when the previous one ended. Several parts of one name are added up."""
        now = time.time()
        self.seconds[part] = self.seconds.get(part, 0.0) + max(0.0, now - self._last)
        self._last = now

    def values(self) -> dict[str, float]:
        """Returns the metrics: the whole time and its parts, in seconds."""
        parts = {f"{TOTAL}_{part}": seconds for part, seconds in self.seconds.items()}
        return {TOTAL: sum(self.seconds.values())} | parts


TOTAL = "perf/seconds_to_first_step"
