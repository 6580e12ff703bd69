"""Says whether a run gave the results of another one: metrics point by point, and the digests of the weights."""

import math
from dataclasses import dataclass

from scaleflow.comparison.loading import MEASURED, ComparedRun
from scaleflow.runs.state import BASELINE

#: Values count as equal if they differ by no more than this, relative to the larger one (at least 1).
TOLERANCE = 1e-6

EQUAL_BITS, EQUAL_VALUES = "equal bits", "equal to 1e-6"


@dataclass(frozen=True)
class Reproduction:
    """Whether a run gave the results of another one.

    Attributes:
        text: `equal bits`, `equal to 1e-6`, or the first step that differs.
        is_equal: whether it is one of the first two.
        step: the first step at which a metric differs by more; None if none does.
        points, metrics: how many points of how many metrics were compared.
        weights: `equal`, `differ` or `not known`.
    """

    text: str
    is_equal: bool
    step: int | None
    points: int
    metrics: int
    weights: str


def judge_runs(first: ComparedRun, second: ComparedRun) -> Reproduction:
    """Compares the points that both runs have.

    Training reports metrics in the middle of an epoch at steps that depend on the speed. Where one run has a metric
    and the other has none of it, they differ, except of a baseline: the constant one is left out if the targets cannot
    be read in time, and the fitted ones if the run is told to stop. Finished runs of different lengths differ.
    """
    curves = [{key: dict(each.points[key]) for key in each.points if not key.startswith(MEASURED)} for each in
              (first, second)]  # fmt: skip
    weights = "not known"
    if first.weights and second.weights:
        weights = "equal" if first.weights == second.weights else "differ"
    points, is_same, different = 0, True, []
    for name in sorted({*curves[0], *curves[1]}):
        before, now = (curve.get(name, {}) for curve in curves)
        if not before or not now:
            if name.startswith(BASELINE):
                continue
            step, _ = next(iter((before or now).items()))
            different.append((step, f"{name} is only in the {'first' if before else 'second'} run"))
        for step in before.keys() & now.keys():
            points += 1
            is_same = is_same and is_same_number(before[step], now[step], 0.0)
            if not is_same_number(before[step], now[step], TOLERANCE):
                different.append((step, f"{name} was {before[step]:.9g} and is {now[step]:.9g}"))
    ends = [max((step for curve in each.values() for step in curve), default=0) for each in curves]
    if ends[0] != ends[1] and first.status == second.status == "FINISHED":
        different.append((min(ends) + 1, f"the first run has {ends[0]} steps, the second {ends[1]}"))
    count = points, len(curves[0].keys() & curves[1].keys()), weights
    if different:
        step, what = min(different)
        return Reproduction(f"differs from step {step} on: {what}", False, step, *count)
    if not points and weights != "equal":
        return Reproduction("not known: the runs have no metrics in common", False, None, *count)
    return Reproduction(EQUAL_BITS if is_same and weights != "differ" else EQUAL_VALUES, True, None, *count)


def is_same_number(before: float, now: float, tolerance: float) -> bool:
    both_nan = math.isnan(before) and math.isnan(now)
    return both_nan or before == now or abs(before - now) <= tolerance * max(1.0, abs(before), abs(now))


def describe_verdict(verdict: Reproduction) -> str:
    """Returns the verdict and what it covers, in a line."""
    covers = f"{verdict.points:,} points of {verdict.metrics} metrics compared"
    return f"{verdict.text} ({covers}; weights: {verdict.weights})"
