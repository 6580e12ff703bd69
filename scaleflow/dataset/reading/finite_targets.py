"""Rejects targets and weights that cannot be used. No TensorFlow: the launcher imports sources that use it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from scaleflow.errors import ConfigError


def check_finite_targets(label: str, targets: np.ndarray[Any, Any]) -> None:
    """Rejects targets of which float32 makes NaN or Inf. They are searched only if the smallest or largest is one."""
    largest = np.finfo(np.float32).max
    if targets.dtype.kind != "f" or not targets.size or (targets.min() >= -largest and targets.max() <= largest):
        return
    is_bad = ~(np.abs(targets) <= largest)  # also NaN
    rows = np.flatnonzero(is_bad.reshape(len(targets), -1).any(axis=1))
    raise ConfigError(
        f"dataset: {label} are NaN or infinite in {len(rows)} of {len(targets)} rows, the first of which is row "
        f"{rows[0]} (from 0); leave these rows out"
    )


def check_weights_name(name: str | None, inputs: Collection[str], target: Any, key: str) -> None:
    """Rejects weights that are inputs, too, or the target; `key` names the inputs."""
    if name is not None and name == target:
        raise ConfigError(f"dataset.weights={name}: is the target, too; name another column")
    if name in inputs:
        raise ConfigError(
            f"dataset.weights={name}: is in {key}, too, but a weight only says how much a row counts, and new rows "
            "have none; leave it out of one of the two"
        )
