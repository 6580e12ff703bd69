"""What a sweep keeps of the run of each of its jobs."""

from __future__ import annotations

import sys
from dataclasses import replace

from scaleflow.events import Event, MetricsLogged, RunReady
from scaleflow.runs.state import RATE, RunHistory

#: The metrics whose points the report needs: the speed, and the losses for the plots and for `LossCheck`.
CURVES = (RATE, "train/loss", "val/loss")

#: The most points of a metric in the first epoch, and about the most after them: when there are twice as many, each
#: second one is dropped.
MAX_FIRST, MAX_POINTS = 1000, 200


class JobHistory(RunHistory):
    """A run's history that does not grow with the run: the last values of all metrics, and few points of some."""

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
