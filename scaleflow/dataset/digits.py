"""Dataset source: handwritten digits that are part of scikit-learn.

1797 images of 8 x 8 pixels, from the UCI repository's "Optical Recognition of Handwritten Digits" (Alpaydin and
Kaynak 1998).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from scaleflow.dataset.reading.files import TEST_FRACTION
from scaleflow.interfaces import Arrays, Inputs, Outputs, OutputStructure

SPLIT_SEED = 20


class Digits:
    """The digits. The test split is always the same fifth of them (359), whatever the run's seed."""

    inputs = Inputs(shape=(8, 8, 1), dtype="float32", scale=1 / 16)
    outputs: OutputStructure = Outputs(kind="classification", shape=(10,))
    splits: Collection[str] = ("train", "test")

    def load(self, split: str) -> Arrays:
        """Returns images [n, 8, 8, 1] float32 in 0..16, and digits [n] int32."""
        images, digits = self._examples
        order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
        held_out = round(TEST_FRACTION * len(images))
        chosen = order[:held_out] if split == "test" else order[held_out:]
        return Arrays(images[chosen], digits[chosen], rows=chosen)

    @cached_property
    def _examples(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        rows = read_digits()
        return rows[:, :64].reshape(-1, 8, 8, 1).astype(np.float32), rows[:, 64].astype(np.int32)


def read_digits() -> np.ndarray[Any, Any]:
    """Reads [1797, 65]: 64 pixels and the digit.

    It reads scikit-learn's file directly: importing scikit-learn would take longer than the rest of a short run.
    """
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])
