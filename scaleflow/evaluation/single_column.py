"""Measures how well a single column predicts the target."""

from __future__ import annotations

from typing import Any

import numpy as np

from scaleflow.serving.cells import decode_text

#: Maximum number of ranges, or values, of a column.
MAX_BINS = 128

#: Approximate minimum number of examples per range. With few examples there are fewer ranges, but at least MIN_BINS.
EXAMPLES_IN_BIN = 16

MIN_BINS = 8

#: Minimum number of examples to judge a column.
MIN_ROWS = 40

Array = np.ndarray[Any, Any]


def score_column(values: Array, target: Array, is_class: bool, weights: Array | None = None) -> tuple[float, float]:
    """Returns how well a column and how well a constant predict a target: accuracies, or mean absolute errors.

    For each range or value of the column, one half of the examples gives the most frequent class or the mean, and the
    other half tests it; then the reverse. NaN if there are too few examples.

    Args:
        values: the column, [n]: numbers or texts.
        target: classes from 0, or values, [n].
        weights: the weights of the examples, [n]; None: 1 each.
    """
    count = len(values)
    if count < MIN_ROWS:
        return float("nan"), float("nan")
    if weights is None:
        weights = np.ones(count)
    half = np.random.default_rng(count).permutation(count) % 2 == 0
    bins = bin_column(values)
    one_bin = np.zeros(count, np.int64)
    column_score = score_bins(bins, target, is_class, weights, half)
    constant_score = score_bins(one_bin, target, is_class, weights, half)
    return column_score, constant_score


def score_bins(bins: Array, target: Array, is_class: bool, weights: Array, half: Array) -> float:
    """Returns the accuracy, or the mean absolute error, of answers that each half learns from the other half.

    Args:
        bins: the range or value of each example, [n].
        half: whether an example belongs to the first half, [n] bool.
    """
    scores = np.zeros(len(bins))
    for is_learned in (half, ~half):
        is_tried = ~is_learned
        answers = answer_bins(bins[is_learned], target[is_learned], is_class, weights[is_learned])
        answer = answers[bins[is_tried]]
        if is_class:
            scores[is_tried] = answer == target[is_tried]
        else:
            scores[is_tried] = np.abs(answer - target[is_tried])
    return float(np.average(scores, weights=weights))


def bin_column(values: Array) -> Array:
    """Returns the range or value of each example, [n] int64 from 0. Missing numbers form their own range."""
    most = max(MIN_BINS, min(MAX_BINS, len(values) // EXAMPLES_IN_BIN))
    if values.dtype.kind in "OSU":
        texts = np.array([decode_text(value) for value in values])
        _, places, counts = np.unique(texts, return_inverse=True, return_counts=True)
        ranks = np.argsort(np.argsort(-counts, kind="stable"), kind="stable")
        return np.minimum(ranks[places], most)
    numbers = values.astype(np.float64)
    known = numbers[np.isfinite(numbers)]
    distinct = np.unique(known)
    if len(distinct) > most:
        distinct = np.unique(np.quantile(known, np.linspace(0, 1, most + 1)[1:-1]))
    bins = np.searchsorted(distinct, numbers, side="right")
    return np.where(np.isfinite(numbers), bins, len(distinct) + 1)


def answer_bins(bins: Array, target: Array, is_class: bool, weights: Array) -> Array:
    """Returns the answer for each range or value, [MAX_BINS + 2]. If it has no examples, all examples decide."""
    count = MAX_BINS + 2
    if is_class:
        classes = int(target.max()) + 1
        totals = np.bincount(bins * classes + target, weights, count * classes).reshape(count, classes)
        most_frequent = int(np.bincount(target, weights).argmax())
        return np.where(totals.sum(axis=1) > 0, totals.argmax(axis=1), most_frequent)
    totals = np.bincount(bins, weights, count)
    sums = np.bincount(bins, target * weights, count)
    means = sums / np.where(totals > 0, totals, 1)
    return np.where(totals > 0, means, np.average(target, weights=weights))
