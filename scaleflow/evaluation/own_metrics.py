"""Metrics that the user names, `evaluation.metrics`: functions of targets and predictions that need all examples."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from scaleflow.errors import read_reason
from scaleflow.evaluation.collector import choose_form
from scaleflow.evaluation.figures import read_classes
from scaleflow.evaluation.outputs import read_vectors
from scaleflow.evaluation.predictions import Predictions
from scaleflow.evaluation.resampling import Figure, Resamples
from scaleflow.interfaces import Outputs

Array = np.ndarray[Any, Any]
Metrics = Mapping[str, Callable[..., Any]]

#: Names of the parameter that gets probabilities; one of another name gets predictions.
SCORES = ("y_score", "y_prob", "y_proba", "y_pred_proba", "scores", "probabilities")

#: Names of the parameter that gets the weights of the examples.
WEIGHTS = ("sample_weight", "weights")

#: The most resamples of an interval, and the fewest.
MOST_RESAMPLES, FEWEST_RESAMPLES = 200, 50


def measure_own(
    predictions: Predictions, output: str, described: Outputs, metrics: Metrics, seconds: float
) -> tuple[dict[str, Figure], dict[str, str]]:
    """Computes the user's metrics of one output.

    Classes are numbers from 0; of two classes the second one is 1, and its probability is what scores are. Labels and
    several values are [n, k].

    Args:
        seconds: for the intervals of each metric.

    Returns:
        The figures with their intervals, and why those are missing that have no number.
    """
    form = choose_form(described)
    if form == "positions":
        return {}, dict.fromkeys(metrics, "examples with many positions are kept as sums only")
    if form in ("class", "best"):
        data = read_classes(predictions, output, described)
        rows, target, predicted, chances = data.rows, data.target, data.predicted, data.chances
        if chances is not None and len(data.names) == 2:
            chances = chances[:, 1]
    else:
        rows, target, predicted, chances = read_vectors(predictions, output, described)
        if len(predicted.T) == 1:
            target, predicted = target[:, 0], predicted[:, 0]
    weights = predictions.weights()
    own = None if weights is None else weights[rows].astype(np.float64)
    resamples = Resamples(
        len(rows), min(MOST_RESAMPLES, max(1, len(rows))), None, predictions.units and predictions.units.take(rows)
    )
    figures: dict[str, Figure] = {}
    faults: dict[str, str] = {}
    for name, function in metrics.items():
        names = list(inspect.signature(function).parameters)
        answers = chances if names[1:2] and names[1] in SCORES else predicted
        if answers is None:
            faults[name] = "it takes probabilities, and this output keeps none"
            continue
        key = next((each for each in WEIGHTS if each in names), None)

        def compute(places: Any, function: Any = function, answers: Any = answers, key: Any = key) -> float:
            given = {} if key is None or own is None else {key: own[places]}
            value = function(target[places], answers[places], **given)
            number = float(value) if isinstance(value, int | float | np.number) else math.nan
            if not math.isfinite(number):
                raise ValueError(f"it returned {str(value)[:60]!r}, and a number is needed")
            return number

        try:
            figures[name] = find_interval(compute, resamples, seconds)
        except Exception as error:  # the user's code may raise anything
            faults[name] = read_reason(error)
    return figures, faults


def find_interval(compute: Callable[[Any], float], resamples: Resamples, seconds: float) -> Figure:
    """Returns a metric with its interval, from as many resamples as there is time for; those that fail do not count."""
    value, drawn, deadline = compute(slice(None)), list[float](), time.monotonic() + seconds
    for places in resamples.list_places():
        if time.monotonic() > deadline:
            break
        try:
            drawn.append(compute(places))
        except Exception:  # such as a draw without a class
            drawn.append(math.nan)
    if np.isfinite(drawn).sum() < FEWEST_RESAMPLES:
        return Figure(value)
    return resamples.figure(value, np.array([value, *drawn]))
