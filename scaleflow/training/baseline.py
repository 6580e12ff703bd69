"""Baselines: the metrics of a constant prediction that uses the training targets only.

The prediction is the majority class, the more frequent value of each label, or the mean target. For the loss it is
the frequency of each class or label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from scaleflow.interfaces import Outputs

Array = np.ndarray[Any, Any]


def baseline(outputs: Outputs, train: Array, evaluated: Array) -> Mapping[str, float]:
    """Computes the metrics of the constant prediction, and its loss if that is finite.

    Args:
        outputs: its `kind` selects the metrics.
        train: targets of the training split: [n] for classification, else [n, *outputs.shape].
        evaluated: targets of the evaluated split, in the same form.
    """
    if outputs.kind == "classification":
        return classes_baseline(outputs.shape[-1], train, evaluated)
    if outputs.kind == "regression":
        return values_baseline(train, evaluated)
    values = labels_baseline(train, evaluated)
    return values if outputs.kind == "multi_label" else {k: v for k, v in values.items() if k != "exact_match"}


def classes_baseline(classes: int, train: Array, evaluated: Array) -> dict[str, float]:
    counts = np.bincount(train.astype(np.int64), minlength=classes)
    target_counts = counts[evaluated.astype(np.int64)]
    values = {"accuracy": float(np.mean(evaluated == counts.argmax()))}
    if target_counts.all():  # a class that the training split lacks makes the loss infinite
        values["loss"] = float(-np.mean(np.log(target_counts / counts.sum())))
    return values


def labels_baseline(train: Array, evaluated: Array) -> dict[str, float]:
    frequency = train.mean(axis=0, dtype=np.float64)
    correct = (evaluated > 0.5) == (frequency > 0.5)
    values = {
        "accuracy": float(correct.mean()),
        "exact_match": float(correct.reshape(len(correct), -1).all(axis=1).mean()),
    }
    probability = np.where(evaluated > 0.5, frequency, 1 - frequency)
    if probability.all():
        values["loss"] = float(-np.mean(np.log(probability)))
    return values


def values_baseline(train: Array, evaluated: Array) -> dict[str, float]:
    errors = evaluated - train.mean(axis=0, dtype=np.float64)
    squared = float(np.mean(errors**2))
    return {"loss": squared, "mae": float(np.mean(np.abs(errors))), "rmse": squared**0.5}


def baselines(outputs: Outputs, train: Array, validation: Array | None, test: Array | None) -> Mapping[str, float]:
    """Computes the finite baselines under their metric names, from the targets of the splits.

    `baseline/<metric>` is over the validation split, or over the test split if there is no validation split. If there
    are both, `baseline/test/<metric>` is over the test split.
    """
    splits = {"baseline": test} if validation is None else {"baseline": validation, "baseline/test": test}
    return {
        f"{prefix}/{name}": value
        for prefix, targets in splits.items()
        if targets is not None
        for name, value in baseline(outputs, train, targets).items()
        if np.isfinite(value)
    }
