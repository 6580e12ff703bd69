"""What validation rows decide, against scikit-learn, searches of all thresholds, and the binomial distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, norm
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, precision_score, recall_score

from scaleflow.evaluation.calibration import (
    choose_threshold,
    count_needed,
    find_margins,
    find_set_threshold,
    fit_calibration,
)
from scaleflow.interfaces.config import ThresholdGoal
from scaleflow.serving.prediction_columns import make_prediction_columns
from tests.evaluation.made import CLASSES, PRICE, TWO

Array = np.ndarray[Any, Any]


def draw_binary(rows: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Returns targets, the logits of their true probabilities, and weights."""
    random = np.random.default_rng(seed)
    logits = random.normal(-1.5, 1.5, rows)
    target = (random.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.int64)
    return target, logits, random.integers(0, 3, rows).astype(np.float64)


def test_two_classes_are_calibrated_as_a_logistic_regression_of_the_logit() -> None:
    target, logits, weights = draw_binary(4000)
    moved = 3 * logits + 2  # of a model that is too sure, trained on other shares
    found = fit_calibration(target, moved, weights)
    expected = LogisticRegression(C=1e9).fit(moved[:, None], target, weights)
    assert found == pytest.approx((expected.coef_[0, 0], expected.intercept_[0]), rel=1e-3)


def test_several_classes_get_the_temperature_with_the_least_log_loss() -> None:
    random = np.random.default_rng(1)
    logits = random.normal(0, 1.5, (3000, 4))
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    target = (random.random((3000, 1)) > chances.cumsum(axis=1)).sum(axis=1)
    found = fit_calibration(target, 4 * logits, np.ones(3000))
    assert found is not None
    tried = np.geomspace(0.05, 2, 4000)
    rows = np.arange(3000)
    losses = [np.log(np.exp(f * 4 * logits).sum(axis=1)).mean() - (f * 4 * logits)[rows, target].mean() for f in tried]
    assert found[0] == pytest.approx(tried[int(np.argmin(losses))], rel=2e-3)
    assert found[1] == 0.0


@pytest.mark.slow
def test_probabilities_that_are_right_mostly_stay_as_they_are() -> None:
    kept = sum(fit_calibration(*draw_binary(300, seed)) is None for seed in range(40))
    assert kept >= 20  # two parameters fitted to noise seldom help new rows


@pytest.mark.parametrize("weighted", [False, True])
def test_a_threshold_reaches_its_goal_as_no_other_does(weighted: bool) -> None:
    target, logits, weights = draw_binary(500, 3)
    weights = weights if weighted else np.ones(500)
    chance = np.round(1 / (1 + np.exp(-logits)), 2).astype(np.float32)  # many are equal
    tried = np.unique(chance)

    def measure(score: Any, threshold: float) -> float:
        return float(score(target, chance >= threshold, sample_weight=weights, zero_division=0))

    def cost(threshold: float) -> float:
        is_second = chance >= np.float32(threshold)
        return float((weights * (5 * (target * ~is_second) + (1 - target) * is_second)).sum())

    best, _ = choose_threshold(target, chance, weights, "auto")
    assert measure(f1_score, best or 0) == pytest.approx(max(measure(f1_score, each) for each in tried))
    found, text = choose_threshold(target, chance, weights, ThresholdGoal(recall=0.9))
    enough = [each for each in tried if measure(recall_score, each) >= 0.9]
    assert measure(precision_score, found or 0) == pytest.approx(measure(precision_score, max(enough)))
    assert f"recall {measure(recall_score, max(enough)):.3g}" in text
    found, _ = choose_threshold(target, chance, weights, ThresholdGoal(precision=0.6))
    right = [each for each in tried if measure(precision_score, each) >= 0.6]
    assert measure(recall_score, found or 0) == pytest.approx(max(measure(recall_score, each) for each in right))
    found, _ = choose_threshold(target, chance, weights, ThresholdGoal(cost=[5, 1]))
    assert cost(found or 0) == pytest.approx(min(map(cost, tried)))
    assert found not in tried  # it lies between, where rounding elsewhere does not matter


def test_a_goal_that_no_threshold_reaches_leaves_the_usual_one() -> None:
    target, chance = np.array([1, 0] * 20), np.linspace(0.1, 0.9, 40)
    assert choose_threshold(target, chance, np.ones(40), ThresholdGoal(precision=0.95)) == (
        None,
        "the highest precision is 0.5",
    )


def test_a_class_whose_alarms_cost_too_much_is_not_predicted() -> None:
    target, chance = np.array([1, 0] * 20), np.linspace(0.1, 0.9, 40)
    found, text = choose_threshold(target, chance, np.ones(40), ThresholdGoal(cost=[0.1, 1]))
    assert found == pytest.approx(0.95)
    assert text == "precision 0 and recall 0 there"


def test_a_threshold_between_neighbours_is_the_upper_one() -> None:
    low = np.float32(0.3)
    target, high = np.array([1, 0] * 20), np.nextafter(low, np.float32(1))
    for below, above in ((low, high), (high, np.nextafter(high, np.float32(1)))):
        found, _ = choose_threshold(target, np.where(target == 1, above, below), np.ones(40), "auto")
        assert found == float(above)


