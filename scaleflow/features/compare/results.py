"""Compares the metrics of two runs: is a difference more than noise, and are all metrics equal?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from scaleflow.interfaces import Mode, find_direction
from scaleflow.runs.run import Run
from scaleflow.runs.state import BASELINE

#: Name of the mean cost. It depends on the costs that the user gave.
COST = "cost_at_threshold"

if TYPE_CHECKING:
    from scaleflow.features.compare.examples import PairedPredictions

#: Metrics that differ in every repetition of a run: speed, memory, use of the machine.
MEASURED = ("perf/", "system/")

#: Split of a metric, by the first part of its name.
SPLITS = {"test": "test", "val": "validation", "all": "all"}

NOT_KNOWN = "not known"


@dataclass(frozen=True)
class MetricDifference:
    """A metric of two runs.

    Attributes:
        before, now: last values; None if a run lacks the metric.
        low, high: bounds of the difference (now - before), at 95 %; None: unknown.
        basis: how the bounds were computed, or why they are unknown.
        mode: whether larger or smaller values are better; None: unknown.
    """

    name: str
    before: float | None
    now: float | None
    low: float | None = None
    high: float | None = None
    basis: str = NOT_KNOWN
    mode: Mode | None = None

    @property
    def difference(self) -> float | None:
        """Second value minus first value."""
        if self.before is None or self.now is None:
            return None
        return self.now - self.before

    @property
    def is_real(self) -> bool | None:
        """Whether the difference is more than noise; None: unknown."""
        if self.difference == 0:
            return False
        if self.low is None or self.high is None:
            return None
        return not self.low <= 0 <= self.high

    @property
    def is_better(self) -> bool | None:
        """Whether the second value is better; None if the values are equal or the direction is unknown."""
        if not self.difference or self.mode is None:
            return None
        return (self.difference > 0) == (self.mode == "max")


def compare_metrics(first: Run, second: Run, has_same_data: bool = False) -> list[MetricDifference]:
    """Returns the metrics of both runs, test metrics first.

    With `has_same_data`, the runs' examples are matched by their numbers, even if the models read different columns.
    """
    from scaleflow.features.compare.examples import PairedPredictions  # imports numpy and pyarrow

    before = first.metrics
    now = second.metrics
    names = [name for name in dict.fromkeys((*before, *now)) if not name.startswith((BASELINE, "system/"))]
    names.sort(key=find_split_order)
    pairs = PairedPredictions(first, second, has_same_data)
    differences = []
    for name in names:
        first_mode = find_direction(name, first.modes)
        second_mode = find_direction(name, second.modes)
        mode = first_mode if first_mode == second_mode else None
        metric = MetricDifference(name, before.get(name), now.get(name), mode=mode)
        if COST in name and metric.difference is not None and first.costs != second.costs:
            metric = replace(metric, mode=None, basis=f"{NOT_KNOWN}: the runs count with other costs")
        elif metric.difference:
            repeats = measure_repeats(first, second, name)
            low, high, basis = repeats or measure_examples(pairs, name, (before[name], now[name]))
            metric = replace(metric, low=low, high=high, basis=basis)
        if metric.difference == 0:
            metric = replace(metric, basis="equal")
        differences.append(metric)
    return differences


def find_split_order(name: str) -> int:
    """Returns the position of a metric's split in tables: test, validation, training, others."""
    order = ("test", "val", "train")
    split = name.partition("/")[0]
    return order.index(split) if "/" in name and split in order else len(order)


def measure_examples(
    pairs: PairedPredictions, name: str, values: tuple[float, float]
) -> tuple[float | None, float | None, str]:
    """Returns the bounds of a difference on the same examples and their basis, or (None, None, reason)."""
    from scaleflow.features.compare.examples import compare_examples

    split, _, metric = name.partition("/")
    if split not in SPLITS:
        return None, None, NOT_KNOWN
    if pairs.reason:
        return None, None, f"{NOT_KNOWN}: {pairs.reason}"
    if SPLITS[split] != pairs.split:
        return None, None, f"{NOT_KNOWN}: the runs kept predictions for {pairs.split}"
    parts = pairs.find(metric, values)
    if parts is None:
        return None, None, f"{NOT_KNOWN}: kept predictions do not give this metric"
    low, high = compare_examples(*parts, pairs.units)
    over = f" in {pairs.units.describe()}" if pairs.units else ""
    if math.isnan(low):
        return None, None, f"{NOT_KNOWN}: all examples are{over}"
    return low, high, f"{pairs.count:,} {pairs.split} examples{over}, paired".replace(" all ", " ")


def measure_repeats(first: Run, second: Run, name: str) -> tuple[float, float, str] | None:
    """Returns the bounds of the difference of means over repeats of both configs, and their basis.

    The deviation is pooled over both groups, so one of them may be a single run. Returns None without repeats, or if
    all repeats are equal, as with one seed.
    """
    before = list_repeats(first, name)
    now = list_repeats(second, name)
    freedom = len(before) + len(now) - 2
    squares = sum_squares(before) + sum_squares(now)
    if freedom < 1 or not 0 < squares < math.inf:
        return None
    from scipy import stats

    first_mean = statistics.fmean(before)
    second_mean = statistics.fmean(now)
    difference = second_mean - first_mean
    variance = squares / freedom * (1 / len(before) + 1 / len(now))
    spread = float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
    basis = f"{len(before)} and {len(now)} repeats, means {first_mean:.4g} and {second_mean:.4g}"
    return difference - spread, difference + spread, basis


