"""Compares kept predictions of several models on the same examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.evaluation.collector import EXAMPLE, choose_form
from scaleflow.evaluation.findings import name_metric
from scaleflow.evaluation.outputs import analyse_output
from scaleflow.evaluation.predictions import Predictions
from scaleflow.evaluation.resampling import Figure, Resamples
from scaleflow.interfaces import name_leaves

Array = np.ndarray[Any, Any]

#: The resamples of an interval that decides.
MOST_RESAMPLES = 4000


@dataclass(frozen=True)
class PairedDifference:
    """How one model differs from another in a metric, on the examples that both have.

    Attributes:
        metric: the mean of the examples' scores, such as `accuracy` or `price/mae`.
        is_error: whether a smaller one is better.
        difference: from the other one, with the interval of a paired bootstrap.
        better, worse: the examples that it predicts better, or worse, than the other one.
    """

    metric: str
    is_error: bool
    examples: int
    value: Figure
    difference: Figure
    better: int
    worse: int

    @property
    def is_noise(self) -> bool:
        """Whether the difference may be chance: its interval contains 0."""
        return bool(self.difference.low <= 0 <= self.difference.high)


@dataclass(frozen=True)
class PairedScores:
    """How good the predictions of two models are for the examples that both have.

    Attributes:
        metric: what the mean of the scores is, such as `accuracy` or `price/mae`.
        is_error: whether smaller scores are better.
        examples: their places in the split, [n].
        scores, others: of the model and of the other one, [n].
        weights: of the examples, [n]; None: 1 each.
    """

    metric: str
    is_error: bool
    examples: Array
    scores: Array
    others: Array
    weights: Array | None

    @property
    def gains(self) -> Array:
        """How much better the model is than the other one, [n]; negative where it is worse."""
        return (self.others - self.scores) if self.is_error else (self.scores - self.others)

    def select(self, is_used: Array) -> PairedScores:
        """Returns the scores of some of the examples, [n] bool."""
        weights = None if self.weights is None else self.weights[is_used]
        scores, others = self.scores[is_used], self.others[is_used]
        return PairedScores(self.metric, self.is_error, self.examples[is_used], scores, others, weights)

    def measure_gain(self, confidence: float) -> Figure:
        """Returns the mean gain of two or more examples with its interval, by the paired bootstrap.

        The percentiles are expanded for few examples, as Hesterberg (2015, The American Statistician 69) says: the
        usual ones are too narrow by the difference between Student's and the normal distribution, and by
        sqrt((n - 1) / n).
        """
        count, normal = len(self.scores), NormalDist()
        z = normal.inv_cdf((1 + confidence) / 2)
        student = z + (z**3 + z) / (4 * (count - 1))
        tail = 100 * normal.cdf(-student * math.sqrt(count / (count - 1)))
        return Resamples(count, MOST_RESAMPLES, self.weights, (tail, 100 - tail)).mean(self.gains)


def pair_scores(model: Predictions, other: Predictions) -> list[PairedScores]:
    """Returns the scores of each output of two models, for the examples that both have predictions for.

    Classes are compared by their names with the targets of the first: the other model may not know all of them.
    Raises ConfigError if the models have other outputs.
    """
    outputs, known = name_leaves(model.outputs), name_leaves(other.outputs)
    if outputs.keys() != known.keys():
        raise ConfigError("the models have other outputs")
    found = []
    for name, described in outputs.items():
        analysis, form = analyse_output(model, name, described, 0), choose_form(described)
        if form in ("class", "best") and choose_form(known[name]) in ("class", "best"):
            rows = other.column(EXAMPLE)
            first = model.column(EXAMPLE)[analysis.rows]
            _, mine, its = np.intersect1d(first, rows, assume_unique=True, return_indices=True)
            targets = model.column("target", name)[analysis.rows][mine]
            others = (targets == other.column("prediction", name)[its]).astype(np.float64)
        elif form == choose_form(known[name]):
            theirs = analyse_output(other, name, known[name], 0)
            first, second = model.column(EXAMPLE)[analysis.rows], other.column(EXAMPLE)[theirs.rows]
            _, mine, its = np.intersect1d(first, second, assume_unique=True, return_indices=True)
            others = theirs.scores[its]
        else:
            raise ConfigError("the models have other outputs")
        weights = model.weights()
        own = None if weights is None else weights[analysis.rows[mine]]
        metric = name_metric(name, analysis.measure)
        found.append(PairedScores(metric, analysis.is_error, first[mine], analysis.scores[mine], others, own))
    return found


def compare_predictions(model: Predictions, other: Predictions, count: int = 1000) -> list[PairedDifference]:
    """Compares each output of a model with that of another one.

    Raises ConfigError if they are not of the same examples, or the models have other outputs.
    """
    if (model.split, model.digest) != (other.split, other.digest) or not model.digest:
        raise ConfigError(f"the predictions are of different examples: {describe_of(model)} and {describe_of(other)}")
    found = []
    for pair in pair_scores(model, other):
        resamples = Resamples(len(pair.scores), count, pair.weights)
        found.append(
            PairedDifference(
                pair.metric,
                pair.is_error,
                len(pair.scores),
                resamples.mean(pair.scores),
                resamples.mean(pair.scores - pair.others),
                int((pair.gains > 0).sum()),
                int((pair.gains < 0).sum()),
            )
        )
    return found


def describe_of(predictions: Predictions) -> str:
    return f"{predictions.examples:,} of {predictions.split}, digest {predictions.digest or 'unknown'}"


def list_differences(named: Sequence[tuple[str, Predictions]]) -> list[dict[str, object]]:
    """Returns rows that compare models with the first one: it has no difference. A reason stands for what fails."""
    rows: list[dict[str, object]] = []
    for label, predictions in named:
        try:
            differences = compare_predictions(predictions, named[0][1])
        except ConfigError as error:
            rows.append({"model": label, "not compared": str(error)})
            continue
        for each in differences:
            row: dict[str, object] = {"model": label, "metric": each.metric, "value": each.value}
            if predictions is not named[0][1]:
                row |= {"difference": each.difference, "better": each.better, "worse": each.worse}
                row["more than noise"] = "no" if each.is_noise else "yes"
            rows.append({**row, "examples": each.examples})
    return rows
