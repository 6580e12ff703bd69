"""Checks the values of targets, ids and weights that are in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from scaleflow.dataset.batches.records import largest_target
from scaleflow.dataset.reading.targets import check_finite_targets
from scaleflow.errors import ConfigError
from scaleflow.interfaces import InputStructure, Outputs, label_leaf, name_leaves


def check_targets(outputs: Outputs, split: str, name: str, targets: np.ndarray[Any, Any]) -> None:
    """Rejects targets in memory that are invalid for their kind."""
    kind = outputs.kind
    label = f"{kind} {label_leaf('targets', name)} of {split!r}"
    if targets.dtype.kind not in ("iu" if kind == "classification" else "iufb"):
        expected = "integers" if kind == "classification" else "numbers"
        raise ConfigError(f"dataset: {label} are {targets.dtype.name}, expected {expected}")
    check_finite_targets(label, targets)
    counted = targets if outputs.ignore is None else targets[targets != outputs.ignore]
    if not counted.size:
        raise ConfigError(f"dataset: all {label} are {outputs.ignore}, which is ignored")
    last = largest_target(outputs)
    if last is None:
        return
    low = counted.min()
    high = counted.max()
    if low < 0 or high > last:
        besides = "" if outputs.ignore is None else f" or {outputs.ignore}, which is ignored"
        raise ConfigError(f"dataset: {label} range from {low} to {high}, expected 0 to {last}{besides}")


def check_ids(inputs: InputStructure, split: str, examples: Any) -> None:
    """Rejects ids in memory that are not below `Inputs.vocabulary`. XLA would silently use the last id instead.

    Args:
        inputs: describes the examples.
        split: the name of the split.
        examples: arrays [n, ...] of the structure of `inputs`. Arrays that are mapped from a file are not read.
    """
    arrays = name_leaves(examples)
    for name, described in name_leaves(inputs).items():
        ids = arrays[name]
        vocabulary = described.vocabulary
        if vocabulary is None or ids.dtype.kind not in "iu" or isinstance(ids, np.memmap):
            continue
        low = int(ids.min())
        high = int(ids.max())
        if low < 0 or high >= vocabulary:
            raise ConfigError(
                f"dataset: {label_leaf('inputs', name)} of {split!r} range from {low} to {high}, expected 0 to "
                f"{vocabulary - 1}, because their vocabulary is {vocabulary}"
            )


def check_cached_targets(split: str, targets: Any) -> None:
    """Rejects NaN and infinite targets of a stream that is now in memory. `targets` is a structure of arrays."""
    for name, array in name_leaves(targets).items():
        check_finite_targets(f"{label_leaf('targets', name)} of {split!r}", array)


def check_weights(split: str, weights: np.ndarray[Any, Any]) -> None:
    """Rejects weights in memory that are negative, infinite or NaN, or all 0."""
    is_valid = weights.dtype.kind in "iufb" and bool(np.isfinite(weights).all()) and weights.min() >= 0
    if not is_valid or not weights.any():
        problem = "are all 0" if is_valid else "contain values that are negative, infinite or NaN"
        raise ConfigError(f"dataset: weights of {split!r} {problem}")