def list_repeats(run: Run, name: str) -> list[float]:
    """Returns the values of a metric in the repeats of a run, or only its own value."""
    values = [metrics[name] for metrics in run.repeats if name in metrics]
    return values or [run.metrics[name]]


def sum_squares(values: Sequence[float]) -> float:
    """Returns the sum of the squared deviations from the mean."""
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values)


#: Values are equal if they differ by at most this, relative to the larger one (at least 1).
TOLERANCE = 1e-6

EQUAL_BITS = "equal bits"
EQUAL_VALUES = "equal to 1e-6"


@dataclass(frozen=True)
class Reproduction:
    """Whether a run reproduced the results of another run.

    Attributes:
        text: `equal bits`, `equal to 1e-6`, or the first step that differs.
        is_equal: whether `text` is one of the first two.
        step: first step where a metric differs by more; None if none does.
        points, metrics: number of compared points, and of their metrics.
        weights: `equal`, `differ` or `not known`.
    """

    text: str
    is_equal: bool
    step: int | None
    points: int
    metrics: int
    weights: str


def judge_runs(first: Run, second: Run) -> Reproduction:
    """Compares the points that both runs have.

    Within an epoch, training reports metrics at steps that depend on the speed. So points of only one run are
    ignored. A metric that only one run has is a difference, except for baselines: a run may end before they are
    computed. Finished runs of different lengths differ.
    """
    first_curves = list_curves(first)
    second_curves = list_curves(second)
    comparison = PointComparison()
    for name in sorted({*first_curves, *second_curves}):
        comparison.add_metric(name, first_curves.get(name, {}), second_curves.get(name, {}))
    if first.status == second.status == "FINISHED":
        comparison.add_lengths(find_last_step(first_curves), find_last_step(second_curves))
    weights = compare_weights(first, second)
    step, text = comparison.find_first_difference()
    is_equal = not comparison.differences
    if comparison.differences:
        text = f"differs from step {step} on: {text}"
    elif not comparison.points and weights != "equal":
        text = "not known: the runs have no metrics in common"
        is_equal = False
    else:
        text = EQUAL_BITS if comparison.has_equal_bits and weights != "differ" else EQUAL_VALUES
    metrics = len(first_curves.keys() & second_curves.keys())
    return Reproduction(text, is_equal, step, points=comparison.points, metrics=metrics, weights=weights)


Curve = Mapping[int, float]


@dataclass
class PointComparison:
    """Compares the points of two runs, metric by metric.

    Attributes:
        points: number of compared points.
        has_equal_bits: whether all of them are exactly equal.
        differences: (step, description) of each difference.
    """

    points: int = 0
    has_equal_bits: bool = True
    differences: list[tuple[int, str]] = field(default_factory=list)

    def add_metric(self, name: str, before: Curve, now: Curve) -> None:
        """Compares a metric at the steps that both runs have. A run without the metric has an empty curve."""
        if not before or not now:
            self._add_missing(name, before, now)
            return
        for step in before.keys() & now.keys():
            self.points += 1
            if not is_same_number(before[step], now[step], 0.0):
                self.has_equal_bits = False
            if not is_same_number(before[step], now[step], TOLERANCE):
                self.differences.append((step, f"{name} was {before[step]:.9g} and is {now[step]:.9g}"))

    def _add_missing(self, name: str, before: Curve, now: Curve) -> None:
        if name.startswith(BASELINE):
            return
        run = "first" if before else "second"
        first_step = next(iter(before or now))
        self.differences.append((first_step, f"{name} is only in the {run} run"))

    def add_lengths(self, first: int, second: int) -> None:
        """Compares the last steps of the runs."""
        if first != second:
            text = f"the first run has {first} steps, the second {second}"
            self.differences.append((min(first, second) + 1, text))

    def find_first_difference(self) -> tuple[int | None, str]:
        """Returns step and description of the earliest difference; (None, "") without differences."""
        if not self.differences:
            return None, ""
        return min(self.differences)


def list_curves(run: Run) -> dict[str, Curve]:
    """Returns the points of each metric by step, without metrics that measure the machine."""
    curves: dict[str, Curve] = {}
    for name, points in run.points.items():
        if not name.startswith(MEASURED):
            curves[name] = dict(points)
    return curves


def find_last_step(curves: Mapping[str, Curve]) -> int:
    """Returns the largest step of all metrics; 0 without points."""
    last = 0
    for curve in curves.values():
        last = max(last, max(curve, default=0))
    return last


def compare_weights(first: Run, second: Run) -> str:
    """Returns `equal` or `differ`; `not known` if a run has no digest of its weights."""
    if not first.weights or not second.weights:
        return "not known"
    return "equal" if first.weights == second.weights else "differ"


def is_same_number(before: float, now: float, tolerance: float) -> bool:
    both_nan = math.isnan(before) and math.isnan(now)
    return both_nan or before == now or abs(before - now) <= tolerance * max(1.0, abs(before), abs(now))


def describe_verdict(verdict: Reproduction) -> str:
    """Returns the verdict and its coverage in one line."""
    covers = f"{verdict.points:,} points of {verdict.metrics} metrics compared"
    return f"{verdict.text} ({covers}; weights: {verdict.weights})"
