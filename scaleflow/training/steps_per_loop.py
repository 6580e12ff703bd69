"""Chooses the number of steps per call of the compiled loop."""

from __future__ import annotations

from typing import Literal

TARGET_SECONDS = 0.5
LARGEST_GROWTH = 64


class StepsPerLoop:
    """Chooses the next call's number of steps from the last call's duration.

    A call should take about `TARGET_SECONDS`: long enough to make the cost of starting it negligible, short enough to
    answer a stop soon. The first call is not counted, because it compiles.

    Args:
        setting: `auto`, or a fixed number of steps.

    Attributes:
        calls: the calls so far, without those of single, traced steps.
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
        self._steps = max(1, min(target, steps * LARGEST_GROWTH))
