"""Compares two models on the same test examples with a paired interval: do they differ by more than chance?"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.evaluation.collector import EXAMPLE
from scaleflow.evaluation.intervals import Intervals
from scaleflow.evaluation.predictions import ID, PREDICTIONS, Predictions, find_units, load_predictions
from scaleflow.evaluation.resampling import Units
from scaleflow.interfaces import Outputs, name_leaves
from scaleflow.runs.run import Run

#: Relative step of a numeric derivative (absolute for means below 1).
STEP = 1e-6

#: A metric computed from kept predictions is accepted if it is this close to the reported value, relatively.
SAME = 1e-3

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ExampleValues:
    """The values that a metric is computed from. The metric is a function of their weighted means over the examples."""

    values: Array  # per example, [n, k] float64
    weights: Array  # per example, [n], or [n, k] like `values`
    finish: Callable[[Array], Array]  # computes the metric from the k means, [..., k] to [...]

    def compute(self) -> float:
        """Returns the metric over all examples."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(self.finish((self.values * self.weights).sum(axis=0) / self.weights.sum(axis=0)))

    def find_influence(self) -> Array:
        """Returns how much the metric changes with each example's weight, [n]."""
        totals = self.weights.sum(axis=0)
        is_known = totals > 0
        means = np.where(is_known, (self.values * self.weights).sum(axis=0) / np.where(is_known, totals, 1), np.nan)
        influence = np.zeros(len(self.values))
        for n in np.flatnonzero(is_known):
            size = STEP * max(1.0, abs(float(means[n])))
            step = np.zeros(len(means))
            step[n] = size
            slope = float(self.finish(means + step) - self.finish(means - step)) / (2 * size)
            weights = np.broadcast_to(self.weights, self.values.shape)[:, n]
            influence += slope * weights * (self.values[:, n] - means[n]) / totals[n]
        return influence


def compare_examples(first: ExampleValues, second: ExampleValues, units: Units | None = None) -> tuple[float, float]:
    """Returns the bounds, at 95 %, of the difference between two models' metrics (second - first) on the same examples.

    The influence of each example on both metrics is subtracted. So examples that are hard for both models do not count
    as noise.
    """
    intervals = Intervals(len(first.values), units=units)
    influence = second.find_influence() - first.find_influence()
    difference = intervals.number(second.compute() - first.compute(), influence)
    return difference.low, difference.high


class PairedPredictions:
    """The kept predictions of two runs for the same examples.

    Attributes:
        reason: why there are no pairs; empty if there are.
        split: `test` or `validation`.
        units: examples that are resampled together; None: each alone.
    """

    def __init__(self, first: Run, second: Run, has_same_data: bool = False) -> None:
        self.reason = ""
        self.split = ""
        self.count = 0
        self.units: Units | None = None
        self._runs: list[tuple[Predictions, Array]] = []
        paths = {"first": first.files.evaluation / PREDICTIONS, "second": second.files.evaluation / PREDICTIONS}
        missing = [name for name, path in paths.items() if not path.is_file()]
        if missing:
            self.reason = f"the {' and the '.join(missing)} run kept no predictions"
            return
        try:
            before = load_predictions(paths["first"])
            now = load_predictions(paths["second"])
        except ConfigError as error:
            self.reason = str(error)
            return
        self._pair(before, now, has_same_data)

    def _pair(self, before: Predictions, now: Predictions, has_same_data: bool) -> None:
        """Matches the examples of two files by their numbers, or by their ids if the data may differ."""
        key = EXAMPLE if has_same_data or before.digest == now.digest else ID
        if before.split != now.split or not before.has(key) or not now.has(key):
            self.reason = "the runs were tested on other examples"
            return
        _, first_rows, second_rows = np.intersect1d(
            before.column(key), now.column(key), assume_unique=True, return_indices=True
        )
        self._runs = [(before, first_rows), (now, second_rows)]
        self.split = before.split
        self.count = len(first_rows)
        self.units = find_units(*self._runs)
        if not self.count:
            self.reason = "the runs were tested on other examples"

    def find(self, metric: str, values: tuple[float, float]) -> tuple[ExampleValues, ExampleValues] | None:
        """Returns the values of a metric in both runs, or None if kept predictions do not yield it.

        `metric` is its name without the split. `values` are the values that the runs reported.
        """
        output, _, name = metric.rpartition("/")
        if not self._runs:
            return None
        (before, first_rows), (now, second_rows) = self._runs
        first_candidates = list_values(before, output, name, rows=first_rows)
        second_candidates = list_values(now, output, name, rows=second_rows)
        for first, second in zip(first_candidates, second_candidates, strict=False):
            if np.allclose([first.compute(), second.compute()], values, rtol=SAME, atol=SAME):
                return first, second
        return None


def list_values(predictions: Predictions, output: str, metric: str, rows: Array) -> Iterator[ExampleValues]:
    """Yields the candidates for computing an output's metric from kept predictions."""
    outputs: dict[str, Outputs] = name_leaves(predictions.outputs)
    if output not in outputs:
        return

    def column(name: str) -> Array:
        return predictions.column(name, output)[rows]

    weights = predictions.weights()
    weights = np.ones(len(rows)) if weights is None else weights[rows].astype(np.float64)
    if predictions.has("positions", output):
        weights = weights * column("positions")
        for name in {"loss": ("loss",), "accuracy": ("correct",), "mae": ("mean_error",)}.get(metric, ()):
            if predictions.has(name, output):
                yield ExampleValues(column(name)[:, None], weights[:, None], first_value)
    elif predictions.has("target_probability", output):
        yield from list_class_values(column, metric, weights)
    elif predictions.has("target", output) and predictions.has("prediction", output):
        targets = column("target").astype(np.float64)
        weights = weights * ~np.isnan(targets)  # without targets that do not count
        errors = np.where(weights > 0, column("prediction").astype(np.float64) - targets, 0.0)
        plain = {"mae": abs(errors), "mse": errors**2}
        for name in {"mae": ("mae",), "mse": ("mse",), "loss": ("mse", "mae")}.get(metric, ()):
            yield ExampleValues(plain[name][:, None], weights[:, None], first_value)
        if metric == "rmse":
            yield ExampleValues(plain["mse"][:, None], weights[:, None], lambda means: np.sqrt(means[..., 0]))


def list_class_values(column: Callable[[str], Array], metric: str, weights: Array) -> Iterator[ExampleValues]:
    """Yields the candidates for an output with one class per example."""
    targets = column("target")
    chances = column("target_probability").astype(np.float64)
    if targets.dtype == object:
        counts = np.array([target is not None for target in targets])
    else:
        counts = ~np.isnan(targets)
    correct = (targets == column("prediction")).astype(np.float64)
    weights = weights * counts
    if metric == "accuracy":
        yield ExampleValues(correct[:, None], weights[:, None], first_value)
    elif metric == "loss":
        losses = -np.log(np.where(counts, np.maximum(chances, np.finfo(np.float32).tiny), 1.0))
        yield ExampleValues(losses[:, None], weights[:, None], first_value)
    elif metric == "balanced_accuracy":
        classes = np.unique(targets[counts])
        of_class = (targets[:, None] == classes) * weights[:, None]
        yield ExampleValues(
            np.repeat(correct[:, None], len(classes), axis=1), of_class, lambda m: np.nanmean(m, axis=-1)
        )


def first_value(means: Array) -> Array:
    """Returns the mean itself as the metric."""
    return means[..., 0]
