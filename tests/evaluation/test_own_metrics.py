"""Metrics that the user names, against scikit-learn on the same columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn import metrics

from scaleflow.config.targets import bind_metrics
from scaleflow.errors import ConfigError
from scaleflow.evaluation.own_metrics import measure_own
from scaleflow.interfaces import Target
from tests.evaluation.made import BINARY, CLASSES, PRICE, analyse_in, draw_predictions


def cost(targets: Any, answers: Any, alarm: float = 1.0) -> float:
    return float(alarm * np.mean(answers > targets) + np.mean(answers < targets))


def fail(targets: Any, answers: Any) -> str:
    return "much"


def fail_on_one_class(targets: Any, answers: Any) -> float:
    if len(np.unique(targets)) < 2:
        raise ValueError("one class")
    return 0.5


def change(targets: Any, answers: Any) -> float:
    targets[:] = answers[:] = 0
    return 1.0


def end(targets: Any, answers: Any) -> float:
    raise SystemExit(3)


def test_metrics_do_not_disturb_each_other() -> None:
    kept = draw_predictions(PRICE, 300)
    metrics = {"change": change, "end": end, "max": max, "complex": lambda t, a: 1 + 2j, "array": lambda t, a: t.mean()}
    own = {**metrics, "mae": lambda t, a: np.array(np.abs(t - a).mean())}
    found, faults = measure_own(kept, "", PRICE, own, 60)
    target = kept.column("target").astype(np.float64)
    assert found["array"].value == pytest.approx(target.mean())
    assert found["mae"].value == pytest.approx(np.abs(kept.column("prediction") - target).mean())
    assert faults.keys() == {"end", "max", "complex"}
    assert faults["complex"] == "it returned '(1+2j)', and a number is needed"


def bind(*names: Any) -> Any:
    return bind_metrics([each if isinstance(each, Target) else f"sklearn.metrics.{each}" for each in names])


@pytest.mark.parametrize("weighted", [False, True])
def test_classes_get_what_scikit_learn_computes(weighted: bool) -> None:
    kept = draw_predictions(BINARY, 300, weighted=weighted)
    own = Target("evaluation.metrics[2]", f"{__name__}.cost", {"alarm": 5})
    found, faults = measure_own(kept, "", BINARY, bind("cohen_kappa_score", "roc_auc_score", own), 60)
    assert faults == {}
    names = {name: n for n, name in enumerate(BINARY.names or ("0", "1"))}
    target, predicted = (
        np.array([names.get(value, value) for value in kept.column(name).tolist()]) for name in ("target", "prediction")
    )
    weights = kept.weights()
    chance = kept.column(f"probability_{list(names)[1]}")
    assert found["cohen_kappa_score"].value == pytest.approx(
        metrics.cohen_kappa_score(target, predicted, sample_weight=weights)
    )
    assert found["roc_auc_score"].value == pytest.approx(metrics.roc_auc_score(target, chance, sample_weight=weights))
    assert found["cost"].value == pytest.approx(cost(target, predicted, 5))
    for each in found.values():
        assert each.low < each.value < each.high


def test_values_get_theirs_and_failures_are_named(tmp_path: Any) -> None:
    kept = draw_predictions(PRICE, 300)
    own = Target("evaluation.metrics[1]", f"{__name__}.fail")
    functions = bind("median_absolute_error", own, "roc_auc_score")
    found, faults = measure_own(kept, "", PRICE, functions, 60)
    expected = metrics.median_absolute_error(kept.column("target"), kept.column("prediction"))
    assert found["median_absolute_error"].value == pytest.approx(expected)
    assert faults == {
        "fail": "it returned 'much', and a number is needed",
        "roc_auc_score": "it takes probabilities, and this output keeps none",
    }
    analysis = analyse_in(tmp_path, kept, metrics=functions)
    assert analysis.own == ["median_absolute_error"]
    assert analysis.missing == {
        "fail": "it returned 'much', and a number is needed",
        "roc_auc_score": "it takes probabilities, and this output keeps none",
    }


def test_draws_that_fail_do_not_count() -> None:
    kept = draw_predictions(CLASSES, 300)
    own = Target("evaluation.metrics[0]", f"{__name__}.fail_on_one_class")
    (estimate,) = measure_own(kept, "", CLASSES, bind(own), 60)[0].values()
    assert (estimate.value, np.isnan(estimate.low)) == (0.5, True), "its spread is not known"


def count(targets: Any, answers: Any, weights: Any) -> float:
    return float(weights.sum())


def take_none(*, targets: Any, answers: Any) -> float:
    return 0.0


def test_a_metric_that_needs_weights_gets_them() -> None:
    for weighted in (False, True):
        kept = draw_predictions(CLASSES, 50, weighted=weighted)
        own = bind(Target("evaluation.metrics[0]", f"{__name__}.count"))
        weights = kept.weights()
        expected = 50 if weights is None else weights.sum()
        assert measure_own(kept, "", CLASSES, own, 9)[0]["count"].value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["sklearn.metrics.nope_score"], "cannot be loaded"),
        ([Target("evaluation.metrics[0]", "sklearn.metrics.ConfusionMatrixDisplay")], "is a class; a function"),
        (
            ["sklearn.metrics.f1_score", Target("evaluation.metrics[1]", "sklearn.metrics.f1_score")],
            "two metrics f1_score",
        ),
        ([Target("evaluation.metrics[0]", f"{__name__}.cost", {"miss": 2})], "has no such argument; it accepts alarm"),
        ([Target("evaluation.metrics", f"{__name__}.take_none")], r"metrics\[0\].*passes 2 positional arguments, and"),
    ],
)
def test_what_is_no_metric_is_refused(given: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        bind_metrics(given)


def accuracy(targets: Any, answers: Any) -> float:
    return 2.0


def test_a_metric_does_not_take_the_place_of_a_figure(tmp_path: Any) -> None:
    kept = draw_predictions(BINARY, 300)
    analysis = analyse_in(tmp_path, kept, metrics=bind(Target("evaluation.metrics[0]", f"{__name__}.accuracy")))
    assert analysis.estimates["accuracy"].value <= 1
    assert analysis.own == []
    assert analysis.missing == {"accuracy": "the report has a figure of this name; use another"}
