"""Trials, short trainings that find a setting: what they try. `worker/trial_rules.py` says how they choose."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

#: Examples of the smallest micro-batch that is tried, unless it does not fit.
FIRST_BATCH_SIZE = 8


@dataclass(frozen=True)
class RateTest:
    """A learning-rate range test (Smith 2015, https://arxiv.org/abs/1506.01186).

    Attributes:
        low, high: the first and the last value of `optimizer.learning_rate`, above 0.
        steps: the number of steps in which it rises from one to the other, by the same factor at each step.
    """

    name: ClassVar[str] = "lr"
    label: ClassVar[str] = "learning rate test"
    key: ClassVar[str] = "optimizer.learning_rate"

    low: float = 1e-6
    high: float = 10.0
    steps: int = 200

    def rate_at(self, step: int) -> float:
        """Returns the rate of a step, counted from 0."""
        return self.low * math.exp(math.log(self.high / self.low) * step / (self.steps - 1))


@dataclass(frozen=True)
class BatchSearch:
    """A search for `training.batch_size`, in sizes that double."""

    name: ClassVar[str] = "batch_size"
    label: ClassVar[str] = "batch size search"
    key: ClassVar[str] = "training.batch_size"


Trial = RateTest | BatchSearch

#: The param that says which setting a run looked for.
PARAM = "find"


#: Resolved values that change during a trial, so that they are no params of its run.
VARIED = {
    RateTest.name: ("learning_rate", "xla"),
    BatchSearch.name: ("batch_size", "global_batch_size", "learning_rate", "steps", "steps_per_epoch", "xla"),
}


def to_params(trial: Trial, params: Mapping[str, str]) -> dict[str, str]:
    """Returns the params of a run that is a trial, given those of a training."""
    varied = {f"resolved.{name}" for name in VARIED[trial.name]}
    own = {PARAM: trial.name} | {f"{PARAM}.{key}": str(value) for key, value in asdict(trial).items()}
    return {key: value for key, value in params.items() if key not in varied} | own


def choose_first_size(multiple: int, most: int) -> int:
    """Returns the first size to try: `multiple` times a power of two, at least 8 unless `most` is less."""
    size = multiple
    while size < FIRST_BATCH_SIZE and 2 * size <= most:
        size *= 2
    return size
