"""Scores of positives and negatives, from which ranking metrics are computed exactly. No TensorFlow.

Keras's AUC and its relatives count at 200 fixed probabilities. If one class is rare, all of its probabilities may lie
between two of them.
"""

from __future__ import annotations

import io
import threading
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

#: Above this number of scores in all columns, those that are next to each other are merged.
MAX_SCORES = 1 << 23

#: A column keeps at least this many scores. If scores are merged, a merged one has at most 2 / `MIN_KEPT` of the
#: positives, or of the negatives, unless they are equal.
MIN_KEPT = 1 << 16

#: A merged score adds at most this share of the positives, or of the negatives, above it: the precision of high scores
#: depends on few negatives.
MAX_GROWTH = 5e-4


class ScoreTable(NamedTuple):
    """Distinct scores [n] float64, descending, and the weights of the positives and negatives with each."""

    scores: Array
    positives: Array
    negatives: Array

    @property
    def curve(self) -> tuple[Array, Array]:
        """The weights of the positives and of the negatives with at least each score, [n]."""
        return np.cumsum(self.positives), np.cumsum(self.negatives)


EMPTY = ScoreTable(*(np.zeros(0) for _ in range(3)))


def make_table(scores: Array, positives: Array, negatives: Array) -> ScoreTable:
    """Returns the table of scores, [n], in any order."""
    distinct, places = np.unique(-scores, return_inverse=True)
    sums = (np.bincount(places.reshape(-1), each, len(distinct)) for each in (positives, negatives))
    return ScoreTable(-distinct, *sums)


def merge_scores(table: ScoreTable, most: int) -> ScoreTable:
    """Returns a table with about `most` scores at most, each of which stands for neighbours in the order.

    Positives and negatives keep their order, except within a merged score. It has at most 2 / `most` of the positives,
    and of the negatives, unless they had one score before. So the area under a ROC curve changes by 2 / `most` at most.
    A class with no more than `most` / 2 examples keeps its order towards the other class exactly.
    """
    if len(table.scores) <= most:
        return table
    groups = np.zeros(len(table.scores), np.int64)
    for weights in (table.positives, table.negatives):
        step = weights.sum() * 2 / most
        if step:
            before = np.cumsum(weights) - weights
            part = np.floor(before / step).astype(np.int64)
            ranks = before + weights[weights > 0].min()
            fine_part = np.floor(np.log(ranks) / MAX_GROWTH).astype(np.int64)
            begins = np.append(True, (part[1:] != part[:-1]) | (fine_part[1:] != fine_part[:-1]))
            is_large = weights >= step  # a score that has more than its share stays alone
            begins |= is_large | np.append(False, is_large[:-1])
            groups += np.cumsum(begins)
    begins = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    positives, negatives = (np.add.reduceat(each, begins) for each in table[1:])
    # The mean: with the first score, each further merge would move negatives up.
    amounts = table.positives + table.negatives
    means = np.add.reduceat(table.scores * amounts, begins) / (positives + negatives)
    lasts = np.append(begins[1:], len(groups)) - 1
    return ScoreTable(np.clip(means, table.scores[lasts], table.scores[begins]), positives, negatives)


