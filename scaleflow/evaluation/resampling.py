"""Groups dependent rows into units, and resamples rows (the bootstrap, Efron 1979) for the user's own metrics.

Dependent rows are drawn together: whole groups, or blocks of rows in time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

#: The share of intervals that contain the true value.
CONFIDENCE = 0.95

#: Number of blocks of consecutive rows in time. They are few and long, so their sums are nearly independent (Schmeiser
#: 1982).
BLOCKS = 10

#: With fewer units than this, intervals are rough.
MIN_UNITS = 10

Array = np.ndarray[Any, Any]


class Units(NamedTuple):
    """Units of examples that are drawn as a whole. `numbers` has the unit of each example, from 0, [rows]."""

    numbers: Array
    kind: str  # `group` or `block`
    origin: str  # such as ` of customer`

    def take(self, rows: Array) -> Units:
        """Returns the units of some of the examples."""
        return self._replace(numbers=self.numbers[rows])

    @property
    def effective(self) -> int:
        """The effective number of units of equal size."""
        return round(count_effective(np.bincount(self.numbers)))

    def describe(self) -> str:
        """Describes the number of units, such as `12 groups of customer`; adds the effective number if sizes differ
        much.
        """
        count = len(np.unique(self.numbers))
        unequal = f" (unequal: as {self.effective} of one size)" if self.effective < 0.8 * count else ""
        return f"{count:,} {self.kind}{'' if count == 1 else 's'}{self.origin}{unequal}"


def count_effective(sizes: Array) -> float:
    """Returns the number of equal units that give as much information as units of these sizes (Kish 1965)."""
    return float(sizes.sum() ** 2 / max(np.square(sizes.astype(np.float64)).sum(), 1e-300))


def number_blocks(times: Array) -> Array:
    """Returns the number of the block of consecutive rows that contains each row. Rows of the same
    time stay together.
    """
    return np.asarray(np.searchsorted(np.sort(times), times) * min(BLOCKS, len(times)) // max(1, len(times)))


def find_percentiles(confidence: float, count: float | None = None) -> tuple[float, float]:
    """Returns the percentiles of the resampled metrics that bound an interval.

    With a `count` of units they are corrected for small counts, following Hesterberg (2015, The American Statistician
    69): uncorrected intervals are too narrow by the difference between Student's t and the normal distribution, and by
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
    """Resamples all rows, or leaves out parts of them.

    Args:
        rows: the number of rows.
        units: the units of the rows; None: each row is its own unit.

    Attributes:
        unit_count: the number of units.
    """

    def __init__(self, rows: int, units: Units | None = None) -> None:
        self._random = np.random.default_rng(rows)
        self._members = np.arange(rows)
        if units is not None:
            self._members = np.unique(units.numbers, return_inverse=True)[1]
        self.unit_count = int(self._members.max()) + 1 if rows else 0

    def draw(self, count: int) -> Iterator[Array]:
        """Yields the places of the rows of each resample, in order. A unit that is drawn twice occurs twice."""
        places = np.arange(len(self._members))
        for _ in range(count):
            counts = np.bincount(
                self._random.integers(self.unit_count, size=self.unit_count), minlength=self.unit_count
            )
            yield np.repeat(places, counts[self._members])

    def leave_out(self, parts: int) -> Iterator[Array]:
        """Divides the units into `parts` parts, and yields the places of the rows without each part."""
        part = self._random.permutation(self.unit_count) % parts
        for n in range(parts):
            yield np.flatnonzero(part[self._members] != n)
