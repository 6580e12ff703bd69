"""Dataset source: random examples with learnable targets, for trials and benchmarks.

They are in memory and cost almost nothing to feed, so a run on them shows what everything else costs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from scaleflow.dataset.reading.files import TEST_FRACTION
from scaleflow.dataset.reading.targets import describe_outputs
from scaleflow.interfaces import Arrays, Inputs, Kind
from scaleflow.interfaces.options import ArrayShape, AtLeastTwo, Positive, Seed, check_option, check_options

#: Standard deviation of a pattern, relative to noise of 1: enough to learn it in an epoch or two.
SIGNAL = 0.5

Array = np.ndarray[Any, Any]


class Generated:
    """Base of the datasets that are generated: counts the examples of each split, and seeds them.

    Raises:
        ConfigError: if an option is invalid.
    """

    splits: Collection[str] = ("train", "test")

    @check_options("dataset")
    def __init__(self, examples: AtLeastTwo, seed: Seed) -> None:
        self._examples = examples
        self._seed = seed

    def count_and_seed(self, split: str) -> tuple[int, np.random.Generator]:
        """Returns the number of examples of a split, and the generator of its random numbers."""
        test = max(1, round(TEST_FRACTION * self._examples))
        count = test if split == "test" else self._examples - test
        return count, np.random.default_rng([self._seed, 1 + (split == "test")])


class Synthetic(Generated):
    """Normal noise plus a fixed random pattern per output; the targets are the amounts of the patterns.

    conf/dataset/synthetic.yaml describes the arguments.
    """

    @check_options("dataset")
    def __init__(
        self,
        examples: AtLeastTwo = 10000,
        shape: ArrayShape = (32, 32, 3),
        kind: Kind = "classification",
        outputs: int = 10,
        seed: Seed = 0,
    ) -> None:
        super().__init__(examples, seed)
        check_option(outputs, AtLeastTwo if kind == "classification" else Positive, "dataset.outputs")
        self.inputs = Inputs(shape=tuple(shape), dtype="float32")
        self.outputs = describe_outputs(kind, outputs)

    def load(self, split: str) -> Arrays:
        """Returns inputs [n, *shape] float32, and targets as `Arrays` requires for the kind."""
        count, random = self.count_and_seed(split)
        size = int(np.prod(self.inputs.shape))
        patterns = np.random.default_rng([self._seed, 0]).standard_normal((*self.outputs.shape, size), dtype=np.float32)
        amounts, targets = self._targets(random, count)
        inputs = random.standard_normal((count, size), dtype=np.float32) + SIGNAL * (amounts @ patterns)
        return Arrays(inputs.reshape(count, *self.inputs.shape), targets)

    def _targets(self, random: np.random.Generator, count: int) -> tuple[Array, Array]:
        """Returns the amount of each pattern in each input [count, outputs], and the targets."""
        width = self.outputs.shape[0]
        if self.outputs.kind == "classification":
            classes = random.integers(width, size=count, dtype=np.int32)
            return np.eye(width, dtype=np.float32)[classes], classes
        amounts = random.standard_normal((count, width), dtype=np.float32)
        return amounts, amounts if self.outputs.kind == "regression" else (amounts > 0).astype(np.float32)
