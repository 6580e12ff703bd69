"""How long a run takes to its first step, and what of it is what."""

from __future__ import annotations

import time


class StartupTimer:
    """Divides the time since the command began into named parts; what is measured elsewhere is taken out of the first.

    Args:
        began: when the command began, in seconds since the epoch.
        known: parts that are over already, in seconds.
    """

    def __init__(self, began: float, **known: float) -> None:
        self._began = began
        self._last = began + sum(known.values())
        self.seconds: dict[str, float] = dict(known)

    def end_part(self, part: str) -> None:
        """A part is over; what the same name was measured for before is added to."""
        now = time.time()
        self.seconds[part] = self.seconds.get(part, 0.0) + max(0.0, now - self._last)
        self._last = now

    def values(self) -> dict[str, float]:
        """Metrics: the whole, and the parts, which sum to it."""
        parts = {f"{TOTAL}_{part}": seconds for part, seconds in self.seconds.items()}
        return {TOTAL: sum(self.seconds.values())} | parts


TOTAL = "perf/seconds_to_first_step"
