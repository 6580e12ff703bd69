"""Holds back metrics that a run's page in MLflow should list last.

The page lists metrics in the order in which the store first got them. Baselines and the first speeds are known before
the first loss. So they wait until the test is recorded or the run has ended, but at most a minute of the run's time.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from scaleflow.interfaces import Point
from scaleflow.interfaces.events import MetricsLogged, SystemMetrics
from scaleflow.runs import EventReader

#: Prefixes of the metrics that wait, and of those that they wait for.
LATE, AWAITED = ("baseline/", "perf/"), "test/"

#: How long they wait, in milliseconds.
LONGEST_WAIT = 60_000


class LatePoints:
    """The points that wait.

    Args:
        events: the run's `events.jsonl`.
        offsets: the events in it whose late points an earlier command has not sent.
        has_begun: whether the store has metrics of the run, whose order is then given.

    Attributes:
        is_due: whether they are to be sent now, after all others.
    """

    def __init__(self, events: Path, offsets: Iterable[int] = (), has_begun: bool = False) -> None:
        self._events: dict[int, MetricsLogged | SystemMetrics] = {}
        for at in offsets:
            event = next(EventReader(events, at).read())
            assert isinstance(event, MetricsLogged | SystemMetrics)
            self._events[at] = event
        self._is_over = has_begun and not self._events
        self.is_due = False

    @property
    def offsets(self) -> list[int]:
        """The events of which points wait, by their offsets in the file."""
        return list(self._events)

    @property
    def points(self) -> list[Point]:
        return [p for event in self._events.values() for p in to_points(event) if p.key.startswith(LATE)]

    def hold(self, at: int, event: MetricsLogged | SystemMetrics) -> list[Point]:
        """Returns the points of an event at an offset that are to be sent now, and holds the others back."""
        points = to_points(event)
        if self._is_over:
            return points
        if any(point.key.startswith(LATE) for point in points):
            self._events[at] = event
        since = min((held.time for held in self._events.values()), default=event.time)
        self.is_due |= event.time - since > LONGEST_WAIT or any(p.key.startswith(AWAITED) for p in points)
        return [point for point in points if not point.key.startswith(LATE)]

    def end(self) -> None:
        """Lets all points go: those that wait have been sent, and none waits from now on."""
        self._events.clear()
        self._is_over, self.is_due = True, False


def to_points(event: MetricsLogged | SystemMetrics) -> list[Point]:
    return [Point(name, value, event.step, event.time) for name, value in event.values.items()]
