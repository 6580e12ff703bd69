"""A model whose outputs are not finite is not promoted, with and without a champion."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scaleflow.features.promotion.steps import Candidate
from scaleflow.interfaces import Outputs
from tests.evaluation.made import make_predictions


def check(metrics: dict[str, float], predictions: Any = None, is_result: bool = True) -> Any:
    run = SimpleNamespace(is_result=is_result, tracked=SimpleNamespace(data=SimpleNamespace(metrics=metrics)))
    return Candidate.check_finite(SimpleNamespace(run=run), predictions)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_a_model_whose_outputs_are_not_finite_is_not_promoted(kind: Any) -> None:
    described = Outputs(kind, (3,))
    output = np.ones((30, 3), np.float32)
    target = np.zeros((30, *described.target_shape), np.float32 if kind == "regression" else np.int32)
    assert (
        check({"test/accuracy": 0.9}, make_predictions(described, {"": {"target": target, "output": output}})) is None
    )
    output[4:6] = np.nan
    found = check({}, make_predictions(described, {"": {"target": target, "output": output}}))
    assert not found.holds
    assert found.text == "the model's outputs for 2 examples are NaN or infinite, and none may be"
    assert not check({"test/not_finite": 2.0}).holds  # there is no champion yet
    assert check({"test/not_finite": 0.0}) is None
