"""What a model has to beat: the values of one that knows the training targets alone, and no input.

It says the majority class, the labels that most examples have, or the mean; and for the loss, how frequent each
class or label is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from scaleflow.interfaces import Outputs

Array = np.ndarray[Any, Any]


def baseline(outputs: Outputs, train: Array, evaluated: Array) -> Mapping[str, float]:
    """The metrics of the kind of target, and the loss where it is finite.

    Args:
        outputs: whose kind decides.
        train: the training split's targets, [n] for classification, else [n, *outputs.shape].
        evaluated: those of the split that is evaluated.
    """
    if outputs.kind == "classification":
        return classes_baseline(outputs.shape[-1], train, evaluated)
    if outputs.kind == "regression":
        return values_baseline(train, evaluated)
    values = labels_baseline(train, evaluated)
    return values if outputs.kind == "multi_label" else {k: v for k, v in values.items() if k != "exact_match"}


def classes_baseline(classes: int, train: Array, evaluated: Array) -> dict[str, float]:
    counts = np.bincount(train.astype(np.int64), minlength=classes)
    there = counts[evaluated.astype(np.int64)]
    values = {"accuracy": float(np.mean(evaluated == counts.argmax()))}
    if there.all():  # else an example is of a class that the training split never had
        values["loss"] = float(-np.mean(np.log(there / counts.sum())))
    return values


def labels_baseline(train: Array, evaluated: Array) -> dict[str, float]:
    frequency = train.mean(axis=0, dtype=np.float64)
    right = (evaluated > 0.5) == (frequency > 0.5)
    values = {
        "accuracy": float(right.mean()),
        "exact_match": float(right.reshape(len(right), -1).all(axis=1).mean()),
    }
    chance = np.where(evaluated > 0.5, frequency, 1 - frequency)
    if chance.all():
        values["loss"] = float(-np.mean(np.log(chance)))
    return values


def values_baseline(train: Array, evaluated: Array) -> dict[str, float]:
    errors = evaluated - train.mean(axis=0, dtype=np.float64)
    squared = float(np.mean(errors**2))
    return {"loss": squared, "mae": float(np.mean(np.abs(errors))), "rmse": squared**0.5}


def baselines(outputs: Outputs, train: Array, validation: Array | None, test: Array | None) -> Mapping[str, float]:
    """Values under the names that a run tells them by, from the splits' targets.

    `baseline/<metric>` is over the split that the curves are of, which is validation, or else test; where there
    are both, `baseline/test/<metric>` is over the test split.
    """
    named = {"baseline": test} if validation is None else {"baseline": validation, "baseline/test": test}
    return {
        f"{prefix}/{name}": value
        for prefix, targets in named.items()
        if targets is not None
        for name, value in baseline(outputs, train, targets).items()
        if np.isfinite(value)
    }
