"""The conditions of a promotion, and what is recorded of the decision."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scaleflow.interfaces import PromotionOptions

#: The most characters of the reasons in a tag.
LONGEST = 2000

#: Begins the key of a floor that is a slice of the report's: `slice/COLUMN/VALUE`.
SLICE = "slice/"


@dataclass(frozen=True)
class Condition:
    """A condition of the promotion.

    Attributes:
        text: the condition, with its figures.
    """

    text: str
    holds: bool


@dataclass(frozen=True)
class ScoreComparison:
    """A candidate and the champion on the same examples.

    Attributes:
        is_error: whether a smaller one is better.
        left_out: the examples of the split that the champion was trained on.
        gain, low, high: how much better the candidate is, and the ends of the interval.
        better, worse: the examples that the candidate predicts better, or worse.
        on: the file with the examples; empty for the candidate's test split. Then neither model was trained on them.
    """

    metric: str
    is_error: bool
    examples: int
    left_out: int
    candidate: float
    champion: float
    gain: float
    low: float
    high: float
    better: int
    worse: int
    on: str = ""


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


def describe_comparison(found: ScoreComparison, options: PromotionOptions) -> Condition:
    """Returns the condition that the candidate is better than the champion.

    If few examples differ, they may all be better by chance: the interval does not show that, and a sign test does.
    """
    interval = f"{found.low:+.4g} to {found.high:+.4g}"
    text = (
        f"{found.metric} {found.candidate:.4g}, the champion {found.champion:.4g}: better by {found.gain:+.4g} "
        f"({interval}, {options.confidence:.0%} confidence) on {found.examples:,} examples"
    )
    text += f" of {found.on}" if found.on else ""
    if found.left_out:
        text += f", without {found.left_out:,} that {'a model' if found.on else 'the champion'} was trained on"
    if found.low <= options.tolerance:
        return Condition(f"{text}; the lower end is not above {options.tolerance:g}", False)
    differ, least = found.better + found.worse, math.ceil(-math.log2(1 - options.confidence))
    if differ < least and options.tolerance >= 0:
        return Condition(f"{text}; only {differ} of them differ, and {least} are needed", False)
    return Condition(text, True)


def check_floor(key: str, value: float, floor: float, is_error: bool) -> Condition:
    """Returns the condition that a metric is at least, or an error at most, what `promotion.at_least` says."""
    holds = value <= floor if is_error else value >= floor
    word = "at most" if is_error else "at least"
    return Condition(f"{key} {value:.4g}, {word} {floor:g}{'' if holds else ' is needed'}", holds)


def make_record(decision: Decision, candidate: str, champion: str | None) -> dict[str, Any]:
    """Returns what a tag says of a decision.

    Args:
        candidate: the ID of the candidate's logged model.
        champion: the version that it was compared with; None if there was none.
    """
    return {
        "is_good": decision.is_promoted,
        "reasons": "; ".join(decision.reasons)[:LONGEST],
        "model": candidate,
        "compared_with": champion,
        "comparison": None if decision.comparison is None else asdict(decision.comparison),
        "smoke": dict(decision.smoke),
    }