class ScoreCollector:
    """Collects the scores of one evaluation, by columns: classes, labels, or a single one. Rows may come in any order.

    Args:
        max_scores: above this number in all columns, neighbours are merged (`merge_scores`).
    """

    def __init__(self, max_scores: int = MAX_SCORES) -> None:
        self._max_scores = max_scores
        self._parts: list[tuple[Array, Array, Array]] = []
        self._pending = 0
        self._tables: list[ScoreTable] = []
        self._lock = threading.Lock()

    def add(self, scores: Array, is_positive: Array, weights: Array) -> None:
        """Adds rows [m, columns]. Rows of weight 0 count nowhere."""
        with self._lock:
            self._parts.append((scores.astype(np.float64), is_positive > 0.5, weights.astype(np.float64)))
            self._pending += scores.size
            if self._pending > self._max_scores:
                self._collect()

    def to_tables(self) -> list[ScoreTable]:
        """Returns a table for each column; an empty list if nothing was added."""
        self._collect()
        return self._tables

    def to_bytes(self) -> bytes:
        """Returns what was collected, for `merge` in another process."""
        content = io.BytesIO()
        tables = self.to_tables()
        columns = (np.concatenate([each[n] for each in tables]) for n in range(3))
        np.savez(content, *columns, sizes=np.array([len(each.scores) for each in tables]))
        return content.getvalue()

    def merge(self, content: bytes) -> None:
        """Adds what a collector in another process has collected."""
        with np.load(io.BytesIO(content)) as arrays:
            ends = np.cumsum(arrays["sizes"])[:-1]
            columns = [np.split(arrays[f"arr_{n}"], ends) for n in range(3)]
        own = self.to_tables() or [EMPTY] * (len(ends) + 1)
        others = [ScoreTable(*parts) for parts in zip(*columns, strict=True)]
        self._tables = [
            make_table(*(np.concatenate(pair) for pair in zip(*pairs, strict=True)))
            for pairs in zip(own, others, strict=True)
        ]

    def _collect(self) -> None:
        """Makes tables of the rows that were added."""
        if not self._parts:
            return
        scores, is_positive, weights = (np.concatenate([part[n] for part in self._parts]) for n in range(3))
        self._parts = []
        self._pending = 0
        columns = scores.shape[1]
        most = max(MIN_KEPT, self._max_scores // columns)
        tables = self._tables or [EMPTY] * columns
        self._tables = []
        for n, table in enumerate(tables):
            is_used = weights[:, n] > 0
            own = scores[is_used, n]
            weight = weights[is_used, n]
            positive = is_positive[is_used, n]
            found = make_table(
                np.append(table.scores, own),
                np.append(table.positives, weight * positive),
                np.append(table.negatives, weight * ~positive),
            )
            self._tables.append(merge_scores(found, most))


# Metrics of one table ------------------------------------------------------------------------


def compute_roc_area(table: ScoreTable) -> float:
    """Returns the area under the ROC curve, as scikit-learn's `roc_auc_score`; NaN without a positive or a negative."""
    true, false = table.curve
    if not len(true) or not true[-1] or not false[-1]:
        return float("nan")
    ahead = true - table.positives / 2
    return float((ahead * table.negatives).sum() / (true[-1] * false[-1]))


def compute_average_precision(table: ScoreTable) -> float:
    """Returns the area under the precision-recall curve, by steps, as scikit-learn's `average_precision_score`.

    NaN without a positive or a negative.
    """
    true, false = table.curve
    if not len(true) or not true[-1] or not false[-1]:
        return float("nan")
    precision = true / np.maximum(true + false, np.finfo(np.float64).tiny)
    return float((precision * table.positives).sum() / true[-1])


def compute_rates(table: ScoreTable) -> dict[str, Array]:
    """Returns rates at each threshold, from one that no score reaches to the least score, [n + 1].

    Those of `sensitivity`, `specificity` and `precision`; NaN where a rate is not defined.
    """
    true, false = (np.append(0.0, each) for each in table.curve)
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "sensitivity": true / true[-1],
            "specificity": 1 - false / false[-1],
            "precision": true / (true + false),
        }


def find_best_rate(table: ScoreTable, wanted: str, given: str, least: float) -> float:
    """Returns the highest rate `wanted` of the thresholds at which `given` is at least `least`; 0 if there is none."""
    rates = compute_rates(table)
    is_allowed = rates[given] >= least - 1e-9  # what sums of weights are off by
    reached = rates[wanted][is_allowed & ~np.isnan(rates[wanted])]
    return float(reached.max()) if len(reached) else 0.0
