"""The mean and the deviation of numbers, and whether float32 can hold them. No TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np

from scaleflow.interfaces.data import MOST_ROUNDING, ROUNDING

Array = np.ndarray[Any, Any]

#: The range of numbers in deviations: about that of a normal distribution without its tails.
RANGE = 4.0


def find_mean_and_deviation(numbers: Array) -> tuple[float, float]:
    """Returns the mean and the deviation of numbers [n]; 0 for equal ones, which rounding would give a deviation."""
    if numbers.min() == numbers.max():
        return float(numbers[0]), 0.0
    largest = np.abs(numbers).max()  # squares of very large and very small numbers have no float64
    shares = numbers / largest
    return float(shares.mean() * largest), float(shares.std() * largest)


def is_wide(numbers: Array) -> bool:
    """Returns whether rounding to float32 changes numbers of a column by much of its range, [..., columns] or [n]."""
    axes = tuple(range(max(1, numbers.ndim - 1)))
    low, high = np.fmin.reduce(numbers, axis=axes), np.fmax.reduce(numbers, axis=axes)
    largest = np.maximum(np.abs(low), np.abs(high))
    return bool(np.any((high > low) & (largest * ROUNDING > MOST_ROUNDING * (high - low) / RANGE)))
