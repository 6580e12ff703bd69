"""Two models on the same examples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.evaluation.comparison import compare_predictions, list_differences
from tests.evaluation.made import CLASSES, PRICE, draw_values, make_predictions


def make_pair(shift: float) -> tuple[object, object]:
    values = draw_values(CLASSES, 400)
    better = {**values, "output": values["output"].copy()}
    better["output"][np.arange(400), values["target"]] += shift
    return tuple(replace(make_predictions(CLASSES, {"": each}), digest="d") for each in (better, values))  # type: ignore[return-value]


def test_a_difference_is_paired_and_says_whether_it_is_more_than_noise() -> None:
    better, usual = make_pair(0.5)
    (found,) = compare_predictions(better, usual)  # type: ignore[arg-type]
    right = [p.column("target") == p.column("prediction") for p in (better, usual)]  # type: ignore[attr-defined]
    assert found.difference.value == pytest.approx(right[0].mean() - right[1].mean())
    assert (found.better, found.worse) == ((right[0] & ~right[1]).sum(), (~right[0] & right[1]).sum())
    assert found.worse == 0 < found.better
    assert not found.is_noise
    (same,) = compare_predictions(usual, usual)  # type: ignore[arg-type]
    assert same.is_noise
    unpaired = found.value.high - found.value.low
    assert found.difference.high - found.difference.low < unpaired


def test_a_smaller_error_is_better() -> None:
    values = draw_values(PRICE, 100)
    closer = {**values, "output": (values["output"] + values["target"]) / 2}
    pair = [replace(make_predictions(PRICE, {"": each}), digest="d") for each in (closer, values)]
    (found,) = compare_predictions(*pair)
    assert (found.metric, found.better, found.worse) == ("mae", 100, 0)
    assert found.difference.high < 0


def test_other_examples_are_not_compared() -> None:
    better, usual = make_pair(0.5)
    with pytest.raises(ConfigError, match=r"different examples: 400 of test, digest d and 400 of test, digest e"):
        compare_predictions(better, replace(usual, digest="e"))  # type: ignore[type-var, arg-type]
    rows = list_differences([("a", better), ("b", replace(usual, digest="e")), ("c", usual)])  # type: ignore[list-item, type-var]
    assert [row["model"] for row in rows] == ["a", "b", "c"]
    assert "different examples" in str(rows[1]["not compared"])
    assert rows[2]["more than noise"] == "yes"
