"""The conditions of a promotion, as plain Python."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from scaleflow.errors import ConfigError, RunError
from scaleflow.evaluation.comparison import PairedScores, ScoreComparison
from scaleflow.evaluation.predictions import GROUP, Predictions
from scaleflow.evaluation.resampling import Units
from scaleflow.features.promotion import decision as decision_module
from scaleflow.features.promotion.decision import (
    Condition,
    Decision,
    check_floor,
    describe_comparison,
    make_record,
)
from scaleflow.features.promotion.feature import PromotionOptions
from scaleflow.features.promotion.steps import compare_models
from scaleflow.interfaces.estimate import Estimate
from tests.evaluation.made import BINARY, CLASSES, PRICE, draw_values, make_predictions

OPTIONS = PromotionOptions(name="champion", model="m")


def make_models(count: int, shift: float = 2.0) -> tuple[Predictions, Predictions]:
    """A candidate that is better, and the champion."""
    values = draw_values(CLASSES, count)
    better = {**values, "output": values["output"].copy()}
    better["output"][np.arange(count), values["target"]] += shift
    return make_predictions(CLASSES, {"": better}), make_predictions(CLASSES, {"": values})


def test_a_candidate_is_compared_on_examples_that_the_champion_was_not_trained_on() -> None:
    candidate, champion = make_models(200)
    is_seen = np.arange(200) < 150
    found = compare_models(candidate, champion, is_seen, OPTIONS)
    right = [(each.column("target") == each.column("prediction"))[150:] for each in (candidate, champion)]
    assert (found.metric, found.examples, found.left_out) == ("accuracy", 50, 150)
    assert [found.value.value, found.other] == pytest.approx([each.mean() for each in right])
    assert found.gain.value == pytest.approx(right[0].mean() - right[1].mean())
    assert found.gain.low < found.gain.value < found.gain.high
    assert (found.better, found.worse) == ((right[0] & ~right[1]).sum(), (right[1] & ~right[0]).sum())
    condition = describe_comparison(found, OPTIONS)
    assert condition.holds
    assert condition.text.endswith("on 50 examples, without 150 that the champion was trained on")
    on_file = compare_models(candidate, champion, is_seen, OPTIONS, "week.csv")
    assert describe_comparison(on_file, OPTIONS).text.endswith(
        "on 50 examples of week.csv, without 150 that a model was trained on"
    )
    assert not describe_comparison(compare_models(champion, candidate, is_seen, OPTIONS), OPTIONS).holds
    strict = describe_comparison(found, replace(OPTIONS, tolerance=found.gain.high))
    assert strict.text.endswith(f"the lower end is not above {found.gain.high:g}")
    with pytest.raises(ConfigError, match="on 29 examples; the champion was trained on 171 others; at least 30 are"):
        compare_models(candidate, champion, np.arange(200) < 171, OPTIONS)
    with pytest.raises(ConfigError, match=r"; a model was trained on 171 others; .* needed: use other data"):
        compare_models(candidate, champion, np.arange(200) < 171, OPTIONS, "week.csv")
    with pytest.raises(ConfigError, match=r"promotion.metric=auc: the models are compared by accuracy"):
        compare_models(candidate, champion, is_seen, replace(OPTIONS, metric="auc"))


def test_models_of_other_classes_are_compared_by_the_names_of_classes() -> None:
    values = draw_values(CLASSES, 100)
    other = replace(CLASSES, names=("dog", "cat", "bee", "ant"))
    mirrored = {"target": 3 - values["target"], "output": values["output"][:, ::-1]}
    pair = make_predictions(CLASSES, {"": values}), make_predictions(other, {"": mirrored})
    found = compare_models(*pair, np.zeros(100, bool), OPTIONS)
    assert (found.value.value, found.better, found.worse) == (found.other, 0, 0)
    with pytest.raises(ConfigError, match="the models have other outputs"):
        compare_models(pair[0], make_predictions(PRICE, {"": draw_values(PRICE, 100)}), np.zeros(100, bool), OPTIONS)


def test_a_smaller_error_is_better() -> None:
    values = draw_values(PRICE, 100)
    closer = {**values, "output": (values["output"] + values["target"]) / 2}
    pair = [make_predictions(PRICE, {"": each}) for each in (closer, values)]
    found = compare_models(*pair, np.zeros(100, bool), OPTIONS)
    assert (found.metric, found.is_error, found.better, found.worse) == ("mae", True, 100, 0)
    assert found.gain.value == pytest.approx(found.other - found.value.value)
    condition = describe_comparison(found, OPTIONS)
    assert condition.holds
    assert f": better by {found.gain.value:.4g} (+" in condition.text
    worse = compare_models(*pair[::-1], np.zeros(100, bool), OPTIONS)
    assert worse.value.value > worse.other
    condition = describe_comparison(worse, OPTIONS)
    assert not condition.holds
    assert f": worse by {-worse.gain.value:.4g} (gain -" in condition.text


def draw_noise(random: Any, count: int, kind: str) -> PairedScores:
    """The scores of two models that are equally good: what differs is chance."""
    if kind == "error":
        scores, others = random.gamma(1.0, size=(2, count))
        return PairedScores("mae", True, np.arange(count), scores, others, None)
    if kind == "customers":  # of 20 rows each
        scores, others = np.repeat(random.random((2, count // 20)) < 0.6, 20, axis=1) * 1.0
        units = Units(np.arange(count) // 20, "group", " of customer")
        return PairedScores("accuracy", False, np.arange(count), scores, others, None, units)
    differs = random.random(count) < float(kind)  # examples on which one of them is right
    first = random.random(count) < 0.5
    return PairedScores("accuracy", False, np.arange(count), differs * first * 1.0, differs * ~first * 1.0, None)


@pytest.mark.parametrize(("kind", "count"), [("0.2", 100), ("0.1", 40), ("error", 60), ("customers", 240)])
def test_of_a_hundred_candidates_that_are_no_better_at_most_five_are_promoted(kind: str, count: int) -> None:
    random, trials = np.random.default_rng(5), 200
    promoted = 0
    for _ in range(trials):
        pair = draw_noise(random, count, kind)
        promoted += describe_comparison(pair.compare(0.95), OPTIONS).holds
    assert promoted <= 0.05 * trials


def test_a_few_examples_that_differ_decide_nothing() -> None:
    found = ScoreComparison("accuracy", False, 100, Estimate(0.94), 0.9, Estimate(0.04, 0.01, 0.08), 4, 0, 4)
    condition = describe_comparison(found, OPTIONS)
    assert (condition.holds, condition.text[-40:]) == (False, " only 4 of them differ, and 5 are needed")
    assert describe_comparison(replace(found, differ=5), OPTIONS).holds


def test_customers_that_differ_are_counted_not_their_rows() -> None:
    right = np.repeat(np.arange(12) < 4, 20)[:, None]
    values = {"target": np.ones((240, 1), np.float32), "output": np.where(right, 1.0, -1.0).astype(np.float32)}
    worse = {**values, "output": -np.ones((240, 1), np.float32)}
    first, second = (make_predictions(BINARY, {"": each}) for each in (values, worse))
    table = first.table.append_column(GROUP, pyarrow.array(np.arange(240) // 20))
    found = compare_models(replace(first, table=table, divided_by="customer"), second, np.zeros(240, bool), OPTIONS)
    condition = describe_comparison(found, OPTIONS)
    assert (condition.holds, found.better, found.differ) == (False, 80, 4)
    assert "on 240 examples in 12 groups of customer" in condition.text
    assert describe_comparison(compare_models(first, second, np.zeros(240, bool), OPTIONS), OPTIONS).holds
    assert describe_comparison(found, replace(OPTIONS, tolerance=-0.01)).holds  # a model may be slightly worse


@pytest.mark.parametrize(
    ("served", "wanted"),
    [
        ({"price": [[2e6], [1e6]], "sold": [[0.5], [-0.5]]}, 0.0),
        ({"price": [[2e6], [1e6]], "sold": [[0.5], [-0.4]]}, 0.1),  # a large output hides no fault of a small one
        ({"price": [[2e6], [1e6]], "sold": [[0.5], [0.5]]}, "all 2 recorded examples the same answer"),
        (
            {"price": [[2e6], [1e6]], "sold": [[0.5], [math.nan]]},
            "outputs are NaN where those of the trained model are",
        ),
    ],
)
def test_each_output_of_a_served_model_is_compared_by_its_own_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Any, wanted: float | str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / decision_module.EXAMPLE).write_text("{}")
    trained = {"price": np.array([[2e6], [1e6]]), "sold": np.array([[0.5], [-0.5]])}
    np.savez(tmp_path / "data" / "example_outputs.npz", **trained)

    def answer(address: str, payload: Any) -> Any:
        return served if "params" in payload else [{"prediction": 1}] * 2

    monkeypatch.setattr(decision_module, "request_predictions", answer)
    if isinstance(wanted, str):
        with pytest.raises(RunError, match=wanted):
            decision_module.measure_served_difference("", tmp_path)
    else:
        assert decision_module.measure_served_difference("", tmp_path) == pytest.approx(wanted)


def test_floors_are_the_least_of_a_metric_and_the_most_of_an_error() -> None:
    assert check_floor("test/accuracy", 0.9, 0.9, False) == Condition("test/accuracy 0.9, at least 0.9", True)
    low = check_floor("slice/town/Aa", 0.5, 0.8, False)
    assert low == Condition("slice/town/Aa 0.5, at least 0.8 is needed", False)
    assert check_floor("test/mae", 2.0, 1.5, True) == Condition("test/mae 2, at most 1.5 is needed", False)
    assert not check_floor("test/accuracy", math.nan, 0.0, False).holds
    decision = Decision([Condition("a", True), low], smoke={"ms": 3.0})
    assert (decision.is_promoted, decision.reasons) == (False, [low.text])
    assert make_record(decision, "m-1", "7") == {
        "is_good": False, "reasons": low.text, "model": "m-1", "compared_with": "7", "comparison": None,
        "smoke": {"ms": 3.0},
    }  # fmt: skip
