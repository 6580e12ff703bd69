"""Metrics of several labels or values, some without a target: each uses its own examples, against scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import ObjectiveOptions, Outputs
from tests.objective.test_losses import make, sigmoid
from tests.objective.test_metrics import metric

Array = np.ndarray[Any, Any]
IGNORED = -9


def draw(kind: str) -> tuple[Array, Array, Array]:
    """Targets [60, 3], of which no example has all, the outputs, and the weights of the examples."""
    random = np.random.default_rng(3)
    outputs = random.normal(size=(60, 3))
    targets = (
        outputs + random.normal(size=(60, 3)) + 5 if kind == "regression" else 1.0 * (random.random((60, 3)) > 0.6)
    )
    targets[np.arange(60), random.integers(0, 3, 60)] = IGNORED
    targets[:4] = IGNORED  # examples without any
    return targets, outputs.astype(np.float32), random.uniform(0.5, 2, 60).astype(np.float32)


METRICS: dict[str, list[Any]] = {
    "multi_label": [
        *("f1", "precision", "recall", "auc", "pr_auc", "BinaryAccuracy"),
        metric("Precision", class_id=1, name="precision_of_1"),
        metric("AUC", name="flat_auc"),
        metric("F1Score", average="micro", name="micro"),
    ],
    "regression": [
        *("mse", "mape", "MeanAbsoluteError", "CosineSimilarity"),
        metric("R2Score", name="r2_of_keras"),
    ],
}


def find_values() -> dict[str, Any]:
    from scaleflow.errors import ConfigError
    from scaleflow.training import measure_outputs

    found: dict[str, Any] = {}
    for kind, metrics in METRICS.items():
        described = Outputs(kind, (3,), ignore=IGNORED)  # type: ignore[arg-type]
        targets, outputs, weights = draw(kind)
        for is_weighted in (False, True):
            objective = make(described, ObjectiveOptions(metrics=list(metrics)), is_weighted=is_weighted)
            own = weights if is_weighted else None
            found[kind, is_weighted] = measure_outputs(objective, targets, outputs, weights=own)
    with pytest.raises(ConfigError) as error:
        make(Outputs("regression", (3,), ignore=IGNORED), ObjectiveOptions(metrics=["PearsonCorrelation"]))
    found["refused"] = str(error.value)
    return found


def test_each_label_and_value_uses_the_examples_that_have_it(isolated: Callable[..., Any]) -> None:
    from sklearn import metrics as sk

    found = isolated(find_values)
    for is_weighted in (False, True):
        targets, outputs, weights = draw("multi_label")
        shares = (weights if is_weighted else np.ones(60))[:, None] * (targets != IGNORED)
        values = found["multi_label", is_weighted]
        columns = [np.flatnonzero(each != IGNORED) for each in targets.T]

        def average(score: Callable[..., float], scores: Array) -> float:
            each = [score(targets[r, n], scores[r, n], sample_weight=shares[r, n]) for n, r in enumerate(columns)]  # noqa: B023
            return float(np.mean(each))

        for name, score in (("f1", sk.f1_score), ("precision", sk.precision_score), ("recall", sk.recall_score)):
            assert values[name] == pytest.approx(average(score, outputs > 0), abs=1e-5), name
        assert values["auc"] == pytest.approx(average(sk.roc_auc_score, outputs), abs=1e-6)
        assert values["pr_auc"] == pytest.approx(average(sk.average_precision_score, outputs), abs=1e-6)
        kept = targets != IGNORED
        flat = targets[kept], (outputs > 0)[kept], shares[kept]
        assert values["binary_accuracy"] == pytest.approx(sk.accuracy_score(*flat[:2], sample_weight=flat[2]), abs=1e-5)
        assert values["accuracy"] == pytest.approx(values["binary_accuracy"], abs=1e-5)
        assert values["micro"] == pytest.approx(sk.f1_score(*flat[:2], sample_weight=flat[2]), abs=1e-5)
        flat_auc = sk.roc_auc_score(flat[0], sigmoid(outputs)[kept], sample_weight=flat[2])
        assert values["flat_auc"] == pytest.approx(flat_auc, abs=1e-6)
        rows = columns[1]
        of_one = sk.precision_score(targets[rows, 1], outputs[rows, 1] > 0, sample_weight=shares[rows, 1])
        assert values["precision_of_1"] == pytest.approx(of_one, abs=1e-5)

        targets, outputs, weights = draw("regression")
        values, kept = found["regression", is_weighted], targets != IGNORED
        shares = (weights if is_weighted else np.ones(60))[:, None] * kept
        flat = targets[kept], outputs[kept], shares[kept]
        assert values["mse"] == pytest.approx(sk.mean_squared_error(*flat[:2], sample_weight=flat[2]), rel=1e-5)
        assert values["mean_absolute_error"] == pytest.approx(values["mae"], rel=1e-5)
        mape = 100 * sk.mean_absolute_percentage_error(*flat[:2], sample_weight=flat[2])
        assert values["mape"] == pytest.approx(mape, rel=1e-4)
        r2 = [
            sk.r2_score(targets[r, n], outputs[r, n], sample_weight=shares[r, n])
            for n, r in enumerate(map(np.flatnonzero, kept.T))
        ]
        assert values["r2_of_keras"] == pytest.approx(np.mean(r2), rel=1e-5)
        assert values["r2"] == pytest.approx(np.mean(r2), rel=1e-5)
        known = kept.any(axis=1)
        products = [
            (t[k] @ o[k]) / np.linalg.norm(t[k]) / np.linalg.norm(o[k])
            for t, o, k in zip(targets[known], outputs[known], kept[known], strict=True)
        ]
        of_examples = weights[known] if is_weighted else None
        assert values["cosine_similarity"] == pytest.approx(np.average(products, weights=of_examples), abs=1e-5)
    assert (
        "cannot leave single targets out, and those with the value -9 do not count (Outputs.ignore)" in found["refused"]
    )
