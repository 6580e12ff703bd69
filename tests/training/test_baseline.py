"""What a model has to beat, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Kind, Outputs


def split(targets: Any, dtype: str = "float32") -> Any:
    return np.asarray(targets, dtype)


def found(cases: list[tuple[Outputs, Any, Any, Any]]) -> list[dict[str, float]]:
    from scaleflow.training import baselines

    return [dict(baselines(*case)) for case in cases]


def test_each_kind_has_the_baseline_of_its_training_targets(isolated: Callable[..., Any]) -> None:
    classes = split([0, 1, 1, 1], "uint64"), split([1, 1, 0, 1, 0], "int64")
    ones = split([[0], [0], [1], [0]]), split([[1], [0]])
    labels = split([[0, 1], [1, 1], [0, 0]]), split([[0, 1], [1, 1]])
    values = split([[1.0], [3.0]]), split([[2.0], [5.0], [2.0]])
    of: dict[Kind, tuple[int, tuple[Any, Any]]] = {
        "classification": (3, classes),
        "binary": (1, ones),
        "multi_label": (2, labels),
        "regression": (1, values),
    }
    cases = [(Outputs(kind, (size,)), train, tested, None) for kind, (size, (train, tested)) in of.items()]
    by_kind = dict(zip(of, isolated(found, cases), strict=True))
    log = np.log
    wanted = {
        "classification": {"accuracy": 3 / 5, "loss": -(3 * log(3 / 4) + 2 * log(1 / 4)) / 5},
        "binary": {"accuracy": 1 / 2, "loss": -(log(1 / 4) + log(3 / 4)) / 2},
        "multi_label": {"accuracy": 3 / 4, "exact_match": 1 / 2, "loss": -(3 * log(2 / 3) + log(1 / 3)) / 4},
        "regression": {"loss": 3.0, "mae": 1.0, "rmse": 3**0.5},
    }
    for kind, values_wanted in wanted.items():
        assert by_kind[kind] == pytest.approx({f"baseline/{k}": v for k, v in values_wanted.items()}), kind


def test_with_validation_and_test_each_has_its_own(isolated: Callable[..., Any]) -> None:
    train, validation, test = split([1, 1, 0], "int32"), split([1, 0], "int32"), split([0, 2], "int32")
    values, of_test, nothing = isolated(
        found,
        [
            (Outputs("classification", (3,)), train, validation, test),
            (Outputs("classification", (3,)), train, None, test),
            (Outputs("classification", (3,)), train, None, None),
        ],
    )
    loss = -(np.log(2 / 3) + np.log(1 / 3)) / 2
    # A class that the training split never had is infinitely improbable.
    assert values == pytest.approx({"baseline/accuracy": 0.5, "baseline/loss": loss, "baseline/test/accuracy": 0.0})
    assert of_test == {"baseline/accuracy": 0.0}
    assert nothing == {}
