"""Computes 95 % intervals of metrics from counts and from the influence of each row. It uses all rows, not a sample.

The influence of a row is how much a metric changes with the weight of the row. The squared influences sum to the
variance of the metric (Hampel 1974). Rows that belong together are summed before squaring. How a variance becomes an
interval depends on the range of the metric:

- Rates, from 0 to 1: the interval of Wilson (1927), with the number of rows that gives this variance (Korn and Graubard
  1998). At low counts the bounds follow Brown, Cai and DasGupta (2001).
- Areas, from 0 to 1: symmetric on the logit scale.
- Errors, from 0 up: symmetric on the logarithmic scale.
- Other numbers: symmetric.
- Means of the rates of classes: from the intervals of the classes (MOVER, Zou and Donner 2008).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from scaleflow.evaluation.resampling import CONFIDENCE, Units, count_effective
from scaleflow.interfaces.estimate import Estimate

#: The bound of a rate's interval is exact if there are at most this many counts on its side.
FEW_COUNTS = 3

#: Number of simulated gaps of calibration bins.
GAP_DRAWS = 2000

Array = np.ndarray[Any, Any]


def find_quantile(confidence: float, freedom: Any = math.inf) -> Any:
    """Returns the half width of an interval in standard errors: the quantile of Student's t distribution.

    It expands the quantile in 1 / freedom (Fisher and Cornish 1960). From 3 degrees of freedom the error is below 1 %.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    by = 1 / np.maximum(freedom, 1.0)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + by * (first + by * (second + by * third))


def bound_rates(rates: Array, counts: Array, quantile: Any, confidence: float = CONFIDENCE) -> tuple[Array, Array]:
    """Returns the bounds of the intervals of rates [...] with `counts` rows each, [...]; NaN without rows."""
    with np.errstate(invalid="ignore", divide="ignore"):
        square = np.square(quantile) / counts
        middle = (rates + square / 2) / (1 + square)
        half = np.sqrt(square * (rates * (1 - rates) + square / 4)) / (1 + square)
    lows = bound_few(rates, middle - half, counts, confidence)
    highs = 1 - bound_few(1 - rates, 1 - middle - half, counts, confidence)
    is_known = (counts > 0) & np.isfinite(rates)
    return np.where(is_known, np.clip(lows, 0, rates), np.nan), np.where(is_known, np.clip(highs, rates, 1), np.nan)


def bound_few(rates: Array, lows: Array, counts: Array, confidence: float) -> Array:
    """Returns the lower bounds. If there are few hits, the bound of a one-sided test replaces a higher one."""
    hits = rates * counts
    is_few = (hits > 0) & (hits <= FEW_COUNTS) & (counts > hits)
    if not np.any(is_few):
        return np.where(hits > 0, lows, 0.0)
    from scipy import special  # takes a tenth of a second

    exact = special.betaincinv(np.where(is_few, hits, 1), np.where(is_few, counts - hits + 1, 1), 1 - confidence)
    return np.where(hits > 0, np.where(is_few, np.minimum(lows, exact), lows), 0.0)


def bound_logits(rates: Array, halves: Any) -> tuple[Array, Array]:
    """Returns the bounds of intervals of rates between 0 and 1; `halves` become half widths on the logit scale."""
    inner = np.clip(rates, 1e-12, 1 - 1e-12)
    middle = np.log(inner / (1 - inner))
    half = halves / (inner * (1 - inner))
    low, high = (1 / (1 + np.exp(-np.clip(end, -700, 700))) for end in (middle - half, middle + half))
    return np.asarray(low), np.asarray(high)


