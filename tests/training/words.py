"""Text as numbers, for tests: which half of the vocabulary do most of the words come from?"""

from __future__ import annotations

import numpy as np

from scaleflow.interfaces import Arrays, Inputs, Outputs


class Words:
    """Texts of 1 to 12 of 40 words, padded with 0."""

    inputs = Inputs((12,), "int32", vocabulary=41)
    outputs = Outputs("binary", (1,), names=("low", "high"))
    splits = ("train", "test")

    def load(self, split: str) -> Arrays:
        random = np.random.default_rng(0 if split == "train" else 1)
        count = 320 if split == "train" else 100
        is_high = random.integers(2, size=(count, 1))
        words = random.integers(1, 31, (count, 12)) + 10 * is_high
        words[np.arange(12) >= random.integers(1, 13, (count, 1))] = 0
        return Arrays(words.astype(np.int32), is_high.astype(np.int32))
