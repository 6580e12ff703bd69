"""Compares the metrics of two runs, and says whether a difference is more than noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scaleflow.comparison.loading import ComparedRun
from scaleflow.runs.state import BASELINE

if TYPE_CHECKING:
    from scaleflow.comparison.examples import PairedPredictions

#: Splits by the beginning of the names of their metrics.
SPLITS = {"test": "test", "val": "validation", "all": "all"}

NOT_KNOWN = "not known"


@dataclass(frozen=True)
class MetricDifference:
    """A metric of two runs.

    Attributes:
        before, now: the last values; None if a run does not have it.
        low, high: bounds of the difference (now - before), at 95 %; None if they are not known.
        basis: what the bounds come from, or why they are not known.
    """

    name: str
    before: float | None
    now: float | None
    low: float | None = None
    high: float | None = None
    basis: str = NOT_KNOWN

    @property
    def difference(self) -> float | None:
        """The second value minus the first."""
        return None if self.before is None or self.now is None else self.now - self.before

    @property
    def is_real(self) -> bool | None:
        """Whether the difference is more than noise; None if that is not known."""
        if self.difference == 0:
            return False
        return None if self.low is None or self.high is None else not self.low <= 0 <= self.high


def compare_metrics(first: ComparedRun, second: ComparedRun, has_same_data: bool = False) -> list[MetricDifference]:
    """Returns the metrics that one of the runs has, those of the test first.

    With the same data, the examples of both have the same numbers, also if the models read other columns.
    """
    from scaleflow.comparison.examples import PairedPredictions  # imports numpy and pyarrow

    before, now = first.metrics, second.metrics
    names = [name for name in dict.fromkeys((*before, *now)) if not name.startswith((BASELINE, "system/"))]
    order = ("test/", "val/", "train/")
    names.sort(key=lambda name: next((n for n, start in enumerate(order) if name.startswith(start)), len(order)))
    pairs = PairedPredictions(first, second, has_same_data)
    found = []
    for name in names:
        each = MetricDifference(name, before.get(name), now.get(name))
        if each.difference:
            repeats = measure_repeats(first, second, name)
            low, high, basis = repeats or measure_examples(pairs, name, (before[name], now[name]))
            each = replace(each, low=low, high=high, basis=basis)
        found.append(each if each.difference != 0 else replace(each, basis="equal"))
    return found


def measure_examples(
    pairs: PairedPredictions, name: str, values: tuple[float, float]
) -> tuple[float | None, float | None, str]:
    """Returns the bounds of a difference by a paired bootstrap, and what they are based on, or why there are none."""
    from scaleflow.comparison.examples import compare_examples

    split, _, metric = name.partition("/")
    if split not in SPLITS or pairs.reason:
        return None, None, f"{NOT_KNOWN}: {pairs.reason}" if split in SPLITS else NOT_KNOWN
    if SPLITS[split] != pairs.split:
        return None, None, f"{NOT_KNOWN}: the runs kept predictions for {pairs.split}"
    parts = pairs.find(metric, values)
    if parts is None:
        return None, None, f"{NOT_KNOWN}: kept predictions do not give this metric"
    low, high = compare_examples(*parts, pairs.units)
    over = f" in {pairs.units.describe()}" if pairs.units else ""
    if math.isnan(low):
        return None, None, f"{NOT_KNOWN}: all examples are{over}"
    return low, high, f"{pairs.count:,} {pairs.split} examples{over}, resampled".replace(" all ", " ")


def measure_repeats(first: ComparedRun, second: ComparedRun, name: str) -> tuple[float, float, str] | None:
    """Returns the bounds of the difference of means over the repeats of both configs, and what they are based on.

    The deviation is pooled over both groups, so one of them may have a single run. None if there are no repeats, or if
    they all have the same value: those with one seed repeat the same numbers.
    """
    groups = [
        [values[name] for values in run.repeats if name in values] or [run.metrics[name]] for run in (first, second)
    ]
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum(sum((value - mean(group)) ** 2 for value in group) for group in groups)
    if freedom < 1 or not 0 < squares < math.inf:
        return None
    from scipy import stats

    difference = mean(groups[1]) - mean(groups[0])
    spread = float(stats.t.ppf(0.975, freedom)) * math.sqrt(squares / freedom * sum(1 / len(group) for group in groups))
    counts = " and ".join(str(len(group)) for group in groups)
    return (
        difference - spread,
        difference + spread,
        f"{counts} repeats, means {mean(groups[0]):.4g} and {mean(groups[1]):.4g}",
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
