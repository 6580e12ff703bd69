"""Decides which steps are traced, and how many steps each call of the loop may take."""

from collections.abc import Sequence

#: The number of steps before a window that are also single calls.
SINGLE_STEPS = 2

Window = tuple[int, int]


class Windows:
    """The windows of a run that are not fully traced yet, in order. Steps count from 1; a window is (first, last).

    The first step of a process is also a single call, which compiles the function for single steps. If this happened
    right before a window, the input pipeline would read far ahead meanwhile, and the traced steps would not wait for
    input.

    Attributes:
        coming: the windows that are not over yet.
    """

    def __init__(self, windows: Sequence[Window]) -> None:
        self.coming = list(windows)
        self._singles = 0

    def steps_left(self, step: int) -> int | None:
        """Returns how many steps the call after `step` may take; None if no window is left."""
        window = self._next(step + 1)
        if window is None:
            return None
        return max(1, window[0] - SINGLE_STEPS - step - 1) if self._singles else 1

    def is_single(self, step: int) -> bool:
        """Returns whether `step` must be a separate call."""
        window = self._next(step)
        return window is not None and (step >= window[0] - SINGLE_STEPS or not self._singles)

    def find_window(self, step: int) -> Window | None:
        """Returns the window that traces `step`, or None. It is None for the first single step of the process.

        Call it exactly once before each single step, because it counts them.
        """
        window = self._next(step)
        self._singles += 1
        return window if window is not None and step >= window[0] and self._singles > 1 else None

    def end_window(self, window: Window) -> None:
        """Removes a window. Its steps are not traced again, even if the run goes back to an earlier step."""
        self.coming = [other for other in self.coming if other != window]

    def _next(self, step: int) -> Window | None:
        """Returns the first window that does not end before `step`."""
        return next((window for window in self.coming if step <= window[1]), None)
