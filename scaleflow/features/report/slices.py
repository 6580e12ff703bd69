"""Finds slices with weak results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from scaleflow.interfaces.formatting import format_number
from scaleflow.serving.cells import decode_text

if TYPE_CHECKING:
    from scaleflow.evaluation.outputs import OutputAnalysis
    from scaleflow.evaluation.predictions import Predictions

#: Minimum number of examples in a slice. TensorFlow Model Analysis has a similar limit.
MIN_EXAMPLES = 30

#: A column with at most this many distinct numbers, or texts, has a slice for each. Other columns are divided by
#: quantiles, or by length.
MAX_NUMBERS = 10
MAX_TEXTS = 50

QUANTILES = (0.2, 0.4, 0.6, 0.8)

#: A slice is weak if it is worse than all examples by this much, and by this share (as in skore's checks).
MIN_GAP = 0.03
MIN_GAP_SHARE = 0.10

#: Probability that a model without weak slices gets one by chance.
ERROR = 0.05

#: Maximum number of slices with an interval: the worst ones.
MAX_INTERVALS = 100

Array = np.ndarray[Any, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Slice:
    """Examples with a common value, or range, of a column."""

    column: str
    label: str  # value or range of the column
    places: Array  # indices in the analysis's scores
    share: float  # among examples whose column is known
    value: float  # mean of their scores
    excess: float  # how much worse this is than the overall mean; negative: better


def find_slices(
    predictions: Predictions, analysis: OutputAnalysis, columns: Mapping[str, Array], read: Array, count: int
) -> list[Row]:
    """Returns the slices of an output with enough examples, the weakest first.

    Args:
        columns: columns that divide the examples, by name: texts or numbers, [m].
        read: rows of the table of predictions that the columns belong to, ascending, [m].
        count: `evaluation.intervals`; 0: no intervals.

    Returns:
        Rows with `output`, `column`, `slice`, `examples`, `share`, `metric`, `value`, `low`, `high`, `difference` from
        all examples and `is_weak`.
    """
    scores = analysis.scores
    weights = np.ones(len(scores))
    all_weights = predictions.weights()
    if all_weights is not None:
        weights = all_weights[analysis.rows].astype(np.float64)
    if not weights.sum():
        return []
    mean = float(np.average(scores, weights=weights))
    slices = divide_examples(analysis, columns, read, weights, mean)
    is_weak = judge_slices(predictions, analysis, slices, weights, mean)
    rows = []
    for n, part in enumerate(slices):
        low = high = math.nan
        if n < MAX_INTERVALS and count:
            intervals = predictions.make_intervals(analysis.rows[part.places])
            estimate = intervals.mean(scores[part.places], is_error=analysis.is_error, is_rate=not analysis.is_error)
            low = estimate.low
            high = estimate.high
        rows.append(
            {
                "output": analysis.name,
                "column": part.column,
                "slice": part.label,
                "examples": len(part.places),
                "share": part.share,
                "metric": analysis.measure,
                "value": part.value,
                "low": low,
                "high": high,
                "difference": part.value - mean,
                "is_weak": is_weak[n],
            }
        )
    return rows


def divide_examples(
    analysis: OutputAnalysis, columns: Mapping[str, Array], read: Array, weights: Array, mean: float
) -> list[Slice]:
    """Returns the slices with enough examples, the weakest first. Other arguments are as for `find_slices`.

    Args:
        weights: weights of the scores, [n].
        mean: mean of all scores.
    """
    scores = analysis.scores
    _, known, in_columns = np.intersect1d(analysis.rows, read, assume_unique=True, return_indices=True)
    divided = [(name, values, np.arange(len(scores))) for name, values in analysis.groups.items()]
    divided += [(name, values[in_columns], known) for name, values in columns.items()]
    slices = []
    for column, values, candidates in divided:
        for label, is_inside in divide_values(values):
            places = candidates[is_inside]
            has_enough = MIN_EXAMPLES <= len(places) < len(scores)
            if has_enough and weights[places].sum():
                value = float(np.average(scores[places], weights=weights[places]))
                excess = value - mean if analysis.is_error else mean - value
                slices.append(Slice(column, label, places, len(places) / len(candidates), value, excess))
    return sorted(slices, key=lambda part: -part.excess)


def judge_slices(
    predictions: Predictions, analysis: OutputAnalysis, slices: Sequence[Slice], weights: Array, mean: float
) -> list[bool]:
    """Returns which slices are weak: worse than all examples by a large gap that is not chance.

    Args:
        weights: weights of the scores, [n].
        mean: mean of all scores.
    """
    scores = analysis.scores
    units = predictions.units
    deviation = math.sqrt(float(np.average((scores - mean) ** 2, weights=weights)))
    limit = NormalDist().inv_cdf(1 - ERROR / 2 / max(1, len(slices)))
    least_gap = max(0.0 if analysis.is_error else MIN_GAP, MIN_GAP_SHARE * abs(mean))
    are_weak = []
    for part in slices:
        places = part.places
        error = deviation / math.sqrt(len(places))
        if units is not None:  # standard error of the slice's mean, over units
            deviations = weights[places] * (scores[places] - mean)
            sums = np.bincount(units.numbers[analysis.rows[places]], deviations)
            error = math.sqrt(float(np.square(sums).sum())) / float(weights[places].sum())
        are_weak.append(part.excess >= least_gap and part.excess > limit * error)
    return are_weak


def divide_values(values: Array) -> Iterator[tuple[str, Array]]:
    """Yields the slices of a column: label, and which examples are inside, [n] bool."""
    if values.dtype.kind in "OSU":
        yield from divide_texts(values)
        return
    numbers = values.astype(np.float64)
    is_missing = np.isnan(numbers)
    if is_missing.any():
        yield "missing", is_missing
    distinct = np.unique(numbers[~is_missing])
    if len(distinct) <= MAX_NUMBERS:
        for value in distinct:
            yield format_number(float(value)), numbers == value
    elif len(distinct):
        yield from divide_ranges(numbers, numbers[~is_missing], "")


def divide_ranges(numbers: Array, known: Array, unit: str) -> Iterator[tuple[str, Array]]:
    """Yields five ranges of numbers with about the same number of examples."""
    ends = [-math.inf, *np.unique(np.quantile(known, QUANTILES)), math.inf]
    for low, high in pairwise(ends):
        words = []
        if low > -math.inf:
            words.append(f"above {format_number(low)}")
        if high < math.inf:
            words.append(f"up to {format_number(high)}")
        yield f"{' '.join(words)}{unit}", (numbers > low) & (numbers <= high)


def divide_texts(values: Array) -> Iterator[tuple[str, Array]]:
    """Yields the values of a text column, or ranges of text lengths."""
    texts = np.array([decode_text(value) for value in values], object)
    distinct, places = np.unique(texts.astype(str), return_inverse=True)
    if len(distinct) > MAX_TEXTS:
        lengths = np.array([len(text) for text in texts], np.float64)
        yield from divide_ranges(lengths, lengths, " characters")
        return
    for n, text in enumerate(distinct):
        yield text or "missing", places == n
