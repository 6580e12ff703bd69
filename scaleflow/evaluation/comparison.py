"""Compares kept predictions of several models on the same examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.evaluation.collector import EXAMPLE, choose_form
from scaleflow.evaluation.intervals import Intervals
from scaleflow.evaluation.outputs import analyse_output
from scaleflow.evaluation.predictions import Predictions, find_units
from scaleflow.evaluation.resampling import CONFIDENCE, Figure, Units
from scaleflow.interfaces import name_leaves, name_metric

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PairedDifference:
    """How one model differs from another in a metric, on the examples that both have.

    Attributes:
        metric: the mean of the examples' scores, such as `accuracy` or `price/mae`.
        is_error: whether a smaller one is better.
        difference: from the other one, with its paired interval.
        better, worse: the examples that it predicts better, or worse, than the other one.
        over: the units that the intervals are of, such as `12 groups of customer`; empty if each example is one.
    """

    metric: str
    is_error: bool
    examples: int
    value: Figure
    difference: Figure
    better: int
    worse: int
    over: str = ""

    @property
    def is_noise(self) -> bool:
        """Whether the difference may be chance: its interval contains 0, or there is none."""
        return not (self.difference.low > 0 or self.difference.high < 0)


@dataclass(frozen=True)
class PairedScores:
    """How good the predictions of two models are for the examples that both have.

    Attributes:
        metric: what the mean of the scores is, such as `accuracy` or `price/mae`.
        is_error: whether smaller scores are better.
        examples: their places in the split, [n].
        scores, others: of the model and of the other one, [n].
        weights: of the examples, [n]; None: 1 each.
        units: which examples are drawn again together; None: each by itself.
    """

    metric: str
    is_error: bool
    examples: Array
    scores: Array
    others: Array
    weights: Array | None
    units: Units | None = None

    @property
    def gains(self) -> Array:
        """How much better the model is than the other one, [n]; negative where it is worse."""
        return (self.others - self.scores) if self.is_error else (self.scores - self.others)

    def select(self, is_used: Array) -> PairedScores:
        """Returns the scores of some of the examples, [n] bool."""
        arrays: dict[str, Any] = {name: each for name, each in vars(self).items() if isinstance(each, np.ndarray)}
        chosen = {name: each[is_used] for name, each in arrays.items()}
        return replace(self, **chosen, units=self.units and self.units.take(is_used))

    def count_differing(self) -> int:
        """Returns on how many examples, or units of them, one model is better than the other one."""
        sums = self.gains if self.units is None else np.bincount(self.units.numbers, self.gains)
        return int(np.count_nonzero(sums))

    def make_intervals(self, confidence: float = CONFIDENCE) -> Intervals:
        """Returns what makes the intervals of figures of the examples."""
        return Intervals(len(self.scores), self.weights, self.units, confidence)

    def measure_gain(self, confidence: float) -> Figure:
        """Returns the mean gain of two or more examples with its paired interval."""
        return self.make_intervals(confidence).mean(self.gains)


def count_not_finite(predictions: Predictions) -> int:
    """Returns for how many examples an output of the model is not finite; with several outputs the largest number."""
    outputs = name_leaves(predictions.outputs).items()
    analyses = [analyse_output(predictions, name, described) for name, described in outputs]
    return max(int(each.facts.get("not_finite", 0)) for each in analyses)


def pair_scores(model: Predictions, other: Predictions) -> Iterator[PairedScores]:
    """Yields the scores of each output of two models, for the examples that both have predictions for.

    Classes are compared by their names with the targets of the first: the other model may not know all of them.
    Raises ConfigError if the models have other outputs.
    """
    outputs, known = name_leaves(model.outputs), name_leaves(other.outputs)
    if outputs.keys() != known.keys():
        raise ConfigError("the models have other outputs")
    for name, described in outputs.items():
        own, kinds = analyse_output(model, name, described), {choose_form(described), choose_form(known[name])}
        has_classes = kinds <= {"class", "best"}
        if len(kinds) > 1 and not has_classes:
            raise ConfigError("the models have other outputs")
        theirs = None if has_classes else analyse_output(other, name, known[name])
        its_rows = np.arange(len(other.table)) if theirs is None else theirs.rows
        pair = model.column(EXAMPLE)[own.rows], other.column(EXAMPLE)[its_rows]
        examples, mine, its = np.intersect1d(*pair, assume_unique=True, return_indices=True)
        rows, its_rows = own.rows[mine], its_rows[its]
        if theirs is None:
            is_right = model.column("target", name)[rows] == other.column("prediction", name)[its_rows]
        others = is_right.astype(np.float64) if theirs is None else theirs.scores[its]
        weights, units = model.weights(), find_units((model, rows), (other, its_rows))
        of_rows = None if weights is None else weights[rows]
        metric, scores = name_metric(name, own.measure), own.scores[mine]
        yield PairedScores(metric, own.is_error, examples, scores=scores, others=others, weights=of_rows, units=units)


def compare_predictions(model: Predictions, other: Predictions) -> list[PairedDifference]:
    """Compares each output of a model with that of another one.

    Raises ConfigError if they are not of the same examples, or the models have other outputs.
    """
    if (model.split, model.digest) != (other.split, other.digest) or not model.digest:
        raise ConfigError(f"the predictions are of different examples: {describe_of(model)} and {describe_of(other)}")
    found = []
    for pair in pair_scores(model, other):
        intervals = pair.make_intervals()
        found.append(
            PairedDifference(
                pair.metric,
                pair.is_error,
                len(pair.scores),
                value=intervals.mean(pair.scores, is_error=pair.is_error, is_rate=not pair.is_error),
                difference=intervals.mean(pair.scores - pair.others),
                better=int((pair.gains > 0).sum()),
                worse=int((pair.gains < 0).sum()),
                over=pair.units.describe() if pair.units else "",
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
            rows.append({**row, "examples": each.examples, **({"over": each.over} if each.over else {})})
    return rows
