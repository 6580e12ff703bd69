"""95 % intervals by the bootstrap (Efron 1979): figures of examples that are drawn again with replacement.

Examples that belong together are drawn together: whole groups, or blocks of rows in time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

#: Of more examples, so many are drawn from, and the deviations are scaled by the root of the share (m out of n).
MOST_ROWS = 10_000

#: Draws are made for so many resamples at a time, so that they take little memory.
AT_ONCE = 50

#: The share of intervals that contain the truth.
CONFIDENCE = 0.95

#: With at most so many classes, their sums are a product of matrices.
FEW_CLASSES = 32

#: The blocks of consecutive rows in time. Few long ones: their sums hardly depend on each other (Schmeiser 1982).
BLOCKS = 10

#: Intervals of fewer units than this are rough.
FEWEST_UNITS = 10

Array = np.ndarray[Any, Any]


class Units(NamedTuple):
    """Examples that belong together and are drawn as a whole: the unit of each, from 0, [rows], and what they are."""

    numbers: Array
    kind: str  # `group` or `block`
    origin: str  # such as ` of customer`

    def take(self, rows: Array) -> Units:
        """Returns those of some of the examples."""
        return self._replace(numbers=self.numbers[rows])

    @property
    def effective(self) -> int:
        """How many units of one size say as much."""
        return round(count_effective(np.bincount(self.numbers)))

    def describe(self) -> str:
        """Returns how many they are: `12 groups of customer`; if their sizes differ much, also how few that is."""
        count = len(np.unique(self.numbers))
        unequal = f" (unequal: as {self.effective} of one size)" if self.effective < 0.8 * count else ""
        return f"{count:,} {self.kind}{'' if count == 1 else 's'}{self.origin}{unequal}"


def count_effective(sizes: Array) -> float:
    """Returns how many units of one size say as much as units of these sizes (Kish 1965)."""
    return float(sizes.sum() ** 2 / max(np.square(sizes.astype(np.float64)).sum(), 1e-300))


def number_blocks(times: Array) -> Array:
    """Returns the number of the block of consecutive rows that each row is in; rows of one time stay together."""
    return np.asarray(np.searchsorted(np.sort(times), times) * min(BLOCKS, len(times)) // max(1, len(times)))


def find_percentiles(confidence: float, count: float | None = None) -> tuple[float, float]:
    """Returns the percentiles of the resampled figures that are the ends of an interval.

    With a `count` of units they are expanded for few ones, as Hesterberg (2015, The American Statistician 69) says: the
    usual ones are too narrow by the difference between Student's and the normal distribution, and by
    sqrt((n - 1) / n).
    """
    tail = 50 - 50 * confidence
    if count is not None:
        normal = NormalDist()
        z = normal.inv_cdf((1 + confidence) / 2)
        student = z + (z**3 + z) / (4 * (count - 1))
        tail = 100 * normal.cdf(-student * math.sqrt(count / (count - 1)))
    return tail, 100 - tail


class Figure(NamedTuple):
    """A value, and the ends of its 95 % interval; NaN if there are none."""

    value: float
    low: float = math.nan
    high: float = math.nan


class Resamples:
    """How often each example, or unit of examples, is in each resample.

    Args:
        count: of resamples; 0: there are no intervals.
        weights: of the examples, [rows]; None: 1 each.
        units: what the examples belong to; None: each is drawn by itself.
        confidence: the share of intervals that contain the truth.
        is_expanded: whether the intervals are wider for few examples. Those of units always are.

    Attributes:
        weights: [rows].
        members: the number of the unit of each example, from 0, [rows]; None if each is drawn by itself.
        totals: the weights of the draws, [1 + count].
        draws: [1 + count, m] float32 for m of the examples, times their weights, or for m of the units; first
            as if each was drawn once.
    """

    def __init__(
        self,
        rows: int,
        count: int,
        weights: Array | None = None,
        units: Units | None = None,
        confidence: float = CONFIDENCE,
        is_expanded: bool = False,
    ) -> None:
        random = np.random.default_rng([rows, count])
        self.weights = np.ones(rows) if weights is None else weights.astype(np.float64)
        self.members: Array | None = None
        self._rows = rows
        self._many, self._tail, total = float(rows), (1 - confidence) / 2, rows
        if units is not None and len(np.unique(units.numbers)) < rows:
            self.members = np.unique(units.numbers, return_inverse=True)[1] % MOST_ROWS  # many are drawn in bundles
            self._many, total = count_effective(np.bincount(self.members, self.weights)), int(self.members.max()) + 1
        is_expanded = self._many > 1 and (is_expanded or self.members is not None)
        self._ends = find_percentiles(confidence, self._many if is_expanded else None)
        size = min(total, MOST_ROWS)
        self._chosen = None if size == total else np.sort(random.choice(total, size, replace=False, shuffle=False))
        self._scale = math.sqrt(size / total) if total else 1.0
        self.draws = np.empty((1 + count, size), np.float32)
        self.draws[0] = 1
        for first in range(1, 1 + count, AT_ONCE):
            part = self.draws[first : first + AT_ONCE]
            places = random.integers(size, size=part.shape) + size * np.arange(len(part))[:, None]
            part[:] = np.bincount(places.ravel(), minlength=part.size).reshape(part.shape)
        if weights is not None and self.members is None:
            self.draws *= self.take(weights)
        self.totals = self.draws.sum(axis=1) if self.members is None else self.draw(np.ones(rows))

    def take(self, values: Array) -> Array:
        """Returns the values of the examples that are drawn from, [m, ...] of [rows, ...]."""
        return values if self._chosen is None else values[self._chosen]

    def draw(self, values: Array) -> Array:
        """Returns the weighted sums of values [rows, ...] of the draws, [1 + resamples, ...]."""
        if self.members is not None:
            columns = (values.T * self.weights).reshape(-1, len(values))
            sums = np.stack([np.bincount(self.members, column) for column in columns], axis=1)
            values = sums.reshape(-1, *values.shape[1:])
        return np.asarray(self.draws @ self.take(values).astype(np.float32))

    def list_places(self) -> Iterator[Array]:
        """Yields the places of the examples of each resample, without that of all; for resamples without weights."""
        places = np.arange(int(self._rows)) if self._chosen is None or self.members is not None else self._chosen
        for counts in self.draws[1:].astype(np.int64):
            yield np.repeat(places, counts if self.members is None else counts[self.members])

    def sum_classes(self, classes: Array, count: int, values: Array | None = None, most: int | None = None) -> Array:
        """Sums values [rows], or 1 each, of each class of examples, from 0: [1 + resamples, count], or `most` draws."""
        draws = self.draws[:most]
        if self.members is not None:
            weighted = self.weights if values is None else self.weights * values
            sums = np.bincount(self.members * count + classes, weighted, draws.shape[1] * count)
            return np.asarray(draws @ sums.astype(np.float32).reshape(-1, count))
        taken, amounts = self.take(classes), np.float32(1) if values is None else self.take(values).astype(np.float32)
        if count <= FEW_CLASSES:
            return np.asarray(draws @ ((taken[:, None] == np.arange(count)) * np.reshape(amounts, (-1, 1))))
        return np.stack([np.bincount(taken, row * amounts, count) for row in draws])

    def sum_columns(self, values: Array) -> tuple[Array, Array]:
        """Returns the weighted sums of values [rows, k]: of all examples [k], and of the draws [1 + resamples, k]."""
        return self.weights @ values, self.draw(values)

    def mean(self, values: Array, finish: Any = None, is_error: bool = False) -> Figure:
        """Returns the weighted mean of values [rows] with its interval, or what `finish` makes of both.

        The mean of bool is a rate.
        """
        finish = finish or (lambda mean: mean)
        value = float(finish(np.average(values, weights=self.weights))) if len(values) else math.nan
        return self.figure(value, finish(self.draw(values) / self.totals), values.dtype == bool, is_error=is_error)

    def figure(self, value: float, resampled: Array, is_rate: bool = False, is_error: bool = False) -> Figure:
        """Returns a value with the interval of what the draws give, [1 + resamples]."""
        return self.figures(np.array([value]), resampled[:, None], is_rate, is_error=is_error)[0]

    def figures(self, values: Array, resampled: Array, is_rate: bool = False, is_error: bool = False) -> list[Figure]:
        """Returns values [n] with the intervals of what the draws give, [1 + resamples, n].

        Rates are from 0 to 1, errors from 0 up. Of units, their intervals are those of Student on the scale of the
        logit or the logarithm: the percentiles of few skewed sums are too low.
        """
        if len(resampled) < 2 or (self.members is not None and self._many <= 1):
            return [Figure(float(value)) for value in values]
        deviations, ends = (resampled[1:] - resampled[0]) * self._scale, np.full((2, len(values)), np.nan)
        known = np.isfinite(deviations).any(axis=0)
        deviations, value = deviations[:, known], values[known]
        if self.members is not None and (is_rate or is_error):
            sides = NormalDist().inv_cdf(self._ends[0] / 100) * np.multiply.outer(
                (1, -1), np.nanstd(deviations, axis=0)
            )
            least = self._tail ** (1 / self._many)
            ends[:, known] = bound_rates(value, sides, least) if is_rate else bound_errors(value, sides)
        else:
            center = resampled[0, known] if self._chosen is None else value  # the percentiles themselves
            ends[:, known] = center + np.nanpercentile(deviations, self._ends, axis=0)
        return [Figure(float(v), float(low), float(high)) for v, low, high in zip(values, *ends, strict=True)]


def bound_rates(rates: Array, sides: Array, least: float) -> Array:
    """Returns the ends of intervals of rates, [2, n], that are so far away on the scale of the logit.

    If a rate is 0 or 1 in each unit, no resample has another one: its interval is that of Clopper and Pearson (1934),
    from `least` to 1.
    """
    inner = np.clip(rates, 1e-12, 1 - 1e-12)
    ends = 1 / (1 + np.exp(-np.clip(np.log(inner / (1 - inner)) + sides / (inner * (1 - inner)), -700, 700)))
    ends = np.where(rates >= 1, np.array([[least], [1]]), ends)
    return np.where(rates <= 0, np.array([[0], [1 - least]]), ends)


def bound_errors(errors: Array, sides: Array) -> Array:
    """Returns the ends of intervals of errors, [2, n], that are so far away on the scale of the logarithm."""
    return np.asarray(errors * np.exp(np.clip(sides / np.maximum(errors, 1e-300), -700, 700)))
