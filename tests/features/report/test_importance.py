"""The importance of columns: what a model uses is told from what it does not, also if one class is rare."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from scaleflow.evaluation.outputs import analyse_output
from scaleflow.features.report.feature import ReportOptions
from scaleflow.features.report.findings import judge_columns
from scaleflow.features.report.importance import measure_columns, measure_constant, score_outputs
from scaleflow.interfaces import EvaluationOptions, Inputs, Outputs
from scaleflow.interfaces.hooks import KeptPredictions
from tests.evaluation.made import BINARY, CLASSES, LABELS, PRICE, make_predictions
from tests.features.report.made import make_plan

Array = np.ndarray[Any, Any]

SEEDS, ROWS = 50, 1000


def measure(
    outputs: Outputs, columns: dict[str, Array], target: Array, model: Any, weights: Array | None = None
) -> tuple[list[dict[str, Any]], Any]:
    """What is measured of columns, and the analysis, for a model that is a function of columns."""
    inputs = {name: Inputs((), "float32") for name in columns}
    reader = SimpleNamespace(inputs=inputs, read_examples=lambda _: (columns, target), preprocess=lambda each: each)
    predictions = make_predictions(outputs, {"": {"target": target, "output": model(**columns)}}, weights)
    kept = KeptPredictions(
        plan=make_plan(EvaluationOptions(), ReportOptions(importance=5000)),
        folder=Path(),
        title="",
        predictions=predictions,
        analyse=cast(Any, None),
        reader=cast(Any, reader),
        emit=print,
        predict=lambda changed: model(**changed),
    )
    return measure_columns(kept), analyse_output(predictions, "", outputs, 0)


def draw_columns(seed: int, share: float = 0.06) -> tuple[dict[str, Array], Array]:
    """A rare class, a column that tells it well, one whose loss costs some 0.05 of AUC, and noise."""
    random = np.random.default_rng(seed)
    target = (random.random((ROWS, 1)) < share).astype(np.float32)
    names = {"main": 1.0, "note": 0.65, "noise": 0.0}
    return {name: random.normal(size=ROWS) + each * target[:, 0] for name, each in names.items()}, target


@pytest.mark.parametrize("shift", [0.0, np.log(0.94 / 0.06)], ids=["", "class weights"])
def test_what_a_model_of_a_rare_class_uses_is_not_called_useless(shift: float) -> None:
    def model(main: Array, note: Array, noise: Array) -> Array:
        logits = main - 0.5 + 0.65 * note - 0.21 + np.log(0.06 / 0.94) + shift
        return logits[:, None].astype(np.float32)

    told = []
    for seed in range(SEEDS):
        columns, target = draw_columns(seed)
        found, analysis = measure(BINARY, columns, target, model)
        shuffled = {**columns, "note": np.random.default_rng(seed).permutation(columns["note"])}
        auc, without = (roc_auc_score(target, model(**each)) for each in (columns, shuffled))
        assert auc - without > 0.01
        assert [row["column"] for row in found] == ["main", "note", "noise"]
        assert all(row["measure"] == "log loss" and row["importance"].value > 0.001 for row in found[:2])
        told += [each.text for each in judge_columns(analysis, found) if each.rule == "useless columns"]
    assert set(told) == {"the model does not use noise"}
    assert len(told) == SEEDS


@pytest.mark.parametrize("is_weighted", [False, True])
def test_importance_is_the_growth_of_the_log_loss_or_of_the_error(is_weighted: bool) -> None:
    random = np.random.default_rng(0)
    weights = np.arange(400) % 4 / 2 if is_weighted else None
    x, y = random.normal(size=(2, 400))
    cases = {
        "several": (CLASSES, random.integers(4, size=400), lambda x, y: np.stack([x, y, x * y, -x], axis=1)),
        "labels": (LABELS, random.integers(2, size=(400, 3)), lambda x, y: np.stack([x, 2 * y, -x], axis=1)),
        "value": (PRICE, 3 * x[:, None] + y[:, None], lambda x, y: 3 * x[:, None] + 0.5 * y[:, None]),
    }

    def compute_loss(outputs: Outputs, target: Array, given: Array) -> float:
        if outputs is CLASSES:
            chances = np.exp(given) / np.exp(given).sum(axis=1, keepdims=True)
            return float(log_loss(target, chances, labels=range(4), sample_weight=weights))
        if outputs is LABELS:
            chances = 1 / (1 + np.exp(-given))
            return float(np.mean([log_loss(target[:, n], chances[:, n], sample_weight=weights) for n in range(3)]))
        return float(np.average(np.abs(given - target)[:, 0], weights=weights))

    for outputs, target, model in cases.values():
        found, _ = measure(outputs, {"x": x, "y": y}, target, model, weights)
        orders = np.random.default_rng(1)
        losses: dict[str, list[float]] = {"x": [], "y": []}
        for _ in range(5):
            for column in losses:
                changed = {"x": x, "y": y} | {column: {"x": x, "y": y}[column][orders.permutation(400)]}
                losses[column].append(compute_loss(outputs, target, model(**changed)))
        whole = compute_loss(outputs, target, model(x, y))
        for row in found:
            assert row["importance"].value == pytest.approx(np.mean(losses[row["column"]]) - whole, rel=1e-6)


def test_targets_that_do_not_count_are_left_out() -> None:
    columns, target = draw_columns(0, share=0.4)
    outputs = Outputs("classification", (2,), ignore=-1)
    ignored = np.where(np.arange(ROWS) % 3 == 0, -1, target[:, 0]).astype(np.int32)

    def model(main: Array, note: Array, noise: Array) -> Array:
        return np.stack([np.zeros(len(main)), main - 0.5], axis=1).astype(np.float32)

    found, _ = measure(outputs, columns, ignored, model)
    counted = ignored >= 0
    alone, _ = measure(
        Outputs("classification", (2,)), {k: v[counted] for k, v in columns.items()}, ignored[counted], model
    )
    assert found[0]["column"] == "main"
    assert found[0]["importance"].value == alone[0]["importance"].value


@pytest.mark.parametrize("kind", ["regression", "multi_label"])
def test_examples_with_some_missing_targets_are_used(kind: Any) -> None:
    random = np.random.default_rng(0)
    described = Outputs(kind, (2,), ignore=-9)
    target = (random.random((40, 2)) > 0.5).astype(np.float64)
    output = random.normal(size=(40, 2))
    has_target = np.ones((40, 2), bool)
    has_target[::2, 0] = has_target[1::2, 1] = False  # no example has both
    own = np.where(has_target, target, -9.0)
    first, second = (
        score_outputs(Outputs(kind, (1,)), target[rows, n : n + 1], output[rows, n : n + 1])
        for n, rows in enumerate((slice(1, None, 2), slice(0, None, 2)))
    )
    scores = score_outputs(described, own, output, has_target)
    assert scores[1::2] == pytest.approx(first)
    assert scores[::2] == pytest.approx(second)
    parts = [
        measure_constant(Outputs(kind, (1,)), target[rows, n : n + 1], np.ones(20))[1]
        for n, rows in enumerate((slice(1, None, 2), slice(0, None, 2)))
    ]
    assert measure_constant(described, own, np.ones(40), has_target)[1] == pytest.approx(np.mean(parts))
    kept = make_predictions(described, {"": {"target": own, "output": output.astype(np.float32)}})
    assert len(analyse_output(kept, "", described).rows) == 40
