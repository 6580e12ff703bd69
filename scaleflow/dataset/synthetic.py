"""Random examples with targets that can be learned: for trying things, and for measuring.

In memory they cost next to nothing to feed, so a run on them shows what everything else costs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, get_args

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Inputs, Kind, Outputs

TEST_FRACTION = 0.2

#: The size of a pattern beside noise of size 1: enough to be learned in an epoch or two.
SIGNAL = 0.5

Array = np.ndarray[Any, Any]


class Synthetic:
    """Normal noise with a fixed random pattern added for each output; the targets say how much of it.

    Args:
        examples: train and test together; a fifth of them is the test split.
        shape: of one input.
        kind: what the targets mean.
        outputs: classes, labels or values; 1 for `binary`.
        seed: of the noise, the patterns and the targets.

    Raises:
        ConfigError: for a size that makes no sense.
    """

    splits: Collection[str] = ("train", "test")

    def __init__(
        self,
        examples: int = 10000,
        shape: Sequence[int] = (32, 32, 3),
        kind: Kind = "classification",
        outputs: int = 10,
        seed: int = 0,
    ) -> None:
        check_synthetic(examples, shape, kind, outputs)
        self.inputs = Inputs(shape=tuple(shape), dtype="float32")
        self.outputs = Outputs(kind=kind, shape=(1,) if kind == "binary" else (outputs,))
        self._examples = examples
        self._seed = seed

    def load(self, split: str) -> Arrays:
        """Inputs [n, *shape] float32; targets as `kind` asks for."""
        test = split == "test"
        held_out = max(1, round(TEST_FRACTION * self._examples))
        count = held_out if test else self._examples - held_out
        size = int(np.prod(self.inputs.shape))
        patterns = np.random.default_rng([self._seed, 0]).standard_normal((*self.outputs.shape, size), dtype=np.float32)
        random = np.random.default_rng([self._seed, 1 + test])
        amounts, targets = self._targets(random, count)
        inputs = random.standard_normal((count, size), dtype=np.float32) + SIGNAL * (amounts @ patterns)
        return Arrays(inputs.reshape(count, *self.inputs.shape), targets)

    def _targets(self, random: np.random.Generator, count: int) -> tuple[Array, Array]:
        """How much of each pattern is in each input [count, outputs], and the targets that say so."""
        width = self.outputs.shape[0]
        if self.outputs.kind == "classification":
            classes = random.integers(width, size=count, dtype=np.int32)
            return np.eye(width, dtype=np.float32)[classes], classes
        amounts = random.standard_normal((count, width), dtype=np.float32)
        return amounts, amounts if self.outputs.kind == "regression" else (amounts > 0).astype(np.float32)


def check_synthetic(examples: Any, shape: Any, kind: Any, outputs: Any) -> None:
    """Refuses arguments that describe no dataset."""
    if not is_count(examples) or examples < 2:
        raise ConfigError(f"dataset.examples={examples}: expected an integer, at least 2")
    if isinstance(shape, str) or not isinstance(shape, Sequence) or not shape or not all(map(is_count, shape)):
        raise ConfigError(f"dataset.shape={shape}: expected a list of sizes, such as [32, 32, 3]")
    if kind not in get_args(Kind):
        raise ConfigError(f"dataset.kind={kind}: expected one of {', '.join(get_args(Kind))}")
    least = 2 if kind == "classification" else 1
    if not is_count(outputs) or outputs < least:
        raise ConfigError(f"dataset.outputs={outputs}: expected an integer, at least {least}")


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
