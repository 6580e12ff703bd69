"""Describes the data of a script's fits and evaluations by digests, so that runs can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.interfaces.events import DatasetDescribed
from scaleflow.runs.data_digest import ALL_VALUES, DIGEST_VERSION, new_digest

#: Arrays up to this size in bytes are digested completely, in 0.1 s; of larger ones, this many spread rows.
WHOLE_BYTES = 64 << 20
SAMPLED_ROWS = 4096
SAMPLED = "a sample of the rows"


class FitData:
    """Collects the digests of arrays that a script trains, validates and tests with.

    Data that is made while it is read, such as a `tf.data.Dataset`, has no digest.

    Args:
        name: the name of the script, for the description.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._splits: dict[str, dict[str, Any]] = {}

    def add(self, split: str, inputs: Any, targets: Any, weights: Any = None) -> None:
        """Adds the data of a split, unless it has no digest. Equal data has one entry."""
        parts = [list_arrays(part) for part in (inputs, targets, weights)]
        if not parts[0] or any(part is None for part in parts):
            return
        described = describe_arrays(*(part or {} for part in parts))
        if described not in self._splits.values():
            self._splits[split] = described

    def describe(self) -> DatasetDescribed | None:
        """Returns the description of all splits; None if no data has a digest."""
        if not self._splits:
            return None
        source: dict[str, Any] = {"path": None, "target": self._name, "arguments": {}}
        return DatasetDescribed(self._name, source, splits=self._splits)


def list_arrays(data: Any) -> dict[str, np.ndarray] | None:
    """Returns the arrays of a structure by name; {} for None, and None if the data is made while it is read."""
    if data is None:
        return {}
    arrays: dict[str, np.ndarray] = {}
    for path, leaf in keras.tree.flatten_with_path(data):
        if not hasattr(leaf, "shape") or isinstance(leaf, tf.data.Dataset):
            return None
        array = np.asarray(leaf)
        if array.ndim == 0:
            return None
        arrays["/".join(map(str, path))] = array
    return arrays


def describe_arrays(
    inputs: Mapping[str, np.ndarray], targets: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Returns the number of examples, the digest, the dtypes and the shapes of a split."""
    arrays = [*inputs.values(), *targets.values(), *weights.values()]
    is_whole = sum(array.nbytes for array in arrays) <= WHOLE_BYTES
    digest = new_digest()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(to_bytes(array if is_whole else sample_rows(array)))
    return {
        "examples": len(arrays[0]),
        "digest": digest.hexdigest()[:16],
        "covers": ALL_VALUES if is_whole else SAMPLED,
        "version": DIGEST_VERSION,
        "inputs": describe_leaves(inputs),
        "targets": describe_leaves(targets),
    }


def sample_rows(array: np.ndarray) -> np.ndarray:
    """Returns rows that are spread evenly over an array."""
    places = np.linspace(0, len(array) - 1, min(SAMPLED_ROWS, len(array))).astype(np.int64)
    sample: np.ndarray = array[places]
    return sample


def to_bytes(array: np.ndarray) -> bytes:
    """Returns the content of an array. Objects, such as texts, count as they are printed."""
    if array.dtype.hasobject:
        return "\0".join(map(repr, array.ravel().tolist())).encode()
    return np.ascontiguousarray(array).tobytes()


def describe_leaves(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the dtype and the shape of an example, by the name of the array; without names for a single one."""
    described = {}
    for name, array in arrays.items():
        described[name] = {"dtype": str(array.dtype), "shape": list(array.shape[1:])}
    return described.get("", described)
