"""The progress of a training: its latest figures and the time left."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

from scaleflow.interfaces.events import MetricsLogged
from scaleflow.interfaces.formatting import format_duration, format_elapsed
from scaleflow.launcher.lines import fit_columns, list_figures

if TYPE_CHECKING:
    from rich.text import Text

#: The width of a bar in columns.
BAR_WIDTH = 20


class TrainingProgress:
    """The progress of a training.

    Args:
        steps: the updates of the whole training; 0: unknown.

    Attributes:
        began: when it began, in seconds of the monotonic clock.
    """

    def __init__(self, steps: int) -> None:
        self.began = time.monotonic()
        self._steps = steps
        self._latest: MetricsLogged | None = None
        self._latest_at = self.began
        self._measured_from: tuple[float, int] | None = None
        self._has_validated = False

    def extend(self, steps: int) -> None:
        """Changes the updates of the whole training. The speed is measured anew, because another fit begins."""
        self._steps = steps
        self._measured_from = None

    def add(self, event: MetricsLogged) -> None:
        """Notes the metrics of a call of the training loop. The speed is measured since the last compilation."""
        self._latest = event
        self._latest_at = time.monotonic()
        if self._measured_from is None or event.compiled:
            self._measured_from = self._latest_at, event.step

    def end_epoch(self) -> None:
        """Excludes the first validation from the speed, because it compiles."""
        if self._measured_from is not None and not self._has_validated:
            now = time.monotonic()
            self._measured_from = self._measured_from[0] + now - self._latest_at, self._measured_from[1]
            self._latest_at = now
        self._has_validated = True

    def describe(self, width: int | None) -> str:
        """Returns a line with the step, the metrics and the time left, as far as they fit into a width."""
        if self._latest is None:
            return f"still compiling the first steps ({format_elapsed(time.monotonic() - self.began)})"
        if not self._steps:
            return self._describe_call(f"step {self._latest.step}", width)
        return self._describe_call(f"step {self._latest.step:>{len(str(self._steps))}}/{self._steps}", width)

    def _describe_call(self, start: str, width: int | None) -> str:
        assert self._latest is not None
        values = {**self._latest.values, "perf/examples_per_second": self._latest.rate}
        return fit_columns(start, list_figures(values, self.describe_time_left()), width)

    def __rich__(self) -> Text:
        """Returns the text after a bar and its count of steps, as far as it fits."""
        from rich.text import Text

        if self._latest is None:
            return Text("compiling the first steps")
        room = shutil.get_terminal_size().columns - BAR_WIDTH - len(f" {self._steps}/{self._steps} ")
        return Text(self._describe_call("", room))

    def describe_time_left(self) -> str:
        """Estimates the time left from the speed so far; empty if it is unknown, or if the estimate has passed."""
        step = 0 if self._latest is None else self._latest.step
        began, first = self._measured_from or (0.0, step)
        if step <= first or step >= self._steps:
            return ""
        seconds = (self._latest_at - began) / (step - first) * (self._steps - step)
        seconds -= time.monotonic() - self._latest_at
        return f"{format_duration(seconds)} left" if seconds > 0 else ""
