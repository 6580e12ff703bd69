"""What an evaluation records in the run of its model, without a store."""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from scaleflow.interfaces.events import DatasetDescribed, MetricsLogged
from scaleflow.tracking.model_uris import ModelReference
from scaleflow.tracking.tracked_runs import STAGE_BEGAN, log_evaluation

MODEL = ModelReference("r" * 32, f"m-{'a' * 32}", 40)


class FakeTracker:
    """Keeps the points, as a store does."""

    def __init__(self) -> None:
        self.points: list[Any] = []
        self.tags: dict[str, str] = {}

    def fetch_run(self) -> Any:
        return SimpleNamespace(data=SimpleNamespace(tags=self.tags))

    def log_dataset(self, data: DatasetDescribed) -> None: ...

    def log_batch(self, metrics: Sequence[Any]) -> None:
        self.points += metrics

    def set_tags(self, values: Mapping[str, str]) -> None:
        self.tags |= values

    def find_points(self, keys: Iterable[str], step: int, time: int) -> dict[str, float]:
        return {p.key: p.value for p in self.points if p.key in keys and (p.step, p.timestamp) == (step, time)}


def evaluate(tracker: Any, **values: float) -> dict[str, float]:
    events = [DatasetDescribed("digits", splits={"test": {"digest": "d" * 16}}), MetricsLogged(0, values)]
    return log_evaluation(tracker, MODEL, "digits", events, f"all, data {'d' * 16}; command")


def test_a_stage_that_evaluates_again_after_a_kill_records_each_point_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = FakeTracker()
    monkeypatch.setenv(STAGE_BEGAN, "1700000000000")
    assert evaluate(tracker, loss=0.5) == {"evaluate/digits/loss": 0.5}  # it was killed before the other metric
    assert evaluate(tracker, loss=0.6, accuracy=0.9) == {"evaluate/digits/loss": 0.5, "evaluate/digits/accuracy": 0.9}
    assert [(each.key, each.value) for each in tracker.points] == [
        ("evaluate/digits/loss", 0.5),
        ("evaluate/digits/accuracy", 0.9),
    ]
    monkeypatch.setenv(STAGE_BEGAN, "1700000000001")  # another stage, or the same that has changed
    assert evaluate(tracker, loss=0.6) == {"evaluate/digits/loss": 0.6}
    monkeypatch.delenv(STAGE_BEGAN)  # by hand: each is a point of its own
    for _ in range(2):
        evaluate(tracker, loss=0.7)
    assert [each.value for each in tracker.points if each.key.endswith("loss")] == [0.5, 0.6, 0.7, 0.7]
