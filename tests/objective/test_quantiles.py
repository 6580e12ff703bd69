"""Quantiles: their loss and its baseline against scikit-learn, no crossing, and what is refused."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import mean_absolute_error, mean_pinball_loss

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Outputs, Plan

LEVELS = (0.05, 0.5, 0.8)


def measure_all(scaling: tuple[float, float] | None, targets: Any, outputs: Any, weights: Any) -> dict[str, float]:
    from scaleflow.objective import make_objective
    from scaleflow.training import measure_outputs

    described = Outputs("regression", (2,), scaling=scaling, levels=LEVELS)
    return measure_outputs(make_objective(described, is_weighted=True), targets, outputs, weights)


@pytest.mark.parametrize("scaling", [None, (3e9, 250.0)])
def test_the_loss_is_the_mean_pinball_loss_of_scaled_values_and_metrics_are_of_the_median(scaling: Any) -> None:
    random = np.random.default_rng(0)
    mean, deviation = scaling or (0.0, 1.0)
    targets = mean + deviation * random.normal(size=(50, 2))
    outputs = np.sort(mean + deviation * random.normal(size=(50, 2, 3)), axis=-1)
    outputs = outputs if scaling else outputs.astype(np.float32)
    weights = random.integers(0, 3, 50).astype(np.float64)
    found = measure_all(scaling, targets, outputs, weights)
    losses = [
        mean_pinball_loss(targets, outputs[..., n], sample_weight=weights, alpha=level)
        for n, level in enumerate(LEVELS)
    ]
    assert found["loss"] == pytest.approx(np.mean(losses) / deviation, rel=1e-5)
    assert found["mae"] == pytest.approx(mean_absolute_error(targets, outputs[..., 1], sample_weight=weights), rel=1e-5)


def test_the_baseline_are_the_quantiles_of_the_training_targets() -> None:
    from scaleflow.training import baselines

    random = np.random.default_rng(1)
    train, test = random.gamma(2, 3, (400, 1)), random.gamma(2, 3, (300, 1))
    described = Outputs("regression", (1,), scaling=(6.0, 4.0), levels=LEVELS)
    found = baselines(described, {"train": train, "test": test})
    quantiles = np.quantile(train, LEVELS, method="inverted_cdf")
    losses = [
        mean_pinball_loss(test, np.full_like(test, value), alpha=level)
        for value, level in zip(quantiles, LEVELS, strict=True)
    ]
    assert found["baseline/loss"] == pytest.approx(np.mean(losses) / 4)
    assert found["baseline/mae"] == pytest.approx(np.abs(test - quantiles[1]).mean())


def test_ordered_values_never_cross_and_begin_as_normal_quantiles() -> None:
    from scaleflow.model.layers import order_levels

    random = np.random.default_rng(2)
    levels = (0.001, 0.1, 0.5, 0.500001, 0.9, 0.999)
    sizes = random.choice([1e-30, 1e-3, 1, 1e3, 1e9, 1e30], (500, 1))
    drawn = (random.normal(size=(500, 12)) * sizes).astype(np.float32)
    found = np.asarray(order_levels(drawn, levels))
    assert found.shape == (500, 2, 6)
    assert (np.diff(found, axis=-1) >= 0).all()
    begun = np.asarray(order_levels(np.zeros((1, 12), np.float32), levels))
    np.testing.assert_allclose(begun[0], np.tile(norm.ppf(levels), (2, 1)), atol=1e-5)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("'objective.levels=[0,0.5]'", "above 0 and below 1"),
        ("'objective.levels=[0.5,1.0]'", "above 0 and below 1"),
        ("'objective.levels=[0.5,0.1]'", "objective.levels=[0.5, 0.1]: these are two or more"),
        ("'objective.levels=[0.1,0.5,0.5]'", "ascending, none twice, and one is 0.5"),
        ("'objective.levels=[0.1,0.9]'", "give such as [0.1, 0.5, 0.9]"),
        ("'objective.levels=[0.5]'", "for the median alone objective.loss=mae"),
        ("'objective.levels=[]'", "these are two or more"),
        ("'objective.levels=[half]'", "objective.levels=['half']: expected a list such as [0.1, 0.5, 0.9], or null"),
        ("objective=quantiles objective.loss=mae", "quantiles have a loss of their own"),
        ("objective=quantiles evaluation.interval=0.9", "quantiles are the ends of intervals already"),
        ("objective=quantiles 'training.step={_target_: a.b}'", "a custom step computes the training loss itself"),
    ],
)
def test_options_that_quantiles_do_not_go_with_are_refused(plan: Callable[..., Plan], words: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        plan(*shlex.split(words))


def test_levels_of_one_column_are_refused() -> None:
    from scaleflow.worker.earlier import check_levels

    wanted = "two columns of predictions would have one name, of levels that are equal to ten digits, or of the values"
    with pytest.raises(ConfigError, match=wanted):
        check_levels(Outputs("regression", (1,)), (0.1, 0.1000000000001, 0.5))


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        (
            Outputs("classification", (10,)),
            "is for one or a few numbers, and the dataset has classification targets (10,)",
        ),
        (Outputs("regression", (65,)), "is for one or a few numbers"),
        (Outputs("regression", (8, 8)), "is for one or a few numbers"),
        ({"a": Outputs("regression", (1,)), "b": Outputs("regression", (1,))}, "and the dataset has 2 outputs"),
        (Outputs("regression", (2,), names=("a", "a_q50")), "two columns of predictions would have one name"),
    ],
)
def test_targets_without_quantiles_are_refused(outputs: Any, reason: str) -> None:
    from scaleflow.worker.earlier import check_levels

    with pytest.raises(ConfigError, match=re.escape(reason)):
        check_levels(outputs, LEVELS)


def test_close_levels_have_columns_of_their_own() -> None:
    from scaleflow.serving.prediction_columns import make_prediction_columns

    described = Outputs("regression", (1,), levels=(0.07, 0.101, 0.1014, 0.5))
    found = make_prediction_columns({"": described}, {"": np.array([[[1.0, 2, 3, 4]]])})
    ends = ("", "_q7", "_q10.1", "_q10.14", "_q50")
    assert [found[f"prediction{end}"].tolist() for end in ends] == [[4], [1], [2], [3], [4]]
    assert len(found) == len(ends)
    several = replace(described, shape=(2,), names=("a", "b"), levels=(0.1, 0.5))
    found = make_prediction_columns({"": several}, {"": np.array([[[1.0, 2], [3, 4]]])})
    names = ("a", "b", "a_q10", "b_q10", "a_q50", "b_q50")
    assert {name: each.tolist() for name, each in found.items()} == {
        f"prediction_{name}": [value] for name, value in zip(names, (2, 4, 1, 3, 2, 4), strict=True)
    }