@dataclass(frozen=True)
class Rates:
    """Rates with their intervals and influences. `low` and `high` are NaN if unknown.

    Attributes:
        value, low, high: the rate and interval of each group, [groups]; NaN for a group without entries.
        error: the standard error of each group, [groups]; 0 if all of its entries are equal.
        combine: returns the influence of each unit on a weighted sum of the rates, from the factors of the sum,
            [groups].
    """

    value: Array
    low: Array
    high: Array
    error: Array
    combine: Callable[[Array], Array]

    def estimates(self) -> list[Estimate]:
        """Returns a metric for each group; 0 if its rate is undefined."""
        values = np.nan_to_num(self.value)
        return [Estimate(float(v), float(a), float(b)) for v, a, b in zip(values, self.low, self.high, strict=True)]

    def select(self, is_used: Array) -> Rates:
        """Returns the rates of the chosen groups, [groups] bool."""
        chosen = np.flatnonzero(is_used)

        def combine(factors: Array) -> Array:
            spread = np.zeros(len(is_used))
            spread[chosen] = factors
            return self.combine(spread)

        return Rates(self.value[chosen], self.low[chosen], self.high[chosen], self.error[chosen], combine)

    def transform(self, change: Callable[[Array], Array]) -> Rates:
        """Applies an increasing function from [0, 1] to [0, 1] to the rates and bounds. The errors do not change."""
        return replace(self, value=change(self.value), low=change(self.low), high=change(self.high))


