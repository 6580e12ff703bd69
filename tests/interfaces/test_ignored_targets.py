"""Code that reads targets leaves out those that do not count (`Outputs.ignore`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scaleflow.dataset.reading.division import find_strata
from scaleflow.dataset.schema import make_sample
from scaleflow.features.checks.rules import EqualExamples, find_class_faults, find_contradictions
from scaleflow.interfaces import Inputs, Outputs

IGNORED = -999


def sample(outputs: Outputs, targets: Any, x: Any = None) -> Any:
    inputs = {"x": np.arange(len(targets)) if x is None else x}
    return make_sample({"x": Inputs((), "float32")}, outputs, (inputs, targets), examples=len(targets))


def test_checks_of_data_take_them_as_missing() -> None:
    values = np.array([1.5, IGNORED, 2.5])
    found = sample(Outputs("regression", (1,), ignore=IGNORED), values[:, None]).targets[""]
    assert np.isnan(found[1])
    assert found[[0, 2]].tolist() == [1.5, 2.5]
    classes = Outputs("classification", (3,), names=("none", "a", "b"), ignore=0)  # among the classes
    assert sample(classes, np.array([0, 1, 2])).targets[""].tolist() == ["", "a", "b"]
    constant = sample(Outputs("regression", (1,), ignore=IGNORED), np.array([[3.0], [IGNORED], [3.0]]))
    assert [each.rule for each in find_class_faults(constant)] == ["near-constant target"]


def test_an_unlabelled_copy_contradicts_no_label() -> None:
    outputs = Outputs("classification", (2,), names=("a", "b"), ignore=-1)
    x = np.repeat(np.arange(40.0), 2)

    def contradict(targets: Any) -> list[str]:
        equal = EqualExamples(np.repeat(np.arange(40), 2), 0.0)
        return [each.text for each in find_contradictions([sample(outputs, targets, x)], equal, "rows")]

    assert contradict(np.tile([0, -1], 40)) == []
    assert len(contradict(np.tile([0, 1], 40))) == 1
    assert contradict(np.full(80, -1)) == []


@pytest.mark.parametrize("kind", ["classification", "binary", "regression"])
def test_they_are_a_stratum_of_their_own(kind: Any) -> None:
    targets = np.array([1, 0, IGNORED, 1, IGNORED, 0, 1, 0], np.float64 if kind == "regression" else np.int64)
    is_ignored = targets == IGNORED
    strata = find_strata(targets, Outputs(kind, (2,) if kind == "classification" else (1,), ignore=IGNORED))
    plain = find_strata(targets[~is_ignored], Outputs(kind, (2,) if kind == "classification" else (1,)))
    assert strata[is_ignored].tolist() == [0, 0]
    assert strata[~is_ignored].tolist() == (plain + 1).tolist()


def test_a_difference_of_runs_is_of_the_targets_that_count() -> None:
    from scaleflow.features.compare.examples import list_values
    from tests.evaluation.made import make_predictions

    outputs = Outputs("regression", (1,), ignore=IGNORED)
    target = np.array([[1.0], [IGNORED], [3.0]])
    kept = make_predictions(outputs, {"": {"target": target, "output": np.array([[2.0], [7.0], [3.0]], np.float32)}})
    (mae,) = list_values(kept, "", "mae", rows=np.arange(3))
    assert mae.compute() == 0.5
