"""Compares kept predictions of several models on the same examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.evaluation.collector import EXAMPLE
from scaleflow.evaluation.findings import name_metric
from scaleflow.evaluation.outputs import analyse_output
from scaleflow.evaluation.predictions import Predictions
from scaleflow.evaluation.resampling import Figure, Resamples
from scaleflow.interfaces import name_leaves


@dataclass(frozen=True)
class PairedDifference:
    """How one model differs from another in a metric, on the examples that both have.

    Attributes:
        metric: the mean of the examples' scores, such as `accuracy` or `price/mae`.
        is_error: whether a smaller one is better.
        examples: how many examples both have.
        value: of the model.
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


def compare_predictions(model: Predictions, other: Predictions, count: int = 1000) -> list[PairedDifference]:
    """Compares each output of a model with that of another one.

    Args:
        model, other: their predictions for the same split.
        count: the number of resamples.

    Raises:
        ConfigError: if they are not of the same examples, or the models have other outputs.
    """
    if (model.split, model.digest) != (other.split, other.digest) or not model.digest:
        raise ConfigError(f"the predictions are of different examples: {describe_of(model)} and {describe_of(other)}")
    outputs = name_leaves(model.outputs)
    if outputs.keys() != name_leaves(other.outputs).keys():
        raise ConfigError("the models have other outputs")
    found = []
    for name, described in outputs.items():
        analyses = [analyse_output(each, name, described, 0) for each in (model, other)]
        first, second = (each.column(EXAMPLE)[a.rows] for each, a in zip((model, other), analyses, strict=True))
        _, mine, its = np.intersect1d(first, second, assume_unique=True, return_indices=True)
        scores, others = analyses[0].scores[mine], analyses[1].scores[its]
        weights = model.weights()
        own = None if weights is None else weights[analyses[0].rows[mine]]
        resamples, sign = Resamples(len(scores), count, own), -1 if analyses[0].is_error else 1
        found.append(
            PairedDifference(
                name_metric(name, analyses[0].measure),
                analyses[0].is_error,
                len(scores),
                resamples.mean(scores),
                resamples.mean(scores - others),
                int((sign * (scores - others) > 0).sum()),
                int((sign * (scores - others) < 0).sum()),
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