@pytest.mark.parametrize("draw", [lambda r: r.permutation(200) < 12, lambda r: r.exponential(size=200) ** 2])
def test_intervals_of_rows_with_weights_hold_new_targets_too(draw: Any) -> None:
    random, covered = np.random.default_rng(1), []
    for _ in range(1000):
        margin = find_margins(random.normal(size=(200, 1)), 0.9, draw(random).astype(np.float64))[0]
        covered.append(norm.cdf(margin) - norm.cdf(-margin))
    assert 0.9 <= np.mean(covered) < 0.94  # 0.85 if rows without a weight count


@pytest.mark.parametrize(("rows", "level"), [(50, 0.9), (200, 0.8), (19, 0.95)])
def test_intervals_hold_new_targets_as_often_as_they_say(rows: int, level: float) -> None:
    random, outside, new = np.random.default_rng(rows), 0, 400
    # The coverage of a split conformal interval is a beta distribution over validation rows.
    ranks = int(np.ceil((rows + 1) * level))
    for _ in range(200):
        errors = random.standard_t(3, (rows + new, 1)) * 5 + 2
        margin = find_margins(errors[:rows], level, np.ones(rows))[0]
        covered = int((np.abs(errors[rows:]) <= margin).sum())
        share = random.beta(ranks, rows + 1 - ranks, 2000)
        low, high = np.quantile(binom.rvs(new, share, random_state=random), [0.025, 0.975])
        outside += not low <= covered <= high
    assert outside <= 20  # of 200 tables 5 % on average, 10 % with near certainty at most


@pytest.mark.parametrize(("rows", "level", "classes"), [(50, 0.9, 2), (200, 0.8, 20)])
def test_sets_hold_the_classes_of_new_rows_as_often_as_they_say(rows: int, level: float, classes: int) -> None:
    random, outside, new, sizes = np.random.default_rng(rows), 0, 400, []
    ranks = int(np.ceil((rows + 1) * level))
    for _ in range(200):
        true = random.dirichlet(np.full(classes, 0.5), rows + new)
        target = (random.random((rows + new, 1)) > true.cumsum(axis=1)).sum(axis=1).clip(0, classes - 1)
        chances = true**0.5 + random.uniform(0, 0.1, true.shape)  # of a model that is wrong
        chances = (chances / chances.sum(axis=1, keepdims=True)).astype(np.float32)
        of_target = np.take_along_axis(chances, target[:, None], axis=1)[:, 0]
        threshold = find_set_threshold(of_target[:rows], level, np.ones(rows))
        covered = int((of_target[rows:] >= np.float32(threshold)).sum())
        sizes.append((chances[rows:] >= np.float32(threshold)).sum(axis=1).mean())
        share = random.beta(ranks, rows + 1 - ranks, 2000)
        low, high = np.quantile(binom.rvs(new, share, random_state=random), [0.025, 0.975])
        outside += not low <= covered <= high
    assert outside <= 20
    assert np.mean(sizes) < classes


def test_sets_are_json_lists_of_the_likely_classes_and_the_predicted_one() -> None:
    import json
    from dataclasses import replace

    names = ("red", 'a "quote", ü', "blue")
    described = replace(CLASSES, shape=(3,), names=names, set_threshold=0.6)
    chances = np.array([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25], [0.1, 0.3, 0.6]], np.float32)
    for least, wanted in ((0.6, [[0], [0], [2]]), (0.25, [[0], [0, 1, 2], [1, 2]])):
        found = make_prediction_columns({"": replace(described, set_threshold=least)}, {"": np.log(chances)})
        assert [json.loads(each) for each in found["prediction_set"]] == [[names[n] for n in row] for row in wanted]
    numbered = replace(described, names=None, set_threshold=0.25)
    assert make_prediction_columns({"": numbered}, {"": np.log(chances)})["prediction_set"][2] == "[1, 2]"
    assert len(make_prediction_columns({"": numbered}, {"": np.zeros((0, 3), np.float32)})["prediction_set"]) == 0


def test_an_interval_needs_as_many_rows_as_make_an_end() -> None:
    assert [count_needed(level) for level in (0.5, 0.8, 0.9, 0.95, 0.99)] == [1, 4, 9, 19, 99]
    errors = np.arange(1.0, 10.0)[:, None]
    assert find_margins(errors, 0.9, np.ones(9)) == [9.0]
    assert find_margins(-errors, 0.8, np.ones(9)) == [8.0]
    assert find_margins(errors, 0.8, np.array([1.0] * 8 + [9.0])) == [9.0]  # a row of weight 9


def test_columns_of_predictions_follow_the_threshold_and_the_margins() -> None:
    from dataclasses import replace

    logits = np.log(np.array([[0.2], [0.3], [0.6]]) / np.array([[0.8], [0.7], [0.4]])).astype(np.float32)
    binary = {"": replace(TWO, kind="binary", shape=(1,), names=("no", "yes"), threshold=0.25)}
    found = make_prediction_columns(binary, {"": logits})
    assert found["prediction"].tolist() == ["no", "yes", "yes"]
    assert found["probability"] == pytest.approx([0.8, 0.3, 0.6])
    values = make_prediction_columns({"": replace(PRICE, margins=(2.5,))}, {"": np.array([[1.0], [4.0]], np.float32)})
    assert list(values) == ["prediction", "prediction_low", "prediction_high"]
    assert [each.tolist() for each in values.values()] == [[1, 4], [-1.5, 1.5], [3.5, 6.5]]
