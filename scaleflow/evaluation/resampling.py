"""Rows that belong together, and the bootstrap (Efron 1979) of all rows for metrics that are a function of the user's.

Rows that belong together are drawn together: whole groups, or blocks of rows in time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

#: The share of intervals that contain the truth.
CONFIDENCE = 0.95

#: The blocks of consecutive rows in time. Few long ones: their sums hardly depend on each other (Schmeiser 1982).
BLOCKS = 10

#: Intervals of fewer units than this are rough.
MIN_UNITS = 10

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


class Resamples:
    """Draws all rows again, or leaves a part of them out.

    Args:
        rows: their number.
        units: what the rows belong to; None: each is drawn by itself.

    Attributes:
        count: of the units.
    """

    def __init__(self, rows: int, units: Units | None = None) -> None:
        self._random = np.random.default_rng(rows)
        self._members = np.arange(rows)
        if units is not None:
            self._members = np.unique(units.numbers, return_inverse=True)[1]
        self.count = int(self._members.max()) + 1 if rows else 0

    def draw(self, count: int) -> Iterator[Array]:
        """Yields the places of the rows of each resample, in their order; a unit that is drawn twice is there twice."""
        places = np.arange(len(self._members))
        for _ in range(count):
            counts = np.bincount(self._random.integers(self.count, size=self.count), minlength=self.count)
            yield np.repeat(places, counts[self._members])

    def leave_out(self, parts: int) -> Iterator[Array]:
        """Yields the places of the rows without each of so many parts of the units."""
        part = self._random.permutation(self.count) % parts
        for n in range(parts):
            yield np.flatnonzero(part[self._members] != n)
