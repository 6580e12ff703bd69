"""Every figure of a report is what scikit-learn computes from the kept predictions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics

from scaleflow.evaluation.intervals import Intervals
from scaleflow.evaluation.measures import (
    find_error_quantiles,
    find_label_errors,
    measure_calibration,
    name_thresholds,
    rank_scores,
    read_classes,
)
from scaleflow.evaluation.outputs import analyse_output
from scaleflow.evaluation.predictions import Predictions
from scaleflow.interfaces import EvaluationOptions, Outputs
from scaleflow.interfaces.config import ThresholdGoal
from tests.evaluation.made import (
    BINARY,
    CLASSES,
    LABELS,
    PRICE,
    TWO,
    analyse_in,
    draw_predictions,
    draw_values,
    make_predictions,
)

EXACT = {"rel": 1e-9, "abs": 1e-12}

WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])


def read_chances(predictions: Predictions, names: Any) -> Any:
    return np.stack([predictions.column(f"probability_{name}") for name in names], axis=1).astype(np.float64)


@WEIGHTED
def test_figures_of_classes_are_scikit_learn_s(weighted: bool) -> None:
    kept = draw_predictions(CLASSES, 500, weighted=weighted)
    analysis = analyse_output(kept, "", CLASSES, 0)
    target, predicted, w = kept.column("target"), kept.column("prediction"), kept.weights()
    names, chances = list(CLASSES.names or ()), read_chances(kept, CLASSES.names)
    found = {name: estimate.value for name, estimate in analysis.estimates.items()}
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(target, predicted, sample_weight=w), **EXACT)
    assert found["balanced_accuracy"] == pytest.approx(
        metrics.balanced_accuracy_score(target, predicted, sample_weight=w), **EXACT
    )
    assert found["macro_f1"] == pytest.approx(
        metrics.f1_score(target, predicted, average="macro", sample_weight=w), **EXACT
    )
    true = np.array([names.index(each) for each in target])
    of_target = chances[np.arange(500), true]
    assert found["log_loss"] == pytest.approx(np.average(-np.log(of_target), weights=w), **EXACT)
    assert found["log_loss"] == pytest.approx(
        metrics.log_loss(target, chances / chances.sum(axis=1, keepdims=True), sample_weight=w, labels=names), rel=1e-6
    )
    rates = metrics.precision_recall_fscore_support(target, predicted, labels=names, sample_weight=w, zero_division=0)
    for n, row in enumerate(analysis.classes):
        assert row["class"] == names[n]
        for key, values in zip(("precision", "recall", "f1", "support"), rates, strict=True):
            value = row[key] if key == "support" else row[key].value
            assert value == pytest.approx(values[n], **EXACT), key
        is_class = target == names[n]
        assert row["roc_auc"].value == pytest.approx(
            metrics.roc_auc_score(is_class, chances[:, n], sample_weight=w), **EXACT
        )
        assert row["average_precision"].value == pytest.approx(
            metrics.average_precision_score(is_class, chances[:, n], sample_weight=w), **EXACT
        )
    confusion = metrics.confusion_matrix(target, predicted, labels=names, sample_weight=w)
    pair = analysis.facts["confused"][0]
    np.fill_diagonal(confusion, 0)
    assert pair["examples"] == pytest.approx(confusion.max(), **EXACT)
    assert confusion[names.index(pair["true"]), names.index(pair["predicted"])] == pytest.approx(confusion.max())


@WEIGHTED
def test_calibration_is_the_mean_gap_of_ten_bins(weighted: bool) -> None:
    kept = draw_predictions(CLASSES, 400, weighted=weighted)
    data = read_classes(kept, "", CLASSES)
    w = np.ones(400) if kept.weights() is None else kept.weights()
    error = 0.0
    for low in np.arange(10) / 10:
        inside = (data.confidence > low) & (data.confidence <= low + 0.1)
        if inside.any():
            gap = np.average(data.is_correct[inside], weights=w[inside]) - np.average(
                data.confidence[inside], weights=w[inside]
            )
            error += abs(gap) * w[inside].sum() / w.sum()
    found = measure_calibration(data.confidence, data.is_correct, Intervals(400, kept.weights()))
    assert found.value == pytest.approx(error, **EXACT)
    assert found.low <= found.value <= found.high


def test_top_k_and_many_classes_need_no_probability_of_each() -> None:
    many = Outputs("classification", (30,))
    random = np.random.default_rng(0)
    logits = random.normal(size=(300, 30))
    targets = random.integers(30, size=300)
    logits[np.arange(300), targets] += 2
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    of_target = chances[np.arange(300), targets]
    values = {
        "target": targets,
        "prediction": chances.argmax(axis=1),
        "probability": chances.max(axis=1),
        "target_probability": of_target,
        "target_rank": 1 + (chances > of_target[:, None]).sum(axis=1),
    }
    kept = make_predictions(many, {"": values})
    found = analyse_output(kept, "", many, 0).estimates
    for k in (3, 5):
        wanted = metrics.top_k_accuracy_score(targets, chances, k=k, labels=range(30))
        assert found[f"top_{k}_accuracy"].value == pytest.approx(wanted, **EXACT)
    assert "roc_auc" not in found


@WEIGHTED
def test_two_classes_have_areas_and_the_threshold_that_costs_least(weighted: bool) -> None:
    kept = draw_predictions(BINARY, 300, weighted=weighted)
    w, is_yes = kept.weights(), kept.column("target") == "yes"
    chance = kept.column("probability_yes").astype(np.float64)
    found = analyse_output(kept, "", BINARY, 0, costs=(3.0, 1.0))
    assert found.estimates["roc_auc"].value == pytest.approx(
        metrics.roc_auc_score(is_yes, chance, sample_weight=w), **EXACT
    )
    assert found.estimates["average_precision"].value == pytest.approx(
        metrics.average_precision_score(is_yes, chance, sample_weight=w), **EXACT
    )
    own = np.ones(300) if w is None else w
    costs = {t: own[(chance >= t) & ~is_yes].sum() + 3 * own[(chance < t) & is_yes].sum() for t in np.unique(chance)}
    usual, highest, least = found.facts["thresholds"]
    assert least["cost"] == pytest.approx(min(costs.values()) / own.sum(), **EXACT)
    assert costs[least["probability"]] == min(costs.values())
    for row in (usual, highest, least):
        said = (is_yes, chance >= row["probability"])
        assert row["precision"] == pytest.approx(metrics.precision_score(*said, sample_weight=w), **EXACT)
        assert row["recall"] == pytest.approx(metrics.recall_score(*said, sample_weight=w), **EXACT)
        assert row["f1"] == pytest.approx(metrics.f1_score(*said, sample_weight=w), **EXACT)
    assert highest["f1"] == pytest.approx(
        max(metrics.f1_score(is_yes, chance >= each, sample_weight=w) for each in np.unique(chance)), **EXACT
    )
    curve = metrics.roc_curve(is_yes, chance, sample_weight=w, drop_intermediate=False)
    ranking = rank_scores(chance, is_yes, Intervals(300, w))
    assert ranking.false_rate == pytest.approx(curve[0][1:], **EXACT)
    assert ranking.true_rate == pytest.approx(curve[1][1:], **EXACT)


@WEIGHTED
def test_the_table_and_the_recorded_cost_have_the_costs_of_the_goal(weighted: bool) -> None:
    options = EvaluationOptions(threshold=ThresholdGoal(cost=[10.0, 2.0]))
    kept = draw_predictions(BINARY, 400, weighted=weighted)
    described = replace(BINARY, threshold=0.2)
    kept = make_predictions(described, {"": draw_values(BINARY, 400)}, kept.weights())
    found = analyse_output(kept, "", described, 200, costs=options.costs)
    target, predicted = (kept.column(name) == "yes" for name in ("target", "prediction"))
    costs = 10.0 * (target & ~predicted) + 2.0 * (~target & predicted)
    estimate = found.estimates["cost_at_threshold"]
    assert estimate.value == pytest.approx(np.average(costs, weights=kept.weights()), **EXACT)
    assert estimate.low < estimate.value < estimate.high
    rows = {row["threshold"]: row for row in found.facts["thresholds"]}
    assert rows["chosen"]["cost"] == pytest.approx(estimate.value, **EXACT)
    least = rows["least cost (a miss costs 10, a false alarm 2)"]
    assert least["cost"] <= rows["chosen"]["cost"] < rows["usual"]["cost"]
    assert "cost_at_threshold" not in analyse_output(kept, "", described, 0).estimates
    assert EvaluationOptions(miss_cost=3.0).costs == (3.0, 1.0)
    assert EvaluationOptions(miss_cost=2.0, alarm_cost=2.0).costs == (2.0, 2.0)
    assert EvaluationOptions().costs is None


def test_the_threshold_may_be_never() -> None:
    ranking = rank_scores(np.array([0.9, 0.1]), np.array([False, True]), Intervals(2))
    usual, highest, least = name_thresholds(ranking, 1.0, 1.0, (0.5, 1.0))
    assert (usual["probability"], usual["recall"], usual["precision"]) == (0.5, 0.0, 0.0)
    assert (highest["probability"], highest["recall"], highest["precision"]) == (0.1, 1.0, 0.5)
    assert (least["probability"], least["cost"]) == (1.0, 0.25)
    ranking = rank_scores(np.array([0.4, 0.1]), np.array([False, True]), Intervals(2))
    never, _, _ = name_thresholds(ranking, 1, 1, (1.0, 1.0))
    assert (never["probability"], never["recall"], never["cost"]) == (0.5, 0.0, 0.5)


def test_a_row_at_a_threshold_counts_as_it_is_predicted() -> None:
    scores = np.array([0.7, 0.5, 0.1], np.float32)  # as float32, 0.7 is less than 0.7
    ranking = rank_scores(scores, np.array([True, True, False]), Intervals(3))
    usual, chosen, _, _ = name_thresholds(ranking, 2.0, 1.0, (1.0, 1.0), 0.7)
    assert chosen["recall"] == 0.5
    assert usual["recall"] == 0.5  # of two classes that are as likely, the first one is predicted


@WEIGHTED
def test_figures_of_labels_are_scikit_learn_s(weighted: bool) -> None:
    kept = draw_predictions(LABELS, 300, weighted=weighted)
    w = kept.weights()
    target, predicted = (
        np.stack([kept.column(f"{column}_{name}") for name in "abc"], axis=1).astype(bool)
        for column in ("target", "prediction")
    )
    found = analyse_output(kept, "", LABELS, 0)
    assert found.estimates["exact_match"].value == pytest.approx(
        metrics.accuracy_score(target, predicted, sample_weight=w), **EXACT
    )
    assert found.estimates["accuracy"].value == pytest.approx(
        1 - metrics.hamming_loss(target, predicted, sample_weight=w), **EXACT
    )
    assert found.estimates["macro_f1"].value == pytest.approx(
        metrics.f1_score(target, predicted, average="macro", sample_weight=w), **EXACT
    )
    rates = metrics.precision_recall_fscore_support(target, predicted, sample_weight=w)
    for n, row in enumerate(found.classes):
        assert [row[key].value for key in ("precision", "recall", "f1")] == pytest.approx(
            [each[n] for each in rates[:3]], **EXACT
        )
        chance = kept.column(f"probability_{row['class']}").astype(np.float64)
        assert row["roc_auc"].value == pytest.approx(
            metrics.roc_auc_score(target[:, n], chance, sample_weight=w), **EXACT
        )


@WEIGHTED
def test_figures_of_values_are_scikit_learn_s(weighted: bool) -> None:
    kept = draw_predictions(PRICE, 300, weighted=weighted)
    w = kept.weights()
    target, predicted = (kept.column(name).astype(np.float64) for name in ("target", "prediction"))
    found = analyse_output(kept, "", PRICE, 0)
    wanted = {
        "mae": metrics.mean_absolute_error(target, predicted, sample_weight=w),
        "rmse": metrics.root_mean_squared_error(target, predicted, sample_weight=w),
        "r2": metrics.r2_score(target, predicted, sample_weight=w),
        "bias": np.average(predicted - target, weights=w),
    }
    assert {name: estimate.value for name, estimate in found.estimates.items()} == pytest.approx(wanted, **EXACT)
    if w is None:
        assert found.facts["quantiles"][0]["error"] == pytest.approx(
            np.quantile(np.abs(predicted - target), 0.5, method="inverted_cdf")
        )
        assert found.facts["quantiles"][-1]["error"] == np.abs(predicted - target).max()
    kept = draw_predictions(TWO, 200)
    columns = [(kept.column(f"target_{n}"), kept.column(f"prediction_{n}")) for n in ("width", "height")]
    found = analyse_output(kept, "", TWO, 0)
    for row, (true, guess) in zip(found.classes, columns, strict=True):
        assert row["r2"].value == pytest.approx(metrics.r2_score(true.astype(float), guess.astype(float)), **EXACT)
    both = [np.stack(each, axis=1).astype(np.float64) for each in zip(*columns, strict=True)]
    assert found.estimates["mae"].value == pytest.approx(metrics.mean_absolute_error(*both), **EXACT)
    assert found.estimates["r2"].value == pytest.approx(metrics.r2_score(*both), **EXACT)


def test_quantiles_of_errors_are_the_least_that_a_share_of_the_weight_has() -> None:
    rows = find_error_quantiles(np.array([-3.0, 1.0, 2.0]), np.array([1.0, 8.0, 1.0]))
    assert [(row["quantile"], row["error"]) for row in rows][:3] == [(0.5, 1.0), (0.75, 1.0), (0.9, 2.0)]


def test_figures_of_positions_are_scikit_learn_s() -> None:
    random = np.random.default_rng(0)
    true, predicted = random.integers(3, size=(2, 40, 25))
    predicted = np.where(random.random((40, 25)) < 0.6, true, predicted)
    both = np.where(true == predicted, true, -1)
    columns = {
        "positions": np.full(40, 25, np.int32),
        "loss": random.random(40).astype(np.float32),
        "correct": (true == predicted).mean(axis=1).astype(np.float32),
        **{
            name: np.stack([(values == n).sum(axis=1) for n in range(3)], axis=1).astype(np.int32)
            for name, values in (("true", true), ("predicted", predicted), ("both", both))
        },
    }
    outputs = Outputs("classification", (5, 5, 3))
    found = analyse_output(make_predictions(outputs, {"": columns}), "", outputs, 0)
    wanted = metrics.jaccard_score(true.ravel(), predicted.ravel(), average=None)
    assert [row["iou"].value for row in found.classes] == pytest.approx(wanted, **EXACT)
    assert found.estimates["mean_iou"].value == pytest.approx(wanted.mean(), **EXACT)
    assert found.estimates["accuracy"].value == pytest.approx((true == predicted).mean(), rel=1e-6)
    assert [row["recall"].value for row in found.classes] == pytest.approx(
        metrics.recall_score(true.ravel(), predicted.ravel(), average=None), **EXACT
    )


def test_labels_that_were_swapped_are_suspected() -> None:
    values = draw_values(CLASSES, 1000, skill=6.0)
    swapped = np.random.default_rng(1).choice(1000, 40, replace=False)
    values["target"][swapped] = (values["target"][swapped] + 1) % 4
    suspects = find_label_errors(read_classes(make_predictions(CLASSES, {"": values}), "", CLASSES))
    assert len(set(suspects.tolist()) & set(swapped.tolist())) >= 36
    assert len(suspects) <= 60


def test_rows_without_a_target_do_not_count_and_those_with_nan_are_wrong(tmp_path: Path) -> None:
    outputs = Outputs("classification", (4,), names=CLASSES.names, ignore=-1)
    values = draw_values(CLASSES, 100)
    values["target"][:10] = -1
    values["output"][10:15] = np.nan
    values["target"][10:15] = 0  # NaN does not count as the first class
    analysis = analyse_in(tmp_path, make_predictions(outputs, {"": values}))
    right = values["output"][15:].argmax(axis=1) == values["target"][15:]
    assert analysis.estimates["accuracy"].value == pytest.approx(right.sum() / 90, **EXACT)
    answers = np.append(np.full(5, 9), values["output"][15:].argmax(axis=1))
    recall = metrics.recall_score(values["target"][10:], answers, average="macro", labels=range(4))
    assert analysis.estimates["balanced_accuracy"].value == pytest.approx(recall, **EXACT)
    assert analysis.outputs[0].facts["not_finite"] == 5


@pytest.mark.parametrize("kind", ["binary", "multi_label", "regression"])
def test_outputs_that_are_not_finite_are_wrong_answers(tmp_path: Path, kind: Any) -> None:
    described = Outputs(kind, (1,) if kind == "binary" else (3,))
    random = np.random.default_rng(0)
    outputs = random.normal(size=(60, *described.shape)).astype(np.float32)
    targets = outputs + 0.1 if kind == "regression" else (outputs > 0).astype(np.float32)  # all are right
    outputs[:6, 0] = [np.nan, np.inf, -np.inf, np.nan, np.nan, np.nan]
    targets[:6, 0] = [0, 1, 0, 0, 1, 1]
    analysis = analyse_in(tmp_path, make_predictions(described, {"": {"target": targets, "output": outputs}}))
    assert analysis.outputs[0].facts["not_finite"] == 6
    if kind == "regression":
        assert np.isnan(analysis.estimates["mae"].value)
    else:
        assert analysis.estimates["accuracy"].value == pytest.approx(1 - 6 / outputs.size, **EXACT)
    kept = make_predictions(described, {"": {"target": targets, "output": outputs}})
    column = "prediction" if kind == "binary" else "prediction_0"
    assert kept.table[column].null_count == (0 if kind == "regression" else 6)


@pytest.mark.parametrize("kind", ["classification", "binary", "multi_label", "regression"])
def test_outputs_that_are_not_finite_change_nothing_in_examples_of_weight_0(tmp_path: Path, kind: Any) -> None:
    described = Outputs(kind, (1,) if kind == "binary" else (3,))
    values = draw_values(described, 60)
    weights = np.ones(60, np.float32)
    weights[:6] = 0
    clean = analyse_in(tmp_path, make_predictions(described, {"": values}, weights))
    values["output"][:6] = np.nan
    analysis = analyse_in(tmp_path, make_predictions(described, {"": values}, weights))
    assert not analysis.outputs[0].facts.get("not_finite")
    for name in set(analysis.estimates) & {"accuracy", "balanced_accuracy", "macro_f1", "mae", "rmse", "r2"}:
        assert analysis.estimates[name].value == pytest.approx(clean.estimates[name].value, **EXACT), name


@pytest.mark.parametrize("kind", ["multi_label", "regression"])
def test_a_column_whose_examples_all_have_weight_0_is_left_out(tmp_path: Path, kind: Any) -> None:
    described = Outputs(kind, (2,), ignore=-9)
    values = draw_values(described, 80)
    weights = np.ones(80, np.float32)
    weights[:20] = 0
    values["target"][20:, 0] = -9
    analysis = analyse_in(tmp_path, make_predictions(described, {"": values}, weights))
    target, output = (values[name][20:, 1].astype(np.float64) for name in ("target", "output"))
    if kind == "regression":
        assert analysis.estimates["r2"].value == pytest.approx(metrics.r2_score(target, output), **EXACT)
        assert analysis.estimates["mae"].value == pytest.approx(np.abs(output - target).mean(), **EXACT)
    else:
        assert analysis.estimates["macro_f1"].value == pytest.approx(metrics.f1_score(target, output > 0), **EXACT)


def test_each_value_is_measured_on_the_examples_that_have_it(tmp_path: Path) -> None:
    described = Outputs("regression", (2,), names=("low", "high"), ignore=-999)
    random = np.random.default_rng(0)
    targets = random.normal(size=(400, 2))
    outputs = (targets + random.normal(size=(400, 2)) * [1, 3]).astype(np.float32)
    whole = targets.copy()
    targets[::2, 0], targets[1::2, 1] = -999, -999  # no example has both
    targets[:4] = -999
    analysis = analyse_in(tmp_path, make_predictions(described, {"": {"target": targets, "output": outputs}}))
    errors = [np.abs(outputs - whole)[5::2, 0], np.abs(outputs - whole)[4::2, 1]]
    both = np.concatenate(errors)
    assert analysis.estimates["mae"].value == pytest.approx(both.mean(), **EXACT)
    assert analysis.estimates["rmse"].value == pytest.approx(np.sqrt(np.square(both).mean()), **EXACT)
    assert analysis.estimates["mae"].low < both.mean() < analysis.estimates["mae"].high
    rows = analysis.outputs[0].classes
    assert [(row["value"], row["examples"]) for row in rows] == [("low", 198), ("high", 198)]
    assert [row["mae"].value for row in rows] == pytest.approx([each.mean() for each in errors], **EXACT)
    kept = json.loads((tmp_path / "metrics.json").read_text())
    assert kept["outputs"][""]["examples"] == 396


def test_each_label_is_measured_on_the_examples_that_have_it(tmp_path: Path) -> None:
    described = Outputs("multi_label", (3,), ignore=-1)
    random = np.random.default_rng(0)
    outputs = random.normal(size=(300, 3)).astype(np.float32)
    targets = (outputs + random.normal(size=(300, 3)) > 0).astype(np.float32)
    targets[np.arange(300), random.integers(0, 2, 300)] = -1  # no example has all
    targets[:, 2] = -1  # a label without any
    analysis = analyse_in(tmp_path, make_predictions(described, {"": {"target": targets, "output": outputs}}))
    kept = targets != -1
    right = (outputs > 0) == (targets > 0.5)
    assert analysis.estimates["accuracy"].value == pytest.approx(right[kept].mean(), **EXACT)
    columns = [(targets[k, n], outputs[k, n] > 0) for n, k in enumerate(kept.T) if k.any()]
    assert analysis.estimates["macro_f1"].value == pytest.approx(np.mean([metrics.f1_score(*each) for each in columns]))
    rows = analysis.outputs[0].classes
    assert [row["examples"] for row in rows] == kept.sum(axis=0).tolist()
    areas = [metrics.roc_auc_score(targets[k, n], outputs[k, n]) for n, k in enumerate(kept.T) if k.any()]
    assert [row["roc_auc"].value for row in rows[:2]] == pytest.approx(areas, **EXACT)


@pytest.mark.parametrize("kind", ["classification", "binary", "multi_label", "regression"])
def test_an_output_without_any_target_has_no_figures(tmp_path: Path, kind: Any) -> None:
    described = Outputs(kind, (1,) if kind == "binary" else (3,), ignore=-1)
    output = np.zeros((20, *described.shape), np.float32)
    target = np.full((20, *described.target_shape), -1, np.int32 if kind == "classification" else np.float32)
    analysis = analyse_in(tmp_path, make_predictions(described, {"": {"target": target, "output": output}}))
    assert all(np.isnan(estimate.value) for name, estimate in analysis.estimates.items() if name in ("accuracy", "mae"))
