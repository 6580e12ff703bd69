"""95 % intervals by the bootstrap (Efron 1979): figures of examples that are drawn again with replacement."""

import math
from typing import Any, NamedTuple

import numpy as np

#: Of more examples, so many are drawn from, and the deviations are scaled by the root of the share (m out of n).
MOST_ROWS = 10_000

#: Draws are made for so many resamples at a time, so that they take little memory.
AT_ONCE = 50

#: The percentiles of the resampled figures that are the ends of an interval.
ENDS = (2.5, 97.5)

#: With at most so many groups, their sums are a product of matrices.
FEW_GROUPS = 32

Array = np.ndarray[Any, Any]


class Figure(NamedTuple):
    """A value, and the ends of its 95 % interval; NaN if there are none."""

    value: float
    low: float = math.nan
    high: float = math.nan


class Resamples:
    """How often each example is in each resample, times its weight.

    Args:
        count: of resamples; 0: there are no intervals.
        weights: of the examples, [rows]; None: 1 each.
        ends: the percentiles that are the ends of an interval.

    Attributes:
        weights: [rows].
        draws: [1 + count, m] float32 for m of the examples; the first row has their weights, as if each was drawn once.
    """

    def __init__(self, rows: int, count: int, weights: Array | None = None, ends: tuple[float, float] = ENDS) -> None:
        self._ends = ends
        random = np.random.default_rng([rows, count])
        size = min(rows, MOST_ROWS)
        self.weights = np.ones(rows) if weights is None else weights.astype(np.float64)
        self._chosen = None if size == rows else np.sort(random.choice(rows, size, replace=False, shuffle=False))
        self._scale = math.sqrt(size / rows) if rows else 1.0
        self.draws = np.empty((1 + count, size), np.float32)
        self.draws[0] = 1
        for first in range(1, 1 + count, AT_ONCE):
            part = self.draws[first : first + AT_ONCE]
            places = random.integers(size, size=part.shape) + size * np.arange(len(part))[:, None]
            part[:] = np.bincount(places.ravel(), minlength=part.size).reshape(part.shape)
        if weights is not None:
            self.draws *= self.take(weights)

    def take(self, values: Array) -> Array:
        """Returns the values of the examples that are drawn from, [m, ...] of [rows, ...]."""
        return values if self._chosen is None else values[self._chosen]

    def sum_groups(self, groups: Array, count: int) -> Array:
        """Sums the draws of each group of examples, [1 + resamples, count], from their groups [rows]."""
        taken = self.take(groups)
        if count <= FEW_GROUPS:
            return np.asarray(self.draws @ (taken[:, None] == np.arange(count)).astype(np.float32))
        return np.stack([np.bincount(taken, row, count) for row in self.draws])

    def sum_columns(self, values: Array) -> tuple[Array, Array]:
        """Returns the weighted sums of values [rows, k]: of all examples [k], and of the draws [1 + resamples, k]."""
        return self.weights @ values, self.draws @ self.take(values).astype(np.float32)

    def mean(self, values: Array, finish: Any = None) -> Figure:
        """Returns the weighted mean of values [rows] with its interval, or what `finish` makes of both."""
        finish = finish or (lambda mean: mean)
        value = float(finish(np.average(values, weights=self.weights))) if len(values) else math.nan
        return self.figure(value, finish(self.draws @ self.take(values).astype(np.float32) / self.draws.sum(axis=1)))

    def figure(self, value: float, resampled: Array) -> Figure:
        """Returns a value with the interval of what the draws give, [1 + resamples]."""
        return self.figures(np.array([value]), resampled[:, None])[0]

    def figures(self, values: Array, resampled: Array) -> list[Figure]:
        """Returns values [n] with the intervals of what the draws give, [1 + resamples, n]."""
        if len(resampled) < 2:
            return [Figure(float(value)) for value in values]
        deviations = (resampled[1:] - resampled[0]) * self._scale
        with np.errstate(invalid="ignore"):
            ends = np.full((2, len(values)), np.nan)
            is_known = np.isfinite(deviations).any(axis=0)
            ends[:, is_known] = np.nanpercentile(deviations[:, is_known], self._ends, axis=0)
        if self._chosen is None:  # the percentiles themselves
            ends += resampled[0]
        else:
            ends += values
        return [Figure(float(v), float(low), float(high)) for v, low, high in zip(values, *ends, strict=True)]


def interval_of_mean(values: Array, weights: Array, count: int) -> Figure:
    """Returns the weighted mean of some examples with the interval of resamples of these alone."""
    return Resamples(len(values), count, None if (weights == 1).all() else weights).mean(values)
