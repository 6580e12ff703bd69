"""Tables of the scores of positives and negatives, for exact ranking metrics. No TensorFlow.

Keras's AUC and related metrics count at 200 fixed thresholds. All probabilities of a rare class can lie between two of
them.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

#: With more scores in all columns together, neighbouring scores are merged.
MAX_SCORES = 1 << 23

#: Merging leaves room for at least this number of scores per column. So a merged score has at most 2 / `MIN_KEPT` of
#: the positives and of the negatives, unless the scores were equal before.
MIN_KEPT = 1 << 16

#: A merged score increases the number of positives or negatives with higher scores by at most about this share. High
#: scores thus stay fine: their precision depends on few negatives.
MAX_GROWTH = 5e-4


class ScoreTable(NamedTuple):
    """Distinct scores [n] float64, descending, and the total weight of positives and negatives at each score."""

    scores: Array
    positives: Array
    negatives: Array

    @property
    def curve(self) -> tuple[Array, Array]:
        """The total weights of positives and of negatives with this score or a higher one, [n] each."""
        return np.cumsum(self.positives), np.cumsum(self.negatives)


EMPTY = ScoreTable(np.zeros(0), np.zeros(0), np.zeros(0))


def make_table(scores: Array, positives: Array, negatives: Array) -> ScoreTable:
    """Makes a table from scores [n] in any order."""
    distinct, places = np.unique(-scores, return_inverse=True)
    places = places.reshape(-1)
    positive_sums = np.bincount(places, positives, len(distinct))
    negative_sums = np.bincount(places, negatives, len(distinct))
    return ScoreTable(-distinct, positive_sums, negative_sums)


def join_tables(tables: Sequence[ScoreTable]) -> ScoreTable:
    """Makes one table of the scores of several."""
    scores = np.concatenate([table.scores for table in tables])
    positives = np.concatenate([table.positives for table in tables])
    negatives = np.concatenate([table.negatives for table in tables])
    return make_table(scores, positives, negatives)


def merge_scores(table: ScoreTable, most: int) -> ScoreTable:
    """Merges neighbouring scores, so that about `most` scores remain.

    A merged score has at most 2 / `most` of the positives and of the negatives, unless the scores were equal before.
    The order of positives and negatives is lost only within a merged score. So the area under the ROC curve changes by
    at most 2 / `most`. If a class has at most `most` / 2 examples, the area stays exact.
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
            is_large = weights >= step  # is not merged with others
            begins |= is_large | np.append(False, is_large[:-1])
            groups += np.cumsum(begins)
    begins = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    positives = np.add.reduceat(table.positives, begins)
    negatives = np.add.reduceat(table.negatives, begins)
    # Keep the mean score. Keeping the first one would raise negatives at each further merge.
    amounts = table.positives + table.negatives
    means = np.add.reduceat(table.scores * amounts, begins) / (positives + negatives)
    lasts = np.append(begins[1:], len(groups)) - 1
    return ScoreTable(np.clip(means, table.scores[lasts], table.scores[begins]), positives, negatives)


class ScoreCollector:
    """Collects the scores of one evaluation. Columns are classes or labels, or one column for all. Rows need no order.

    Args:
        max_scores: with more scores in all columns together, neighbours are merged (`merge_scores`).
    """

    def __init__(self, max_scores: int = MAX_SCORES) -> None:
        self._max_scores = max_scores
        self._parts: list[tuple[Array, Array, Array]] = []
        self._pending = 0
        self._tables: list[ScoreTable] = []
        self._lock = threading.Lock()

    def add(self, scores: Array, is_positive: Array, weights: Array) -> None:
        """Adds rows [m, columns]. Entries with weight 0 do not count."""
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
        """Serialises the tables, for `merge` in another process."""
        content = io.BytesIO()
        tables = self.to_tables()
        np.savez(
            content,
            np.concatenate([table.scores for table in tables]),
            np.concatenate([table.positives for table in tables]),
            np.concatenate([table.negatives for table in tables]),
            sizes=np.array([len(table.scores) for table in tables]),
        )
        return content.getvalue()

    def merge(self, content: bytes) -> None:
        """Adds the tables of a collector in another process (`to_bytes`)."""
        with np.load(io.BytesIO(content)) as arrays:
            ends = np.cumsum(arrays["sizes"])[:-1]
            scores, positives, negatives = [np.split(arrays[f"arr_{n}"], ends) for n in range(3)]
        own = self.to_tables() or [EMPTY] * (len(ends) + 1)
        joined = []
        for n, table in enumerate(own):
            other = ScoreTable(scores[n], positives[n], negatives[n])
            joined.append(join_tables([table, other]))
        self._tables = joined

    def _collect(self) -> None:
        """Moves the added rows into the tables, and merges scores if there are too many."""
        if not self._parts:
            return
        scores = np.concatenate([part[0] for part in self._parts])
        is_positive = np.concatenate([part[1] for part in self._parts])
        weights = np.concatenate([part[2] for part in self._parts])
        self._parts = []
        self._pending = 0
        columns = scores.shape[1]
        most = max(MIN_KEPT, self._max_scores // columns)
        tables = self._tables or [EMPTY] * columns
        self._tables = []
        for n, table in enumerate(tables):
            is_used = weights[:, n] > 0
            weight = weights[is_used, n]
            positive = is_positive[is_used, n]
            added = ScoreTable(scores[is_used, n], weight * positive, weight * ~positive)
            self._tables.append(merge_scores(join_tables([table, added]), most))


# Metrics of one table ------------------------------------------------------------------------


def compute_roc_area(table: ScoreTable) -> float:
    """Returns the area under the ROC curve, like scikit-learn's `roc_auc_score`; NaN without positives or negatives."""
    true, false = table.curve
    if not len(true) or not true[-1] or not false[-1]:
        return float("nan")
    ahead = true - table.positives / 2
    return float((ahead * table.negatives).sum() / (true[-1] * false[-1]))


def compute_average_precision(table: ScoreTable) -> float:
    """Returns the area under the precision-recall curve, a step function as in `sklearn.average_precision_score`.

    NaN without positives or negatives.
    """
    true, false = table.curve
    if not len(true) or not true[-1] or not false[-1]:
        return float("nan")
    precision = true / np.maximum(true + false, np.finfo(np.float64).tiny)
    return float((precision * table.positives).sum() / true[-1])


def compute_rates(table: ScoreTable) -> dict[str, Array]:
    """Returns `sensitivity`, `specificity` and `precision` at each threshold, [n + 1]; NaN where one is not defined.

    The thresholds descend from one above all scores to the lowest score.
    """
    positives, negatives = table.curve
    true = np.append(0.0, positives)
    false = np.append(0.0, negatives)
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "sensitivity": true / true[-1],
            "specificity": 1 - false / false[-1],
            "precision": true / (true + false),
        }


def find_best_rate(table: ScoreTable, wanted: str, limited: str, least: float) -> float:
    """Returns the highest rate `wanted` at thresholds where the rate `limited` is at least `least`; 0 if none."""
    rates = compute_rates(table)
    is_allowed = rates[limited] >= least - 1e-9  # tolerance for rounding in sums of weights
    reached = rates[wanted][is_allowed & ~np.isnan(rates[wanted])]
    return float(reached.max()) if len(reached) else 0.0
