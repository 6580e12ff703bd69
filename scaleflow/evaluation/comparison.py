"""Compares the kept predictions of several models on the same examples."""

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
from scaleflow.evaluation.resampling import CONFIDENCE, Units
from scaleflow.interfaces import name_leaves, name_metric
from scaleflow.interfaces.estimate import Estimate

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ScoreComparison:
    """The comparison of a model to another one, on the examples that both have.

    Attributes:
        metric: the name of the mean of the examples' scores, such as `accuracy` or `price/mae`.
        is_error: whether smaller values are better.
        value: the model's value, with its interval.
        other: the other model's value.
        gain: how much better the model is, with its paired interval; negative if it is worse.
        better, worse: the number of examples that the model predicts better, or worse, than the other one.
        differ: the number of examples, or of the units in `over`, on which one model is better.
        over: the units of the intervals, such as `12 groups of customer`; empty if each example is its own unit.
        left_out: the number of examples that are not compared, because the other model was trained on them.
        on: the file with the examples; empty for a split of the model. Neither model was trained on the file.
    """

    metric: str
    is_error: bool
    examples: int
    value: Estimate
    other: float
    gain: Estimate
    better: int
    worse: int
    differ: int
    over: str = ""
    left_out: int = 0
    on: str = ""

    @property
    def difference(self) -> Estimate:
        """The model's metric minus the other model's, with its paired interval."""
        if not self.is_error:
            return self.gain
        return Estimate(0.0 - self.gain.value, 0.0 - self.gain.high, 0.0 - self.gain.low)

    @property
    def is_noise(self) -> bool:
        """Whether the difference may be chance: its interval contains 0, or there is no interval."""
        return not (self.gain.low > 0 or self.gain.high < 0)


@dataclass(frozen=True)
class PairedScores:
    """The scores of two models' predictions on the examples that both have.

    Attributes:
        metric: the name of the scores' mean, such as `accuracy` or `price/mae`.
        is_error: whether smaller scores are better.
        examples: the places of the examples in the split, [n].
        scores, others: the scores of the model and of the other model, [n].
        weights: the weights of the examples, [n]; None: 1 each.
        units: which examples are resampled together; None: each by itself.
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
        """How much better the model is than the other one, [n]; negative if it is worse."""
        return (self.others - self.scores) if self.is_error else (self.scores - self.others)

    def select(self, is_used: Array) -> PairedScores:
        """Returns the scores of the chosen examples, [n] bool."""
        chosen: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                chosen[name] = value[is_used]
        return replace(self, **chosen, units=self.units and self.units.take(is_used))

    def count_differing(self) -> int:
        """Returns the number of examples, or units of examples, on which one model is better than the other."""
        sums = self.gains if self.units is None else np.bincount(self.units.numbers, self.gains)
        return int(np.count_nonzero(sums))

    def compare(self, confidence: float = CONFIDENCE) -> ScoreComparison:
        """Compares the mean scores. Needs at least two examples."""
        intervals = Intervals(len(self.scores), self.weights, self.units, confidence)
        gains = self.gains
        return ScoreComparison(
            self.metric,
            self.is_error,
            len(self.scores),
            value=intervals.mean(self.scores, is_error=self.is_error, is_rate=not self.is_error),
            other=intervals.mean(self.others).value,
            gain=intervals.mean(gains),
            better=int((gains > 0).sum()),
            worse=int((gains < 0).sum()),
            differ=self.count_differing(),
            over=self.units.describe() if self.units else "",
        )


def count_not_finite(predictions: Predictions) -> int:
    """Returns the number of examples with an output that is not finite; with several outputs, the largest number."""
    outputs = name_leaves(predictions.outputs).items()
    analyses = [analyse_output(predictions, name, described) for name, described in outputs]
    return max(int(analysis.facts.get("not_finite", 0)) for analysis in analyses)


def pair_scores(model: Predictions, other: Predictions) -> Iterator[PairedScores]:
    """Yields the scores of each output of two models, for the examples that both have predictions for.

    Classes are compared by name with the first model's targets, since the other model may not have all of them. Raises
    ConfigError if the models have different outputs.
    """
    outputs = name_leaves(model.outputs)
    known = name_leaves(other.outputs)
    if outputs.keys() != known.keys():
        raise ConfigError("the models have other outputs")
    for name, described in outputs.items():
        own = analyse_output(model, name, described)
        kinds = {choose_form(described), choose_form(known[name])}
        has_classes = kinds <= {"class", "best"}
        if len(kinds) > 1 and not has_classes:
            raise ConfigError("the models have other outputs")
        theirs = None if has_classes else analyse_output(other, name, known[name])
        its_rows = np.arange(len(other.table)) if theirs is None else theirs.rows
        pair = model.column(EXAMPLE)[own.rows], other.column(EXAMPLE)[its_rows]
        examples, mine, its = np.intersect1d(*pair, assume_unique=True, return_indices=True)
        rows = own.rows[mine]
        its_rows = its_rows[its]
        if theirs is None:
            is_right = model.column("target", name)[rows] == other.column("prediction", name)[its_rows]
        others = is_right.astype(np.float64) if theirs is None else theirs.scores[its]
        weights = model.weights()
        units = find_units((model, rows), (other, its_rows))
        of_rows = None if weights is None else weights[rows]
        metric = name_metric(name, own.measure)
        scores = own.scores[mine]
        yield PairedScores(metric, own.is_error, examples, scores=scores, others=others, weights=of_rows, units=units)


def compare_predictions(model: Predictions, other: Predictions) -> list[ScoreComparison]:
    """Compares each output of a model with the same output of another model.

    Raises ConfigError if the predictions are of different examples, or the models have different outputs.
    """
    if (model.split, model.digest) != (other.split, other.digest) or not model.digest:
        raise ConfigError(f"the predictions are of different examples: {describe_of(model)} and {describe_of(other)}")
    return [pair.compare() for pair in pair_scores(model, other)]


def describe_of(predictions: Predictions) -> str:
    return f"{predictions.examples:,} of {predictions.split}, digest {predictions.digest or 'unknown'}"


def list_differences(named: Sequence[tuple[str, Predictions]]) -> list[dict[str, object]]:
    """Returns rows that compare each model with the first one. A model that cannot be compared gets the reason."""
    rows: list[dict[str, object]] = []
    for label, predictions in named:
        try:
            differences = compare_predictions(predictions, named[0][1])
        except ConfigError as error:
            rows.append({"model": label, "not compared": str(error)})
            continue
        for compared in differences:
            row: dict[str, object] = {"model": label, "metric": compared.metric, "value": compared.value}
            if predictions is not named[0][1]:
                row["difference"] = compared.difference
                row["better"] = compared.better
                row["worse"] = compared.worse
                row["more than noise"] = "no" if compared.is_noise else "yes"
            row["examples"] = compared.examples
            if compared.over:
                row["over"] = compared.over
            rows.append(row)
    return rows
