"""Describes targets, and rejects those that cannot be used. No TensorFlow: the launcher imports sources that use it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Kind, Outputs
from scaleflow.interfaces.data import MAX_ROUNDING, ROUNDING

#: The kinds of a target that is one class or number.
OneKind = Literal["auto", "classification", "binary", "regression"]

#: Maximum number of classes that a message names.
MAX_CLASSES_NAMED = 10


def describe_outputs(kind: Kind | Literal["auto"], count: int, names: Sequence[str] = ()) -> Outputs:
    """Describes outputs with a number of classes, labels or values. With `auto`, two classes are `binary`."""
    if kind == "auto":
        kind = "binary" if count == 2 else "classification"
    return Outputs(kind, (1,) if kind == "binary" else (count,), tuple(names) or None)


def show_classes(names: Sequence[str]) -> str:
    """Returns the first classes for a message."""
    shown = ", ".join(names[:MAX_CLASSES_NAMED])
    return f"{shown}, ..." if len(names) > MAX_CLASSES_NAMED else shown


def check_finite_targets(label: str, targets: np.ndarray[Any, Any]) -> None:
    """Rejects targets that are NaN or infinite in float32."""
    largest = np.finfo(np.float32).max
    if targets.dtype.kind != "f" or not targets.size or (targets.min() >= -largest and targets.max() <= largest):
        return  # a NaN makes the comparisons false; in other arrays no row must be searched
    is_bad = ~(np.abs(targets) <= largest)  # also NaN
    rows = np.flatnonzero(is_bad.reshape(len(targets), -1).any(axis=1))
    raise ConfigError(
        f"dataset: {label} are NaN or infinite in {len(rows)} of {len(targets)} rows, the first of which is row "
        f"{rows[0]} (from 0); leave these rows out"
    )


def check_weights_name(name: str | None, inputs: Collection[str], target: Any, key: str) -> None:
    """Rejects weights that are also an input or the target. `key` names the inputs."""
    if name is not None and name == target:
        raise ConfigError(f"dataset.weights={name}: is the target, too; name another column")
    if name in inputs:
        raise ConfigError(
            f"dataset.weights={name}: is in {key}, too, but a weight only says how much a row counts, and new rows "
            "have none; leave it out of one of the two"
        )


Array = np.ndarray[Any, Any]

#: The range of a normal distribution without its tails, in deviations.
RANGE = 4.0


def find_mean_and_deviation(numbers: Array) -> tuple[float, float]:
    """Returns the mean and the deviation of numbers [n]. The deviation of equal numbers is 0, despite rounding."""
    if numbers.min() == numbers.max():
        return float(numbers[0]), 0.0
    largest = np.abs(numbers).max()  # squares of very large and very small numbers have no float64
    shares = numbers / largest
    return float(shares.mean() * largest), float(shares.std() * largest)


def is_wide(numbers: Array) -> bool:
    """Returns whether a column has numbers that float32 rounds by a large part of the column's range.

    That happens if they are far from 0 and close together, such as times in seconds.

    Args:
        numbers: one column [n], or several [..., columns].
    """
    axes = tuple(range(max(1, numbers.ndim - 1)))
    low = np.fmin.reduce(numbers, axis=axes)
    high = np.fmax.reduce(numbers, axis=axes)
    largest = np.maximum(np.abs(low), np.abs(high))
    return bool(np.any((high > low) & (largest * ROUNDING > MAX_ROUNDING * (high - low) / RANGE)))
