"""How many steps to one call of the compiled loop."""

from __future__ import annotations

from typing import Literal

TARGET_SECONDS = 0.5
LARGEST_GROWTH = 64


class StepsPerLoop:
    """Chooses the next call's steps from the last call's duration.

    A call should take about half a second: long enough that starting it costs nothing, short enough
    that a stop is answered soon. The first call compiles, so its time says nothing.

    Args:
        setting: `auto`, or a fixed number of steps.
    """

    def __init__(self, setting: int | Literal["auto"]) -> None:
        self._fixed = None if setting == "auto" else setting
        self._steps = 8 if setting == "auto" else setting
        self._calls = 0

    @property
    def is_fixed(self) -> bool:
        return self._fixed is not None

    def choose(self) -> int:
        return self._steps

    def record_call(self, steps: int, seconds: float) -> None:
        """Learns from a call."""
        self._calls += 1
        if self._fixed is not None or self._calls == 1:
            return
        wanted = int(TARGET_SECONDS * steps / max(seconds, 1e-6))
        self._steps = max(1, min(wanted, steps * LARGEST_GROWTH))
