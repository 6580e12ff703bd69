"""What a sweep keeps of the run of each of its jobs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Self

from scaleflow.interfaces.events import Event, MetricsLogged, RunReady
from scaleflow.runs import EventReader, RunFolder
from scaleflow.runs.state import RATE, RunHistory

#: The metrics whose points the report needs: the speed, and the losses for the plots and for `LossCheck`.
CURVES = (RATE, "train/loss", "val/loss")

#: The most points of a metric in the first epoch, and about the most after them: when there are twice as many, each
#: second one is dropped.
MAX_FIRST, MAX_POINTS = 1000, 200


class JobHistory(RunHistory):
    """A run's history that does not grow with the run: the values of all metrics, and few points of some.

    `metrics` are those of the exported model: with `checkpoint.export=best` the values at the step of the best
    checkpoint. Otherwise, and in `perf/`, they are the last values.
    """

    @classmethod
    def read(cls, folder: Path) -> Self:
        history = super().read(folder)
        if history.model_step is not None and history.model_step < history.step:
            history.metrics |= read_metrics_until(folder, history.model_step)
        return history

    def apply(self, event: Event) -> None:
        if isinstance(event, RunReady):  # jobs have most of their params in common
            params = {sys.intern(key): sys.intern(value) for key, value in event.params.items()}
            event = replace(event, params=params)
        super().apply(event)
        if isinstance(event, MetricsLogged):
            self._thin_curves(event)

    def _thin_curves(self, event: MetricsLogged) -> None:
        """Drops points. Those of the first epoch stay, because jobs are compared at the steps that both have."""
        for name in event.values:
            if name not in CURVES:
                del self.curves[name]
                continue
            points = self.curves[name]
            first = sum(step <= self.epoch_steps for step, _ in points) if self.epoch_steps else len(points)
            first = min(first, MAX_FIRST)
            if len(points) - first >= 2 * MAX_POINTS:
                self.curves[name] = [*points[:first], *points[first + 1 :: 2]]


def read_metrics_until(folder: Path, step: int) -> dict[str, float]:
    """Returns the last value of each metric that a run reported at a step or before it, without those of the speed."""
    events = EventReader(RunFolder(folder).events).read()
    logged = (event.values for event in events if isinstance(event, MetricsLogged) and event.step <= step)
    return {name: value for values in logged for name, value in values.items() if not name.startswith("perf/")}
