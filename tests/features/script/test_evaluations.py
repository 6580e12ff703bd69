"""Which evaluation of a script is the test of its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from scaleflow.features.script.evaluations import Evaluations


class Model:
    """A model, which can be anything."""


class FakeRecorder:
    """Keeps the metrics that it gets as `NAME@STEP: VALUE`."""

    def __init__(self) -> None:
        self.step = 0
        self.kept: dict[str, float] = {}

    def log_metrics(self, values: Mapping[str, Any], step: int) -> None:
        for name, value in values.items():
            self.kept[f"{name}@{step}"] = value


@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        ("fit a, test a", {"test/loss@1": 1}),
        ("test a, fit a", {"evaluate_1/loss@0": 1}),
        ("test a, fit a, test a", {"test/loss@0": 1, "test/loss@1": 2}),
        ("fit a, test a, fit a, test a", {"test/loss@1": 1, "test/loss@2": 2}),
        ("fit a, test a, test a", {"evaluate_1/loss@1": 1, "test/loss@1": 2}),
        ("fit a, test a, fit b, test b", {"evaluate_1/loss@1": 1, "test/loss@2": 2}),
        ("fit a, fit b, test b, test a", {"evaluate_2/loss@2": 2, "test/loss@2": 1}),
        ("fit a, test c", {"test/loss@1": 1}),
        ("fit a, test c, test c", {"evaluate_1/loss@1": 1, "test/loss@1": 2}),
        ("fit a, test a, test c", {"test/loss@1": 1, "evaluate_2/loss@1": 2}),
        ("test a, fit a, test c", {"evaluate_1/loss@0": 1, "test/loss@1": 2}),
        ("test c", {"test/loss@0": 1}),
    ],
)
def test_one_evaluation_is_the_test(calls: str, kept: Mapping[str, float]) -> None:
    recorder: Any = FakeRecorder()
    evaluations = Evaluations(recorder)
    models = {"a": Model(), "b": Model(), "c": Model()}
    loss = 0
    for call in calls.split(", "):
        action, _, name = call.partition(" ")
        if action == "fit":
            evaluations.begin_fit(models[name])
            recorder.step += 1
        else:
            loss += 1
            evaluations.add(models[name], {"loss": loss})
    evaluations.finish()
    assert recorder.kept == kept