class Intervals:
    """Makes the intervals of metrics of the same rows.

    Args:
        rows: the number of rows.
        weights: the weights of the rows, [rows]; None: 1 each.
        units: the groups of dependent rows; None: all rows are independent.
        confidence: the share of intervals that contain the true value.
        is_wanted: whether to compute intervals; if not, their bounds are NaN.

    Attributes:
        weights: [rows].
        members: the number of the unit of each row, from 0, [rows]; None if each row is its own unit.
        count: the effective number of units of equal weight.
        has_ends: whether metrics have intervals.
    """

    def __init__(
        self,
        rows: int,
        weights: Array | None = None,
        units: Units | None = None,
        confidence: float = CONFIDENCE,
        is_wanted: bool = True,
    ) -> None:
        self.weights = np.ones(rows) if weights is None else weights.astype(np.float64)
        self.members: Array | None = None
        self.confidence = confidence
        sizes: Array = self.weights
        self._units = int(np.count_nonzero(sizes))
        if units is not None:
            present, members = np.unique(units.numbers, return_inverse=True)
            if len(present) < rows:
                self.members = members
                sizes = np.bincount(members, self.weights)
                self._units = int(np.count_nonzero(sizes))
        self.count = count_effective(sizes)
        self.has_ends = is_wanted and self._units > 1

    def sum_units(self, influence: Array, rows: Array | None = None) -> Array:
        """Sums influences of rows [n], or of entries of some rows [entries], over their units."""
        if self.members is None:
            return influence if rows is None else np.bincount(rows, influence, len(self.weights))
        members = self.members if rows is None else self.members[rows]
        return np.bincount(members, influence)

    def find_variance(self, sums: Array) -> float:
        """Returns the variance of a metric, from the influence of each unit."""
        return float(np.square(sums).sum()) * self._units / max(self._units - 1, 1)

    # Metrics with one value ------------------------------------------------------------------

    def mean(
        self, values: Array, finish: Callable[[Any], Any] | None = None, is_error: bool = False, is_rate: bool = False
    ) -> Estimate:
        """Returns the weighted mean of values [rows] with its interval; `finish`, an increasing function, is applied to
        both.

        The mean of bool is a rate.
        """
        return self.ratio(values, np.ones(len(values)), finish, is_error=is_error, is_rate=is_rate)

    def ratio(
        self,
        values: Array,
        amounts: Array,
        finish: Callable[[Any], Any] | None = None,
        is_error: bool = False,
        is_rate: bool = False,
    ) -> Estimate:
        """Returns the quotient of the weighted sums of values and amounts, both [rows], with its interval."""
        finish = finish or (lambda value: value)
        total = float(self.weights @ amounts)
        if not total:
            return Estimate(math.nan)
        value = float(self.weights @ values) / total
        influence = self.weights * (values - value * amounts) / total
        if values.dtype == bool:
            estimate = self.rate(value, influence, most=count_effective(self.weights))
        elif is_rate:
            estimate = self.rate(value, influence)
        elif is_error:
            estimate = self.error(value, influence)
        else:
            estimate = self.number(value, influence)
        value, low, high = estimate
        return Estimate(float(finish(value)), float(finish(low)), float(finish(high)))

    def rate(self, value: float, influence: Array, most: float = math.inf) -> Estimate:
        """Returns a metric from 0 to 1 with its interval.

        Args:
            influence: the influence of each row, [rows].
            most: the maximum number of rows that the variance may correspond to, because rows do not reduce each
                other's variance.
        """
        if not (self.has_ends and math.isfinite(value)):
            return Estimate(value)
        sums = self.sum_units(influence)
        variance = self.find_variance(sums)
        if self.members is None and most < math.inf:
            variance *= max(self._units - 1, 1) / self._units  # Wilson's interval uses the variance of counts
        inner = value * (1 - value)
        count = self.count
        if inner > 1e-15 and variance > 0:
            count = min(inner / variance, most)
        freedom = math.inf  # the variance of counts is known
        if self.members is not None:
            freedom = self._find_freedom(sums, self.count)
        quantile = find_quantile(self.confidence, freedom)
        low, high = bound_rates(np.array(value), np.array(count), quantile, self.confidence)
        if self.members is not None and inner > 1e-15:  # a few large units may dominate
            sides = bound_logits(np.array(value), quantile * np.sqrt(variance))
            low = np.fmin(low, sides[0])
            high = np.fmax(high, sides[1])
        return Estimate(value, float(low), float(high))

    def area(self, value: float, influence: Array, count: float) -> Estimate:
        """Returns an area under a curve, from 0 to 1, with its interval, which is symmetric on the logit scale.

        Args:
            influence: the influence of each row, [rows].
            count: the number of units of the smaller class.
        """
        if not (self.has_ends and math.isfinite(value)):
            return Estimate(value)
        inner = value * (1 - value)
        if inner < 1e-15:
            low, high = bound_rates(np.array(value), np.array(count), self._find_t(count), self.confidence)
            return Estimate(value, float(low), float(high))
        low, high = bound_logits(np.array(value), self._find_half(influence, count))
        return Estimate(value, float(low), float(high))

    def error(self, value: float, influence: Array) -> Estimate:
        """Returns a metric from 0 up with its interval, from the influence of each row, [rows]."""
        if not (self.has_ends and math.isfinite(value)):
            return Estimate(value)
        if value <= 0:
            return Estimate(value, value, value)
        half = self._find_half(influence) / value
        return Estimate(value, value * math.exp(-half), value * math.exp(min(half, 700.0)))

    def number(self, value: float, influence: Array) -> Estimate:
        """Returns a metric of any size with its interval, from the influence of each row, [rows]."""
        if not (self.has_ends and math.isfinite(value)):
            return Estimate(value)
        half = self._find_half(influence)
        return Estimate(value, value - half, value + half)

    def _find_t(self, count: float) -> float:
        return float(find_quantile(self.confidence, max(1.0, count - 1)))

    def _find_half(self, influence: Array, count: float | None = None) -> float:
        """Returns half the width of an interval. It is wider if few rows dominate the metric."""
        sums = self.sum_units(influence)
        freedom = self._find_freedom(sums, self.count if count is None else count)
        return float(find_quantile(self.confidence, freedom)) * math.sqrt(self.find_variance(sums))

    def _find_freedom(self, sums: Array, count: float) -> float:
        """Returns the degrees of freedom of a variance, from the influence of each unit and the effective number of
        units.
        """
        squares = np.square(sums)
        deciding = count_effective(squares) if squares.any() else math.inf
        return max(1.0, min(count - 1, DECIDING_FREEDOM * deciding))

    # Rates of classes ------------------------------------------------------------------------

    def rate_groups(self, groups: Array, count: int, hits: Array, rows: Array | None = None) -> Rates:
        """Returns the share of hits in each group of entries.

        Args:
            groups: the group of each entry, from 0 to count - 1, [entries].
            hits: bool, [entries].
            rows: the row of each entry, [entries]; None: entry n is row n.
        """
        weights = self.weights if rows is None else self.weights[rows]
        totals = np.bincount(groups, weights, count)
        rates = divide(np.bincount(groups, weights * hits, count), totals)
        most = divide(totals**2, np.bincount(groups, weights**2, count))
        influence = weights * (hits - np.nan_to_num(rates)[groups]) / np.where(totals > 0, totals, 1)[groups]

        def combine(factors: Array) -> Array:
            return self.sum_units(influence * factors[groups], rows)

        if self.members is None:
            variances: Array = np.bincount(groups, influence**2, count)
            return self._bound_groups(rates, variances, most, units=most, combine=combine)
        members = self.members if rows is None else self.members[rows]
        pairs, of_entries = np.unique(groups * (int(self.members.max()) + 1) + members, return_inverse=True)
        of_pairs = pairs // (int(self.members.max()) + 1)
        many: Array = np.bincount(of_pairs, minlength=count)
        variances = np.bincount(of_pairs, np.bincount(of_entries, influence) ** 2, count)
        variances = variances * (many / np.maximum(many - 1, 1))
        units = divide(totals**2, np.bincount(of_pairs, np.bincount(of_entries, weights) ** 2, count))
        return self._bound_groups(rates, variances, most, units=units, combine=combine)

    def rate_columns(self, hits: Array, amounts: Array) -> Rates:
        """Returns the quotients of the sums of hits and amounts, both [rows, groups], with 0 <= hits <= amounts.

        With bool they are shares of rows.
        """
        count = hits.shape[1]
        totals = self.weights @ amounts
        rates = divide(self.weights @ hits, totals)
        variances, most, units = np.zeros((3, count))
        for n in np.flatnonzero(totals):
            of_group = self.weights * amounts[:, n]
            influence = self.weights * (hits[:, n] - rates[n] * amounts[:, n]) / totals[n]
            variances[n] = np.square(self.sum_units(influence)).sum()
            most[n] = count_effective(of_group) if hits.dtype == bool else math.inf
            units[n] = count_effective(self.sum_units(of_group))
        if self.members is not None or hits.dtype != bool:
            variances *= self._units / max(self._units - 1, 1)

        def combine(factors: Array) -> Array:
            scale = np.nan_to_num(divide(factors, totals))
            return self.sum_units(self.weights * (hits @ scale - amounts @ (scale * np.nan_to_num(rates))))

        return self._bound_groups(rates, variances, most, units=units, combine=combine)

    def _bound_groups(
        self, rates: Array, variances: Array, most: Array, units: Array, combine: Callable[[Array], Array]
    ) -> Rates:
        """Returns rates with their intervals, [groups].

        Args:
            most: the maximum number of rows that a variance may correspond to.
            units: the effective number of units in each group. It is the only source of width for a rate of 0 or 1.
        """
        inner = rates * (1 - rates)
        is_inner = (inner > 1e-15) & (variances > 0)
        counts = np.where(is_inner, np.fmin(divide(inner, variances), most), units)
        freedom = math.inf if self.members is None else np.maximum(units - 1, 1)
        quantile = find_quantile(self.confidence, freedom)
        lows, highs = bound_rates(rates, counts, quantile, self.confidence)
        if self.members is not None:  # a few large units may dominate
            sides = bound_logits(rates, quantile * np.sqrt(variances))
            lows = np.where(is_inner, np.fmin(lows, sides[0]), lows)
            highs = np.where(is_inner, np.fmax(highs, sides[1]), highs)
        if not self.has_ends:
            lows, highs = np.full((2, len(rates)), np.nan)
        return Rates(rates, lows, highs, np.where(is_inner, np.sqrt(variances), 0.0), combine)

    def average(self, rates: Rates, of_all: bool = False) -> Estimate:
        """Returns the mean rate of the groups that have one; with `of_all`, of all groups, and missing rates count as
        0.
        """
        is_known = np.isfinite(rates.value)
        known = len(is_known) if of_all else int(is_known.sum())
        if not known:
            return Estimate(math.nan)
        value = float(rates.value[is_known].sum()) / known
        if not self.has_ends:
            return Estimate(value)

        def add_distances(distances: Array) -> float:
            """Combines the distances of the bounds of all groups. The groups' influences depend on each other."""
            factors = np.where(rates.error > 0, divide(distances, rates.error), 0.0)
            together = np.square(rates.combine(factors)).sum()
            alone = np.square(distances[rates.error <= 0]).sum()
            return math.sqrt(float(together + alone)) / known

        low = value - add_distances(np.nan_to_num(rates.value - rates.low))
        high = value + add_distances(np.nan_to_num(rates.high - rates.value))
        return Estimate(value, max(0.0, low), min(1.0, high))


