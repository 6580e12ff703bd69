"""Slices on which a model is weak, and how well a single column tells the target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from scaleflow.interfaces.formatting import format_number
from scaleflow.serving.cells import decode_text

if TYPE_CHECKING:
    from scaleflow.evaluation.outputs import OutputAnalysis
    from scaleflow.evaluation.predictions import Predictions

#: The fewest examples of a slice. TensorFlow Model Analysis has such a limit, too.
FEWEST_EXAMPLES = 30

#: The most values of a column that are slices themselves; a column with more is divided by quantiles, or by length.
MOST_NUMBERS, MOST_WORDS = 10, 50

QUANTILES = (0.2, 0.4, 0.6, 0.8)

#: A slice is weak if it is worse than all examples by so much, and by so large a share (as skore's checks).
GAP, SHARE = 0.03, 0.10

#: The probability that any slice of a model without weak ones counts as weak.
ERROR = 0.05

#: The most slices with an interval: the worst ones.
MOST_INTERVALS = 100

Array = np.ndarray[Any, Any]
Row = dict[str, Any]


def find_slices(
    predictions: Predictions, analysis: OutputAnalysis, columns: Mapping[str, Array], read: Array, count: int
) -> list[Row]:
    """Returns the slices of an output with enough examples, the weakest first.

    Args:
        columns: what divides the examples, by name: texts or numbers, [m].
        read: the rows of the table of predictions that the columns are of, ascending, [m].
        count: `evaluation.intervals`; 0: slices have no intervals.

    Returns:
        Rows with `output`, `column`, `slice`, `examples`, `share`, `metric`, `value`, `low`, `high`, `difference` from
        all examples and `is_weak`.
    """
    scores, weights, units = analysis.scores, predictions.weights(), predictions.units
    own = np.ones(len(scores)) if weights is None else weights[analysis.rows].astype(np.float64)
    if not own.sum():
        return []
    overall = float(np.average(scores, weights=own))
    deviation = math.sqrt(float(np.average((scores - overall) ** 2, weights=own)))
    _, of_analysis, of_columns = np.intersect1d(analysis.rows, read, assume_unique=True, return_indices=True)
    divided = [(name, values, np.arange(len(scores))) for name, values in analysis.groups.items()]
    divided += [(name, values[of_columns], of_analysis) for name, values in columns.items()]
    found: list[tuple[float, Row, Array]] = []
    for column, values, rows in divided:
        for label, is_inside in divide_values(values):
            places = rows[is_inside]
            if FEWEST_EXAMPLES <= len(places) < len(scores) and own[places].sum():
                value = float(np.average(scores[places], weights=own[places]))
                worse = value - overall if analysis.is_error else overall - value
                row = {"output": analysis.name, "column": column, "slice": label, "examples": len(places)}
                row |= {"share": len(places) / len(rows), "metric": analysis.measure, "value": value}
                found.append((worse, {**row, "low": math.nan, "high": math.nan, "difference": value - overall}, places))
    found.sort(key=lambda each: -each[0])
    limit = NormalDist().inv_cdf(1 - ERROR / 2 / max(1, len(found)))
    for n, (worse, row, places) in enumerate(found):
        is_large = worse >= max(0.0 if analysis.is_error else GAP, SHARE * abs(overall))
        error = deviation / math.sqrt(len(places))
        if units is not None:  # of the mean of the slice, if its units are like all others
            sums = np.bincount(units.numbers[analysis.rows[places]], own[places] * (scores[places] - overall))
            error = math.sqrt(float(np.square(sums).sum())) / float(own[places].sum())
        row["is_weak"] = is_large and worse > limit * error
        if n < MOST_INTERVALS and count:
            intervals = predictions.make_intervals(analysis.rows[places])
            figure = intervals.mean(scores[places], is_error=analysis.is_error, is_rate=not analysis.is_error)
            row |= {"low": figure.low, "high": figure.high}
    return [row for _, row, _ in found]


def divide_values(values: Array) -> Iterator[tuple[str, Array]]:
    """Yields the slices of a column: a name, and which examples are inside, [n] bool."""
    if values.dtype.kind in "OSU":
        yield from divide_texts(values)
        return
    numbers = values.astype(np.float64)
    is_missing = np.isnan(numbers)
    if is_missing.any():
        yield "missing", is_missing
    distinct = np.unique(numbers[~is_missing])
    if len(distinct) <= MOST_NUMBERS:
        for value in distinct:
            yield format_number(float(value)), numbers == value
    elif len(distinct):
        yield from divide_ranges(numbers, numbers[~is_missing], "")


def divide_ranges(numbers: Array, known: Array, unit: str) -> Iterator[tuple[str, Array]]:
    """Yields five ranges of numbers with about as many examples each."""
    ends = [-math.inf, *np.unique(np.quantile(known, QUANTILES)), math.inf]
    for low, high in pairwise(ends):
        parts = [f"above {format_number(low)}" if low > -math.inf else "", f"up to {format_number(high)}"]
        words = " ".join(part for part in parts[: 2 if high < math.inf else 1] if part)
        yield f"{words}{unit}", (numbers > low) & (numbers <= high)


def divide_texts(values: Array) -> Iterator[tuple[str, Array]]:
    """Yields the values of a text column, or ranges of the lengths of texts."""
    texts = np.array([decode_text(value) for value in values], object)
    distinct, places = np.unique(texts.astype(str), return_inverse=True)
    if len(distinct) > MOST_WORDS:
        lengths = np.array([len(text) for text in texts], np.float64)
        yield from divide_ranges(lengths, lengths, " characters")
        return
    for n, text in enumerate(distinct):
        yield text or "missing", places == n


#: The most ranges, or values, that a column is divided into; fewer for fewer examples, of which each has about 16.
MOST_BINS, IN_A_BIN = 128, 16

#: The least examples of which a column can be judged.
FEWEST_ROWS = 40


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
