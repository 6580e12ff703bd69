"""The kinds of trials (short trainings that find a setting), and their bounds."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from scaleflow.features.search.feature import FIND_PARAM

#: The value of a config key that requests a trial before the run.
AUTO = "auto"


@dataclass(frozen=True)
class RateTest:
    """A learning-rate range test (Smith 2015, https://arxiv.org/abs/1506.01186).

    Attributes:
        low, high: first and last value of `optimizer.learning_rate`, above 0.
        steps: number of steps from `low` to `high`. Each step multiplies the rate by the same factor.
    """

    name: ClassVar[str] = "lr"
    label: ClassVar[str] = "learning rate test"
    key: ClassVar[str] = "optimizer.learning_rate"
    table: ClassVar[str] = "learning_rates.csv"
    #: Resolved values that change during the trial. They are not params of its run.
    varied: ClassVar[tuple[str, ...]] = ("learning_rate", "xla")

    low: float = 1e-6
    high: float = 10.0
    steps: int = 200

    def rate_at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        return self.low * math.exp(math.log(self.high / self.low) * step / (self.steps - 1))


@dataclass(frozen=True)
class BatchSearch:
    """A search for `training.batch_size`. Sizes double."""

    name: ClassVar[str] = "batch_size"
    label: ClassVar[str] = "batch size search"
    key: ClassVar[str] = "training.batch_size"
    table: ClassVar[str] = "batch_sizes.csv"
    varied: ClassVar[tuple[str, ...]] = (
        "batch_size",
        "global_batch_size",
        "learning_rate",
        "steps",
        "steps_per_epoch",
        "xla",
    )


Trial = RateTest | BatchSearch


def to_params(trial: Trial, params: Mapping[str, str]) -> dict[str, str]:
    """Returns the params of a trial's run, made from the params of a training."""
    trial_params = dict(params)
    for name in trial.varied:
        trial_params.pop(f"resolved.{name}", None)
    trial_params[FIND_PARAM] = trial.name
    for key, value in asdict(trial).items():
        trial_params[f"{FIND_PARAM}.{key}"] = str(value)
    return trial_params
