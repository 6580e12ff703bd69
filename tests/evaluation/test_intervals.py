"""Intervals: of all rows, in the range of their figure, and as often right as they say."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from sklearn import metrics

from scaleflow.evaluation.intervals import Intervals
from scaleflow.evaluation.measures import measure_calibration, measure_one, rank_scores
from scaleflow.evaluation.outputs import analyse_output
from scaleflow.evaluation.own_metrics import find_interval
from scaleflow.evaluation.resampling import Resamples
from scaleflow.features.compare.examples import ExampleValues, compare_examples, list_class_values
from tests.evaluation.coverage import (
    CLASS_CASES,
    RATE_CASES,
    VALUE_CASES,
    Model,
    draw_class_estimates,
    draw_classes,
    draw_value_estimates,
    find_exact_coverage,
    list_estimates,
    simulate,
)
from tests.evaluation.made import BINARY, analyse_in, draw_predictions, draw_values, make_predictions

Array = np.ndarray[Any, Any]

#: The least and the greatest share of intervals that hold the truth: 200 and 400 simulations differ by chance.
QUICK, SLOW = (0.90, 0.996), (0.915, 0.99)

#: Figures whose intervals hold the truth too often, if it is 0 or near 1.
CAUTIOUS = ("calibration_error", "roc_auc", "average_precision")


@pytest.mark.parametrize(("rate", "rows"), RATE_CASES)
def test_95_of_100_intervals_of_a_rate_hold_it(rate: float, rows: int) -> None:
    expected = rate * rows
    found = find_exact_coverage(rate, rows)
    assert found >= 0.93
    assert found <= (0.97 if expected >= 5 else 1.0)


@pytest.mark.parametrize("name", ["tenth 1000", "groups of 20, half 1000"])
def test_95_of_100_intervals_of_classes_hold_the_truth(name: str) -> None:
    check_coverage(simulate(*draw_class_estimates(name), 200), QUICK)


@pytest.mark.parametrize("name", ["normal 30", "skewed 200", "skewed 2000, groups of 20"])
def test_95_of_100_intervals_of_errors_hold_the_truth(name: str) -> None:
    check_coverage(simulate(*draw_value_estimates(name), 200), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CLASS_CASES, *VALUE_CASES])
def test_95_of_100_intervals_hold_the_truth_in_all_cases(name: str) -> None:
    draw = draw_class_estimates if name in CLASS_CASES else draw_value_estimates
    check_coverage(simulate(*draw(name), 100 if "million" in name else 400), SLOW if "million" not in name else QUICK)


def check_coverage(found: Any, limits: tuple[float, float]) -> None:
    for name, each in found.items():
        assert each.count, name
        assert limits[0] <= each.share, (name, each)
        assert each.share <= limits[1] or name in CAUTIOUS, (name, each)


def test_all_rows_of_a_rare_class_count() -> None:
    """24 of 100,000 rows: intervals are as wide as the bootstrap of all rows, and figures from 0 to 1 stay there."""
    model = Model(24e-5, 4.0, threshold=0.02)
    data, intervals = draw_classes(model, 100_000, np.random.default_rng(3))
    found = list_estimates(data, intervals)
    positives = data.is_correct[data.target == 1]
    random = np.random.default_rng(0)
    drawn = [positives[random.integers(len(positives), size=len(positives))].mean() for _ in range(1000)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    balanced = found["balanced_accuracy"]
    assert balanced.high - balanced.low == pytest.approx((high - low) / 2, rel=0.3)
    for name, estimate in found.items():
        assert 0 <= estimate.low <= estimate.value <= estimate.high, name
        assert estimate.high <= 1 or name == "log_loss", name


def test_large_errors_count() -> None:
    """25 of 60,000 errors are large."""
    random = np.random.default_rng(0)
    errors = random.normal(size=60_000)
    errors[random.choice(60_000, 25, replace=False)] *= 100
    found = measure_one(random.normal(size=60_000), errors, Intervals(60_000))["rmse"]
    drawn = [np.sqrt(np.mean(errors[random.integers(60_000, size=60_000)] ** 2)) for _ in range(300)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    assert (found.low, found.high) == pytest.approx((low, high), rel=0.2)


@pytest.mark.parametrize("kind", ["auc", "average_precision"])
def test_the_influence_of_a_row_is_the_slope_of_the_area(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    scores, is_yes, weights = random.integers(9, size=40) / 9, random.random(40) < 0.4, random.uniform(0.5, 2, 40)
    given: list[Array] = []
    area = Intervals.area

    def keep(self: Intervals, value: float, influence: Array, count: float) -> Any:
        given.append(influence)
        return area(self, value, influence, count)

    monkeypatch.setattr(Intervals, "area", keep)
    rank_scores(scores, is_yes, Intervals(40, weights))
    compute = metrics.roc_auc_score if kind == "auc" else metrics.average_precision_score
    influence = given[1 if kind == "auc" else 0]
    for row in (0, 7, 13, 39):
        step = 1e-5 * (np.arange(40) == row)
        ends = [compute(is_yes, scores, sample_weight=weights + sign * step) for sign in (1, -1)]
        assert influence[row] == pytest.approx(weights[row] * (ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-8)


def test_no_row_and_no_positive_have_no_interval() -> None:
    none = rank_scores(np.array([0.2, 0.4]), np.array([False, False]), Intervals(2))
    assert np.isnan([none.auc.value, none.auc.low, none.average_precision.low]).all()
    one = rank_scores(np.linspace(0, 1, 50), np.arange(50) == 49, Intervals(50))
    assert (one.auc.value, one.auc.high) == (1, 1)
    assert one.auc.low < 0.3, "one row says little"


def test_a_million_rows_take_seconds() -> None:
    data, intervals = draw_classes(Model(1e-4, 3.0), 1_000_000, np.random.default_rng(0))
    began = time.process_time()
    list_estimates(data, intervals)
    assert time.process_time() - began < 30


def test_models_that_are_equally_good_on_a_rare_class_do_not_differ() -> None:
    """Both find 80 % of about 25 positives among 20,000 rows: what differs is chance."""
    differ = 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        target = (random.random(20_000) < 25 / 20_000).astype(int)
        pair = []
        for _ in range(2):
            predicted = np.where(target == 1, random.random(20_000) < 0.8, random.random(20_000) < 0.001).astype(int)
            columns = {"target": target, "prediction": predicted, "target_probability": np.full(20_000, 0.5)}
            (values,) = list_class_values(columns.__getitem__, "balanced_accuracy", np.ones(20_000))
            pair.append(values)
        low, high = compare_examples(*pair)
        differ += not low <= 0 <= high
    assert differ <= 10


def test_the_difference_of_means_has_its_paired_interval() -> None:
    random = np.random.default_rng(0)
    first, second = random.normal(size=(2, 500))
    pair = [
        ExampleValues(each[:, None] ** 2, np.ones((500, 1)), lambda m: np.sqrt(m[..., 0])) for each in (first, second)
    ]
    low, high = compare_examples(*pair)
    places = random.integers(500, size=(2000, 500))
    drawn = [np.sqrt((second[n] ** 2).mean()) - np.sqrt((first[n] ** 2).mean()) for n in places]
    assert (low, high) == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=0.02)


def test_own_metrics_draw_all_rows_or_leave_out_parts() -> None:
    random = np.random.default_rng(0)
    values = np.where(random.random(50_000) < 5e-4, 1000.0, 0.0)  # 25 rows decide
    deviation = values.std() / 50_000**0.5

    def compute(places: Array) -> float:
        return float(values[places].mean())

    for seconds in (60.0, None):
        if seconds is None:  # time for about 20 calls
            began = time.monotonic()
            compute(np.arange(50_000))
            seconds = 20 * (time.monotonic() - began)
        found = find_interval(compute, 50_000, Resamples(50_000), seconds)
        if not np.isnan(found.low):
            assert found.high - found.low == pytest.approx(2 * 1.96 * deviation, rel=0.6)
    assert not np.isnan(find_interval(compute, 50_000, Resamples(50_000), 60.0).low)
    assert np.isnan(find_interval(lambda places: 1.0, 50, Resamples(50), 60.0).low), "no spread was seen"


def test_one_report_has_one_interval_for_one_figure(tmp_path: Path) -> None:
    functions = {"roc_auc_score": metrics.roc_auc_score, "mine": lambda t, y_score: metrics.roc_auc_score(t, y_score)}
    analysis = analyse_in(tmp_path, draw_predictions(BINARY, 300), metrics=functions)
    assert analysis.estimates["roc_auc_score"] == pytest.approx(analysis.estimates["roc_auc"])


def test_a_report_of_a_rare_class_has_its_figures(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    target = (random.random((3000, 1)) < 0.03).astype(np.float32)
    output = (2 * target - 3 + random.normal(size=(3000, 1))).astype(np.float32)
    analysis = analyse_in(tmp_path, make_predictions(BINARY, {"": {"target": target, "output": output}}))
    assert analysis.estimates["average_precision"].low > 0
    assert {"roc_auc", "average_precision"} <= set(analysis.own)


def test_a_threshold_keeps_the_intervals_of_the_likelier_class() -> None:
    values = draw_values(BINARY, 400)
    plain = analyse_output(make_predictions(BINARY, {"": values}), "", BINARY, 1).estimates
    described = replace(BINARY, threshold=0.2)
    found = analyse_output(make_predictions(described, {"": values}), "", described, 1).estimates
    for name in ("accuracy", "balanced_accuracy", "macro_f1"):
        assert found[name] == pytest.approx(plain[name])
        assert found[f"{name}_at_threshold"].value != found[name].value


@pytest.mark.parametrize(("counts", "skill"), [((5, 995), 2.0), ((20, 980), 2.0)])
def test_an_auc_of_few_rows_with_equal_scores_has_a_wide_interval(counts: tuple[int, int], skill: float) -> None:
    """All rows of the rare class may be on the same side of the one threshold: their variance says nothing then."""
    positives, others = counts
    chance = NormalDist().cdf(skill - 0.5)
    truth = (1 + chance - NormalDist().cdf(-0.5)) / 2
    is_positive = np.arange(positives + others) < positives
    held = 0
    for seed in range(100):
        scores = np.random.default_rng(seed).normal(size=len(is_positive)) + skill * is_positive > 0.5
        auc = rank_scores(scores.astype(np.float64), is_positive, Intervals(len(scores))).auc
        assert 0 <= auc.low <= auc.value <= auc.high <= 1
        held += auc.low <= truth <= auc.high
    assert held >= 92


def test_one_row_above_many_equal_scores_has_an_interval() -> None:
    scores = np.concatenate([np.zeros(100), [9.0], np.linspace(-2, 2, 100_000)])
    is_positive = np.arange(len(scores)) < 101
    auc = rank_scores(scores, is_positive, Intervals(len(scores))).auc
    assert 0.4 < auc.low < auc.value < auc.high < 0.6


def test_a_bin_of_few_mistakes_widens_the_interval_of_the_calibration_error() -> None:
    """A constant answer of 0.7 for a class that 0.5 % of the rows lack: its calibration error is 0.295."""
    held = 0
    for seed in range(200):
        is_right = np.random.default_rng(seed).random(2000) >= 0.005
        found = measure_calibration(np.full(2000, 0.7), is_right, Intervals(2000))
        held += found.low <= 0.295 <= found.high
    assert held >= 188
