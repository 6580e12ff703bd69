"""Which steps are traced, and how the loop's calls are cut for it."""

from __future__ import annotations

from collections.abc import Sequence

#: So many steps before a window are taken one by one, too.
WARM = 2

Window = tuple[int, int]


class Windows:
    """The windows of a run that are still to come. Steps are counted from 1, a window is (first, last).

    The first step that a process takes is a single one, too: that compiles the function for single steps. Right before
    a window it would give the input pipeline time to read far ahead, and what is then traced would not wait for input.

    Args:
        windows: in order, none within another.
    """

    def __init__(self, windows: Sequence[Window]) -> None:
        self._coming = list(windows)
        self._singles = 0

    def steps_left(self, step: int) -> int | None:
        """How many steps the next call may take, behind `step`; None where it does not matter any more."""
        zone = self._next(step + 1)
        if zone is None:
            return None
        return max(1, zone[0] - WARM - step - 1) if self._singles else 1

    def is_single(self, step: int) -> bool:
        """Whether a step is taken by itself."""
        zone = self._next(step)
        return zone is not None and (step >= zone[0] - WARM or not self._singles)

    def find_window(self, step: int) -> Window | None:
        """The window that a step is traced in; to be asked once for each single step, before it is taken.

        The first one that this process takes is not.
        """
        zone = self._next(step)
        self._singles += 1
        return zone if zone is not None and step >= zone[0] and self._singles > 1 else None

    def end_window(self, window: Window) -> None:
        """Nothing more is traced in a window, also if the run goes back to before it."""
        self._coming = [other for other in self._coming if other != window]

    def end_all(self) -> None:
        self._coming = []

    @property
    def coming(self) -> Sequence[Window]:
        """Those that no step was traced in, or not all."""
        return self._coming

    def _next(self, step: int) -> Window | None:
        """The first window that a step is not behind."""
        return next((window for window in self._coming if step <= window[1]), None)
