"""Models of one column: how much of the target does a column tell alone?"""

from typing import Any

import numpy as np

from scaleflow.evaluation.slices import decode_text

#: The most ranges, or values, that a column is divided into; fewer for fewer examples, of which each has about 16.
MOST_BINS, IN_A_BIN = 128, 16

#: The least examples of which a column can be judged.
FEWEST_ROWS = 40

Array = np.ndarray[Any, Any]


def score_column(values: Array, target: Array, is_class: bool, weights: Array | None = None) -> tuple[float, float]:
    """Returns how well a column predicts a target, and how well a constant does: accuracies, or mean absolute errors.

    The most frequent class, or the mean, of each range or value of the column is learned from one half of the examples
    and tried on the other, and the reverse. NaN if there are too few examples.

    Args:
        values: of the column, [n]: numbers, or texts.
        target: classes from 0, or values, [n].
        weights: of the examples, [n]; None: 1 each.
    """
    if len(values) < FEWEST_ROWS:
        return float("nan"), float("nan")
    bins, weights = bin_column(values), np.ones(len(values)) if weights is None else weights
    is_first = np.random.default_rng(len(values)).permutation(len(values)) % 2 == 0
    scores, constants = np.zeros(len(values)), np.zeros(len(values))
    for is_learned in (is_first, ~is_first):
        tried = ~is_learned
        for scored, groups in ((scores, bins), (constants, np.zeros(len(values), np.int64))):
            known = groups[is_learned], target[is_learned], is_class, weights[is_learned]
            answers = answer_bins(*known)[groups[tried]]
            scored[tried] = answers == target[tried] if is_class else np.abs(answers - target[tried])
    return float(np.average(scores, weights=weights)), float(np.average(constants, weights=weights))


def bin_column(values: Array) -> Array:
    """Returns the range or value of each example, [n] int64 from 0; a missing number has one of its own."""
    most = max(8, min(MOST_BINS, len(values) // IN_A_BIN))
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
    """Returns the answer for each range or value, [MOST_BINS + 2]; that of all examples for one without examples."""
    count = MOST_BINS + 2
    if not is_class:
        totals, sums = np.bincount(bins, weights, count), np.bincount(bins, target * weights, count)
        return np.where(totals > 0, sums / np.where(totals > 0, totals, 1), np.average(target, weights=weights))
    classes = int(target.max()) + 1
    counts = np.bincount(bins * classes + target, weights, count * classes).reshape(count, classes)
    whole = int(np.bincount(target, weights).argmax())
    return np.where(counts.sum(axis=1) > 0, counts.argmax(axis=1), whole)
