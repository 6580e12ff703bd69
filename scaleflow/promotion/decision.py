"""Decides whether a candidate is better than the champion, from their predictions for the same examples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.evaluation.comparison import PairedScores, pair_scores
from scaleflow.evaluation.predictions import Predictions
from scaleflow.evaluation.resampling import Figure, Resamples
from scaleflow.interfaces import PromotionOptions

#: The fewest examples on which models are compared.
FEWEST_EXAMPLES = 30

#: The resamples of the interval.
RESAMPLES = 4000

#: Begins the key of a floor that is a slice of the report's: `slice/COLUMN=VALUE`.
SLICE = "slice/"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Condition:
    """A condition of the promotion.

    Attributes:
        text: the condition, with its figures.
        holds: whether it does.
    """

    text: str
    holds: bool


@dataclass(frozen=True)
class ScoreComparison:
    """A candidate and the champion on the same examples.

    Attributes:
        metric: such as `accuracy`.
        is_error: whether a smaller one is better.
        examples: the number of examples.
        left_out: the examples of the split that the champion was trained on.
        candidate, champion: the metric of each.
        gain: how much better the candidate is, with the interval.
        better, worse: the examples that the candidate predicts better, or worse.
    """

    metric: str
    is_error: bool
    examples: int
    left_out: int
    candidate: float
    champion: float
    gain: Figure
    better: int
    worse: int


@dataclass(frozen=True)
class Decision:
    """Whether a candidate becomes the champion, and why.

    Attributes:
        is_promoted: whether every condition holds.
        conditions: in the order in which they are checked.
        comparison: with the champion; None if there is none yet.
        smoke: what was measured of the served candidate.
    """

    conditions: Sequence[Condition]
    comparison: ScoreComparison | None = None
    smoke: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_promoted(self) -> bool:
        return all(each.holds for each in self.conditions)

    @property
    def reasons(self) -> list[str]:
        """The conditions that do not hold."""
        return [each.text for each in self.conditions if not each.holds]


def compare_models(
    candidate: Predictions, champion: Predictions, is_seen: Array, options: PromotionOptions
) -> ScoreComparison:
    """Compares the predictions of two models by `promotion.metric`.

    Args:
        candidate, champion: their predictions for the candidate's split.
        is_seen: which examples of the split the champion was trained on, [examples] bool; they are left out.
        options: the metric and the confidence.

    Raises:
        ConfigError: if the models do not have the metric, or too few examples are left.
    """
    pair = choose_pair(pair_scores(candidate, champion), options.metric)
    is_used = ~is_seen[pair.examples]
    if is_used.sum() < FEWEST_EXAMPLES:
        left_out = f"; the champion was trained on {int((~is_used).sum()):,} others" if (~is_used).any() else ""
        raise ConfigError(
            f"the champion and the candidate can be compared on {int(is_used.sum()):,} examples{left_out}; at least "
            f"{FEWEST_EXAMPLES} are needed: use a larger test split"
        )
    scores, others, gains = pair.scores[is_used], pair.others[is_used], pair.gains[is_used]
    weights = None if pair.weights is None else pair.weights[is_used]
    return ScoreComparison(
        pair.metric,
        pair.is_error,
        len(gains),
        int((~is_used).sum()),
        float(np.average(scores, weights=weights)),
        float(np.average(others, weights=weights)),
        find_interval(gains, weights, options.confidence),
        int((gains > 0).sum()),
        int((gains < 0).sum()),
    )


def choose_pair(pairs: Sequence[PairedScores], metric: str | None) -> PairedScores:
    """Returns the scores of a metric; the first ones for None. Raises ConfigError if there is no such metric."""
    names = [each.metric for each in pairs]
    if metric is not None and metric not in names:
        raise ConfigError(f"promotion.metric={metric}: the models are compared by {', '.join(names)}")
    return pairs[0 if metric is None else names.index(metric)]


def find_interval(gains: Array, weights: Array | None, confidence: float) -> Figure:
    """Returns the mean of paired differences [n] with its interval, by the bootstrap.

    The percentiles are expanded for few examples, as Hesterberg (2015, The American Statistician 69) says: the usual
    ones are too narrow by the difference between Student's and the normal distribution, and by sqrt((n - 1) / n).
    """
    count, normal = len(gains), NormalDist()
    z = normal.inv_cdf((1 + confidence) / 2)
    student = z + (z**3 + z) / (4 * (count - 1))
    tail = 100 * normal.cdf(-student * math.sqrt(count / (count - 1)))
    return Resamples(count, RESAMPLES, weights, (tail, 100 - tail)).mean(gains)


def describe_comparison(found: ScoreComparison, options: PromotionOptions) -> Condition:
    """Returns the condition that the candidate is better than the champion."""
    interval = f"{found.gain.low:+.4g} to {found.gain.high:+.4g}"
    text = (
        f"{found.metric} {found.candidate:.4g}, the champion {found.champion:.4g}: better by {found.gain.value:+.4g} "
        f"({interval}, {options.confidence:.0%} confidence) on {found.examples:,} examples"
    )
    if found.left_out:
        text += f", without {found.left_out:,} that the champion was trained on"
    holds = found.gain.low > options.tolerance
    return Condition(text if holds else f"{text}; the lower end is not above {options.tolerance:g}", holds)


def check_floor(key: str, value: float, floor: float, is_error: bool) -> Condition:
    """Returns the condition that a metric is at least, or an error at most, what `promotion.at_least` says."""
    holds = value <= floor if is_error else value >= floor
    word = "at most" if is_error else "at least"
    return Condition(f"{key} {value:.4g}, {word} {floor:g}{'' if holds else ' is needed'}", holds)