#: Degrees of freedom of the variance of a mean, per row that dominates it.
DECIDING_FREEDOM = 1.5


def divide(values: Array, by: Array) -> Array:
    """Returns quotients; NaN if the divisor is not above 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(by > 0, values / by, np.nan))


# Calibration ---------------------------------------------------------------------------------


def bound_calibration_error(intervals: Intervals, bins: Array, count: int, gaps: Array) -> Estimate:
    """Returns the mean distance of confidence and accuracy over bins, with its interval.

    Chance increases the error, because a distance is never below 0. So the interval contains the true errors under
    which the measured error is not unusual. Their distances are proportional to the measured ones, and chance is
    simulated.

    Args:
        bins: the bin of each row, from 0 to count - 1, [rows].
        gaps: the confidence minus whether the prediction is right, [rows].
    """
    weights = intervals.weights
    total = float(weights.sum())
    if not total:
        return Estimate(math.nan)
    means = np.bincount(bins, weights * gaps, count) / total
    value = float(np.abs(means).sum())
    if not intervals.has_ends:
        return Estimate(value)
    if intervals.members is None:
        amounts, moments, squares = (np.bincount(bins, weights**2 * gaps**power, count) for power in (0, 1, 2))
        crossed = np.outer(means, moments)
        variance = np.diag(squares) - crossed - crossed.T + np.outer(means, means) * amounts.sum()
    else:
        units = int(intervals.members.max()) + 1
        cells = intervals.members * count + bins
        sums = np.bincount(cells, weights * gaps, units * count).reshape(units, count)
        sums = sums - np.outer(np.bincount(intervals.members, weights, units), means)
        variance = sums.T @ sums * units / max(units - 1, 1)
        amounts = np.square(np.bincount(cells, weights, units * count)).reshape(units, count).sum(axis=0)
    # If few rows of a bin are wrong, or few are right, its variance is uncertain: two counts are added.
    rows = np.maximum(np.bincount(bins, minlength=count), 1)
    variance[np.diag_indices(count)] += np.minimum(2.0, rows / 4) * amounts / rows
    scales, axes = np.linalg.eigh(variance / total**2)
    normal = np.random.default_rng([len(bins), count]).normal(size=(GAP_DRAWS, count))
    chance = (normal * np.sqrt(np.maximum(scales, 0))) @ axes.T
    tail = 50 - 50 * intervals.confidence

    def find_factor(percentile: float) -> float:
        """Returns the factor of the gaps for which the measured error is a percentile of the simulated errors."""

        def is_above(factor: float) -> bool:
            return bool(np.percentile(np.abs(factor * means + chance).sum(axis=1), percentile) > value)

        low = 0.0
        high = 1.0
        if is_above(0.0):
            return 0.0
        while not is_above(high) and high < 1e6:
            low = high
            high = 2 * high
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (low, middle) if is_above(middle) else (middle, high)
        return high

    if not value:
        return Estimate(value, 0.0, min(1.0, float(np.percentile(np.abs(chance).sum(axis=1), 100 - tail))))
    low, high = (min(1.0, value * find_factor(percentile)) for percentile in (100 - tail, tail))
    return Estimate(value, min(low, value), max(high, value))


# Areas under the ROC curve of tied scores and of rare classes ----------------------------------


def find_tied_distances(intervals: Intervals, shares: Array, values: Array, count: float) -> tuple[float, float]:
    """Returns the distances of an interval's bounds from the mean of placements, if nearly all rows have the same
    placement.

    Then the variance of the placements tells nothing. The mean is a sum of rates: each is the rate of placements from
    some value on. The bounds come from the bounds of these rates.

    Args:
        shares: the share of rows with each placement, [n].
        values: the placements, ascending, [n].
        count: the effective number of rows.

    Returns:
        The distances of the lower and of the upper bound; 0 if enough rows have another placement.
    """
    most = float(shares.max())
    if most * count < 2 or (1 - most) * count > FEW_COUNTS or not intervals.has_ends:
        return 0.0, 0.0
    rates, places = np.unique(1 - np.cumsum(shares)[:-1], return_inverse=True)
    rates = np.clip(rates, 0, 1)
    freedom = math.inf if intervals.members is None else max(1.0, count - 1)
    quantile = find_quantile(intervals.confidence, freedom)
    lows, highs = bound_rates(rates, np.full(len(rates), count), quantile, intervals.confidence)
    steps = np.diff(values)
    return float(steps @ (rates - lows)[places]), float(steps @ (highs - rates)[places])


#: For the area under the ROC curve, a class is rare with at most this many rows and this share of the other class.
MAX_RARE = 300
RARE_SHARE = 0.2

#: Rounds to fit a normal distribution to censored values.
FITTING_ROUNDS = 60


def find_low_area(intervals: Intervals, placements: Array, others: float, is_rare: Array) -> float:
    """Returns a lower bound for the area under the ROC curve of a rare class, from a model of its scores.

    A few rows of the class tell little about the hard ones: the influences of the others are nearly 0, so an area near
    1 seems too certain. On the probit scale, placements of normal scores are normal (Metz 1986). Rows that rank above
    all of the other class are censored.

    Args:
        placements: the share of the other class that each row is ranked correctly against, [rows].
        others: the number of rows of the other class.
        is_rare: whether a row belongs to the rare class, [rows] bool.
    """
    from scipy import special  # takes a tenth of a second

    weights = intervals.weights[is_rare]
    total = weights.sum()
    least = 0.5 / others
    values = special.ndtri(np.clip(placements[is_rare], least, 1 - least))
    most = float(special.ndtri(1 - least))
    is_censored = values >= most - 1e-12
    censored = float(weights @ is_censored) / total
    expected = values
    variance_left = np.zeros(len(values))
    mean = float(weights @ values) / total
    deviation = max(0.3, math.sqrt(float(weights @ (values - mean) ** 2) / total))
    for _ in range(FITTING_ROUNDS if 0 < censored < 1 else 1):  # expectation and maximization
        beyond = (most - mean) / deviation
        # The ratio of the density at `beyond` to the probability above it.
        ratio = math.sqrt(2 / math.pi) / float(special.erfcx(beyond / math.sqrt(2)))
        expected = np.where(is_censored, mean + deviation * ratio, values) if censored < 1 else values
        variance_left = np.where(is_censored, deviation**2 * max(0.0, 1 + beyond * ratio - ratio**2), 0.0)
        mean = float(weights @ expected) / total
        deviation = math.sqrt(max(1e-6, float(weights @ ((expected - mean) ** 2 + variance_left)) / total))
    influence = np.zeros(len(is_rare))
    influence[is_rare] = weights * (expected - mean) / total
    units = intervals.sum_units(np.where(is_rare, intervals.weights, 0.0))
    count = count_effective(units)
    squares = float(np.square(intervals.sum_units(influence)).sum())
    if squares > 0:
        count = min(count, float(weights @ (expected - mean) ** 2) / total / squares)
    count = max(2.0, count * (1 - censored / 2))  # a censored row counts about half
    variance = deviation**2 * count / (count - 1)
    middle = mean / math.sqrt(1 + variance)
    slopes = 1 / math.sqrt(1 + variance), mean * math.sqrt(variance) / (1 + variance) ** 1.5
    error = math.sqrt(slopes[0] ** 2 * variance / count + slopes[1] ** 2 * variance / (2 * (count - 1)))
    return NormalDist().cdf(middle - float(find_quantile(intervals.confidence, count - 1)) * error)
