"""Computes the user's own metrics, `evaluation.metrics`: functions of all targets and predictions."""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from scaleflow.errors import read_reason
from scaleflow.evaluation.collector import choose_form
from scaleflow.evaluation.intervals import find_quantile
from scaleflow.evaluation.measures import Vectors, read_classes
from scaleflow.evaluation.outputs import read_vectors
from scaleflow.evaluation.predictions import Predictions
from scaleflow.evaluation.resampling import CONFIDENCE, Resamples, find_percentiles
from scaleflow.interfaces import Outputs
from scaleflow.interfaces.config import METRIC_WEIGHTS
from scaleflow.interfaces.estimate import Estimate

Array = np.ndarray[Any, Any]
Metrics = Mapping[str, Callable[..., Any]]

#: A parameter with one of these names gets probabilities. Any other name gets predictions.
SCORES = ("y_score", "y_prob", "y_proba", "y_pred_proba", "scores", "probabilities")

#: Maximum and minimum number of resamples for an interval.
MAX_RESAMPLES = 200
MIN_RESAMPLES = 50

#: Maximum and minimum number of parts to leave out in turn, if there is no time for resamples.
MAX_PARTS = 40
MIN_PARTS = 10


def measure_own(
    predictions: Predictions, output: str, described: Outputs, metrics: Metrics, seconds: float
) -> tuple[dict[str, Estimate], dict[str, str]]:
    """Computes the user's metrics of one output.

    Classes are numbers from 0. With two classes the second one is 1, and scores are its probability. Labels and several
    values are [n, k].

    Args:
        seconds: the time for the intervals of each metric.

    Returns:
        The metrics with their intervals, and the reasons for missing ones.
    """
    form = choose_form(described)
    if form == "positions":
        return {}, dict.fromkeys(metrics, "examples with many positions are kept as sums only")
    if form in ("class", "best"):
        data = read_classes(predictions, output, described)
        rows = data.rows
        target = data.target
        predicted = data.predicted
        chances = data.chances
        if chances is not None and len(data.names) == 2:
            chances = chances[:, 1]
    else:
        vectors = read_vectors(predictions, output, described)
        rows = vectors.rows
        target = vectors.target
        predicted = vectors.prediction
        chances = vectors.chances
        why = find_gap(vectors)
        if why:
            return {}, dict.fromkeys(metrics, why)
        if len(predicted.T) == 1:
            target = target[:, 0]
            predicted = predicted[:, 0]
    weights = predictions.weights()
    own = None if weights is None else weights[rows].astype(np.float64)
    units = predictions.units and predictions.units.take(rows)
    resamples = Resamples(len(rows), units)
    estimates: dict[str, Estimate] = {}
    faults: dict[str, str] = {}
    for name, function in metrics.items():
        try:
            compute = bind_examples(function, target, predicted, chances=chances, weights=own)
            estimates[name] = find_interval(compute, len(rows), resamples, seconds=seconds)
        except (Exception, SystemExit) as error:  # user code may raise anything
            faults[name] = read_reason(error)
    return estimates, faults


def find_gap(data: Vectors) -> str:
    """Returns why functions of all targets and predictions cannot be computed; empty if they can."""
    if data.chances is None and data.not_finite:
        return f"{data.not_finite:,} examples have outputs that are not finite"
    if not len(data.rows):
        return "no example has a target"
    if not data.is_complete:
        return "some targets are missing (Outputs.ignore), and it takes all values of an example"
    return ""


def bind_examples(
    function: Callable[..., Any], target: Array, predicted: Array, chances: Array | None, weights: Array | None
) -> Callable[[Array], float]:
    """Returns a function from places of examples to the metric. Raises ValueError if the output lacks its arguments."""
    names = list(inspect.signature(function).parameters)
    answers = chances if names[1:2] and names[1] in SCORES else predicted
    if answers is None:
        raise ValueError("it takes probabilities, and this output keeps none")
    key = next((name for name in METRIC_WEIGHTS if name in names), None)

    def compute(places: Array) -> float:
        arguments = {}
        if key is not None:
            arguments[key] = np.ones(len(places)) if weights is None else weights[places]
        result = function(target[places], answers[places], **arguments)  # copies, because the function may change them
        value = np.asarray(result)
        if value.ndim or value.dtype.kind not in "iuf" or not np.isfinite(value):
            raise ValueError(f"it returned {str(result)[:60]!r}, and a number is needed")
        return float(value)

    return compute


def find_interval(compute: Callable[[Array], float], count: int, resamples: Resamples, seconds: float) -> Estimate:
    """Returns a metric of `count` examples with its interval.

    The interval has the percentiles of resamples of all examples. If there is not enough time, parts of the examples
    are left out in turn (the jackknife). A resample does not count if the metric fails on it.
    """
    began = time.monotonic()
    value = compute(np.arange(count))
    possible = seconds / max(time.monotonic() - began, 1e-9)
    deadline = began + seconds
    if resamples.unit_count < 2:
        return Estimate(value)
    if possible >= MIN_RESAMPLES:
        drawn = compute_each(compute, resamples.draw(MAX_RESAMPLES), deadline)
        if len(drawn) < MIN_RESAMPLES or not np.ptp(drawn):  # too few values, or no spread
            return Estimate(value)
        low, high = np.percentile(drawn, find_percentiles(CONFIDENCE, resamples.unit_count))
        return Estimate(value, float(low), float(high))
    parts = min(MAX_PARTS, resamples.unit_count, int(possible))
    if parts < MIN_PARTS:
        return Estimate(value)
    partial_values = compute_each(compute, resamples.leave_out(parts), math.inf)
    error = (
        math.sqrt(float(np.var(partial_values)) * (len(partial_values) - 1)) if len(partial_values) == parts else 0.0
    )
    half = float(find_quantile(CONFIDENCE, parts - 1)) * error
    return Estimate(value, value - half, value + half) if half else Estimate(value)


def compute_each(compute: Callable[[Array], float], samples: Iterable[Array], deadline: float) -> list[float]:
    """Computes a metric on each sample of examples, until the deadline. Skips samples for which it fails."""
    values: list[float] = []
    for places in samples:
        if time.monotonic() > deadline:
            break
        with contextlib.suppress(Exception):  # for instance if a sample lacks a class
            values.append(compute(places))
    return values
