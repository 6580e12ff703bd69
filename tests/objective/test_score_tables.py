"""Ranking metrics of score tables, against scikit-learn: exact, or within 1e-4 if scores are merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn import metrics

Array = np.ndarray[Any, Any]


def draw(rows: int, rate: float, is_tied: bool = False) -> tuple[Array, Array, Array]:
    """Scores that differ little, targets of a rare class, and weights."""
    random = np.random.default_rng(rows)
    target = random.random(rows) < rate
    target[:2] = [True, False]
    scores = 1e-4 * (random.normal(size=rows) + target) - 9
    return np.round(scores, 5) if is_tied else scores, target, random.uniform(0, 3, rows)


def collect(parts: Any, **options: Any) -> Any:
    from scaleflow.objective.score_tables import ScoreCollector

    collector = ScoreCollector(**options)
    for scores, target, weights in parts:
        collector.add(scores[:, None], target[:, None], weights[:, None])
    return collector


def split(drawn: tuple[Array, Array, Array], count: int) -> Any:
    return zip(*(np.array_split(each, count) for each in drawn), strict=True)


@pytest.mark.parametrize("is_tied", [False, True])
def test_areas_are_those_of_scikit_learn(is_tied: bool) -> None:
    from scaleflow.objective.score_tables import compute_average_precision, compute_roc_area

    scores, target, weights = drawn = draw(3000, 0.01, is_tied)
    (table,) = collect(split(drawn, 7)).to_tables()
    assert compute_roc_area(table) == pytest.approx(metrics.roc_auc_score(target, scores, sample_weight=weights))
    precision = metrics.average_precision_score(target, scores, sample_weight=weights)
    assert compute_average_precision(table) == pytest.approx(precision)


def test_rates_are_those_of_scikit_learn() -> None:
    from scaleflow.objective.score_tables import find_best_rate

    scores, target, weights = drawn = draw(2000, 0.1, True)
    (table,) = collect(split(drawn, 3)).to_tables()
    false, true, _ = metrics.roc_curve(target, scores, sample_weight=weights, drop_intermediate=False)
    precision, recall, _ = metrics.precision_recall_curve(target, scores, sample_weight=weights)
    found = {
        ("sensitivity", "specificity"): true[1 - false >= 0.9 - 1e-9].max(),
        ("specificity", "sensitivity"): (1 - false)[true >= 0.9 - 1e-9].max(),
        ("precision", "sensitivity"): precision[recall >= 0.5 - 1e-9][precision[recall >= 0.5 - 1e-9] < 1].max(),
        ("sensitivity", "precision"): recall[precision >= 0.3 - 1e-9].max(),
    }
    for (wanted, given), value in found.items():
        least = {"precision": 0.3, "specificity": 0.9}.get(given, 0.9 if wanted == "specificity" else 0.5)
        assert find_best_rate(table, wanted, given, least) == pytest.approx(value), wanted


@pytest.mark.parametrize("rate", [1e-4, 0.3])
def test_merged_scores_of_several_workers_are_off_by_less_than_1e_4(rate: float) -> None:
    from scaleflow.objective.score_tables import compute_average_precision, compute_roc_area

    scores, target, weights = drawn = draw(400_000, rate)
    workers = [collect(split(part, 3), max_scores=1 << 16) for part in split(drawn, 2)]
    workers[0].merge(workers[1].to_bytes())
    (table,) = workers[0].to_tables()
    assert len(table.scores) < 300_000
    exact = metrics.roc_auc_score(target, scores, sample_weight=weights)
    assert compute_roc_area(table) == pytest.approx(exact, abs=1e-4)
    exact = metrics.average_precision_score(target, scores, sample_weight=weights)
    assert compute_average_precision(table) == pytest.approx(exact, abs=1e-4)


def test_a_class_that_does_not_occur_has_no_area() -> None:
    from scaleflow.objective.score_tables import compute_average_precision, compute_roc_area

    ones = np.ones(3)
    (table,) = collect([(ones, ones > 0, ones)]).to_tables()
    assert np.isnan(compute_roc_area(table))
    assert np.isnan(compute_average_precision(table))
    (table,) = collect([(ones, ones > 0, 0 * ones)]).to_tables()  # padding only
    assert np.isnan(compute_roc_area(table))


def test_merged_scores_of_many_columns_keep_the_average_precision_of_rare_classes() -> None:
    """Later positives meet negatives that were merged before."""
    from scaleflow.objective.score_tables import ScoreCollector, compute_average_precision

    random = np.random.default_rng(0)
    target = random.random((300_000, 2)) < 1e-3
    scores = random.normal(size=target.shape) + 1.5 * target
    collector = ScoreCollector(max_scores=1 << 16)
    for part, own in zip(np.array_split(scores, 50), np.array_split(target, 50), strict=True):
        collector.add(part, own, np.ones(part.shape))
    for n, table in enumerate(collector.to_tables()):
        assert len(table.scores) < 100_000
        exact = metrics.average_precision_score(target[:, n], scores[:, n])
        assert compute_average_precision(table) == pytest.approx(exact, abs=1e-4)
