"""Outputs that are NaN or infinite are wrong answers in every metric of an evaluation, against scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import ObjectiveOptions, Outputs
from tests.objective.test_kinds import to_tensors
from tests.objective.test_losses import make

Array = np.ndarray[Any, Any]
BAD = np.array([np.nan, np.inf, np.nan, -np.inf, np.nan], np.float32)


def evaluate(described: Any, targets: Any, outputs: Any, metrics: Any = (), weights: Any = None) -> dict[str, float]:
    from scaleflow.training import measure_outputs

    options = ObjectiveOptions(metrics=list(metrics)) if metrics else ObjectiveOptions()
    objective = make(described, options, is_weighted=weights is not None)
    return measure_outputs(objective, targets, outputs, weights=weights)


def find_values() -> dict[str, Any]:
    """Metrics of each kind of target, whose first five examples have no finite output; all others are right."""
    from scaleflow import objective

    random = np.random.default_rng(0)
    classes = random.integers(0, 3, 40).astype(np.int32)
    classes[:5] = 0
    logits = (5 * np.eye(3)[classes] + random.normal(size=(40, 3))).astype(np.float32)
    logits[5, 1:] = -np.inf  # a class that cannot be: a usual answer
    classes[5] = 0
    logits[:5] = BAD[:, None]
    found: dict[str, Any] = {"classes": classes}
    scores = ["f1", "recall", "auc"]
    found["classification"] = evaluate(Outputs("classification", (3,)), classes, logits, scores)
    labels = random.integers(0, 2, (40, 1)).astype(np.float32)
    labels[:5, 0] = [0, 1, 0, 1, 1]
    logit = (4 * labels - 2).astype(np.float32)
    logit[:5, 0] = BAD
    found["binary"] = evaluate(Outputs("binary", (1,)), labels, logit, ["recall", "precision", "auc"])
    weights = np.linspace(0.5, 2, 40).astype(np.float32)
    found["weighted"] = evaluate(Outputs("binary", (1,)), labels, logit, weights=weights)
    found["share"] = float(weights[5:].sum() / weights.sum())
    many = np.repeat(labels, 2, axis=1)
    found["multi_label"] = evaluate(Outputs("multi_label", (2,)), many, np.concatenate([logit, 4 * labels - 2], axis=1))
    values = random.normal(size=(40, 2))
    errors = values + 0.5
    errors[0, 1] = np.nan
    found["regression"] = evaluate(Outputs("regression", (2,)), values, errors.astype(np.float32))
    quantiles = np.repeat(errors[..., None], 3, axis=2).astype(np.float32)
    described = Outputs("regression", (2,), levels=(0.1, 0.5, 0.9))
    found["quantiles"] = evaluate(described, values, quantiles)
    tokens = np.repeat(classes[:, None], 4, axis=1)
    tokens[:, 3] = -1
    sequence = np.repeat(logits[:, None], 4, axis=1)
    sequence[5:, 3] = np.nan  # where no target counts
    words = Outputs("classification", (4, 3), ignore=-1)
    found["sequence"] = evaluate(words, tokens, sequence)
    sums = objective.sum_positions(words, to_tensors(tokens), to_tensors(sequence))
    found["kept"] = {name: np.asarray(sums[name])[:7].tolist() for name in ("correct", "not_finite", "positions")}
    found["predicted"] = np.asarray(sums["predicted"])[:5].sum()
    both = {"kind": Outputs("classification", (3,)), "price": Outputs("regression", (2,))}
    found["several"] = evaluate(both, {"kind": classes, "price": values}, {"kind": logits, "price": errors})
    found["finite"] = evaluate(Outputs("binary", (1,)), labels[5:], logit[5:])
    many = random.permutation(1200)[:40].astype(np.int32)
    of_many = (9 * np.eye(1200)[many]).astype(np.float32)
    of_many[:4] = np.nan
    found["many"] = evaluate(Outputs("classification", (1200,)), many, of_many, ["f1"])
    found["answers of many"] = np.append(np.where(many[:4] == 0, 1, 0), many[4:]), many
    return found


def find_uncounted() -> dict[str, Any]:
    """Metrics of outputs that are not finite only where no target counts, and of the same ones with 0 there.

    A target does not count if it is ignored, or if its example has the weight 0.
    """
    random = np.random.default_rng(1)
    shapes = {"classification": (3,), "binary": (1,), "multi_label": (3,), "regression": (2,), "quantiles": (2,)}
    found = {}
    for name, shape in shapes.items():
        kind: Any = "regression" if name == "quantiles" else name
        levels = (0.1, 0.5, 0.9) if name == "quantiles" else None
        outputs = random.normal(size=(40, *shape)).astype(np.float32)
        targets = outputs + random.normal(size=outputs.shape)
        if kind == "classification":
            targets = targets.argmax(axis=-1).astype(np.int32)
        elif kind != "regression":
            targets = (targets > 0).astype(np.float32)
        if levels is not None:
            outputs = np.repeat(outputs[..., None], 3, axis=-1)
        metrics = {"multi_label": ["f1"], "regression": ["mse"]}.get(name, [])
        for way, fill in (("ignored", np.nan), ("of weight 0", -np.inf)):
            is_out = np.zeros(targets.shape, bool)
            is_out[:6] = True
            if way == "ignored" and targets.ndim > 1:
                is_out[8:12, 0] = True
            weights = np.ones(40, np.float32)
            given = targets
            if way == "ignored":
                given = np.where(is_out, -9, targets).astype(targets.dtype)
            else:
                weights[:6] = 0
            described = Outputs(kind, shape, levels=levels, ignore=-9 if way == "ignored" else None)
            bad, clean = outputs.copy(), outputs.copy()
            bad[is_out] = fill
            clean[is_out] = 0
            own = None if way == "ignored" else weights
            pair = [evaluate(described, given, each, metrics, weights=own) for each in (bad, clean)]
            found[f"{name}, {way}"] = pair
    both = {"a": described, "b": described}
    pairs = {"a": given, "b": given}
    pair = [evaluate(both, pairs, {"a": each, "b": each}, weights=weights) for each in (bad, clean)]
    found["several"] = pair
    return found


def test_outputs_that_are_not_finite_change_nothing_where_no_target_counts(isolated: Callable[..., Any]) -> None:
    for name, (found, wanted) in isolated(find_uncounted).items():
        assert found == pytest.approx(wanted), name
        assert all(np.isfinite(value) for value in found.values()), name
        assert "not_finite" not in found, name


def test_outputs_that_are_not_finite_are_wrong_in_every_metric(isolated: Callable[..., Any]) -> None:
    from sklearn.metrics import f1_score, recall_score

    found = isolated(find_values)
    assert {
        name: each.get("not_finite") for name, each in found.items() if isinstance(each, dict) and "loss" in each
    } == {
        **dict.fromkeys(("classification", "binary", "weighted", "multi_label", "sequence", "several"), 5.0),
        **dict.fromkeys(("regression", "quantiles"), 1.0),
        "many": 4.0,
        "finite": None,
    }
    kinds = found["classification"]
    assert kinds["accuracy"] == pytest.approx(35 / 40)
    answers = np.append(np.full(5, 9), found["classes"][5:])
    recall = recall_score(found["classes"], answers, average="macro", labels=[0, 1, 2])
    assert kinds["balanced_accuracy"] == pytest.approx(recall)
    assert kinds["recall"] == pytest.approx(recall, abs=1e-6)
    assert np.isnan(kinds["loss"])
    assert kinds["f1"] < 1
    assert kinds["auc"] < 1
    binary = found["binary"]
    assert binary["accuracy"] == pytest.approx(35 / 40)
    assert binary["recall"] < 1
    assert binary["precision"] < 1
    assert binary["auc"] < 1
    assert found["weighted"]["accuracy"] == pytest.approx(found["share"], abs=1e-6)
    assert found["multi_label"]["accuracy"] == pytest.approx(75 / 80)
    assert found["multi_label"]["exact_match"] == pytest.approx(35 / 40)
    assert np.isnan(found["regression"]["mae"])
    assert np.isnan(found["quantiles"]["mae"])
    assert found["sequence"]["accuracy"] == pytest.approx(35 / 40)
    assert found["several"]["kind/accuracy"] == pytest.approx(35 / 40)
    assert np.isnan(found["several"]["kind/loss"])
    predicted, true = found["answers of many"]
    assert found["many"]["f1"] == pytest.approx(f1_score(true, predicted, average="macro"), abs=1e-6)
    assert found["finite"]["accuracy"] == 1
    assert found["kept"] == {"correct": [0] * 5 + [1] * 2, "not_finite": [3] * 5 + [0] * 2, "positions": [3] * 7}
    assert found["predicted"] == 0
