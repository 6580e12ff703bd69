"""Metrics as sums over examples: means, R2 and balanced accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.interfaces import Measure
from scaleflow.objective.positions import average_positions, spread_weights

Array = np.ndarray[Any, Any]

#: (targets, outputs) -> (a value for each target that is measured [b, ...], which of them count [b, ...] or None).
Values = Callable[[Any, Any], tuple[tf.Tensor, tf.Tensor | None]]


def mean_measure(name: str, values: Values, ignores: bool, finish: Callable[[float], float] = float) -> Measure:
    """Makes a mean over all targets that count.

    Args:
        name: the name of the value.
        values: computes what is averaged.
        ignores: whether some targets may not count.
        finish: is applied to the mean.
    """

    def sum_examples(targets: Any, outputs: Any, weights: tf.Tensor) -> tf.Tensor:
        each, _ = values(targets, outputs)
        return tf.reduce_sum(tf.cast(average_positions(each), tf.float32) * weights)

    def sum_counted(targets: Any, outputs: Any, weights: tf.Tensor) -> tf.Tensor:
        each, counted = values(targets, outputs)
        counts = spread_weights(weights, each) * counted
        return tf.stack([tf.reduce_sum(tf.cast(each, tf.float32) * counts), tf.reduce_sum(counts)])

    if ignores:
        return Measure((name,), sum_counted, lambda sums, total: [finish(divide(sums[0], sums[1]))], size=2)
    return Measure((name,), sum_examples, lambda sums, total: [finish(divide(sums[0], total))])


def r2_measure(name: str, targets_of: Values, outputs_of: Values, columns: int, center: float = 0.0) -> Measure:
    """Makes R2, the mean over the outputs of 1 - (squared error / squared deviation from the mean target).

    An output whose targets are all equal counts 1 if it is predicted exactly, and 0 otherwise, as in scikit-learn.

    Args:
        name: the name of the value.
        targets_of, outputs_of: return targets and outputs [b, ..., columns].
        columns: the size of the last axis.
        center: near the mean of the targets: squares of distances from it are summed.
    """

    def sum_squares(targets: Any, outputs: Any, weights: tf.Tensor) -> tf.Tensor:
        # In float64: the squared deviation is a small difference of large sums if the mean is far from the center.
        true, counted = targets_of(targets, outputs)
        counts = spread_weights(weights, true) if counted is None else spread_weights(weights, true) * counted
        counts, true, predicted = (
            tf.reshape(tf.cast(each, tf.float64), [-1, columns])
            for each in (counts, true, outputs_of(targets, outputs)[0])
        )
        errors, true = true - predicted, true - center
        values = (counts, counts * true, counts * true**2, counts * errors**2)
        return tf.concat([tf.reduce_sum(each, axis=0) for each in values], axis=0)

    def finish(sums: Array, total: float) -> Sequence[float]:
        count, true, squared, error = np.reshape(sums, [4, columns])
        with np.errstate(divide="ignore", invalid="ignore"):
            deviation = np.maximum(squared - true**2 / count, 0)
            is_constant = deviation <= 1e-14 * squared  # what rounding leaves
            r2 = np.where(is_constant, np.where(error > 0, 0.0, 1.0), 1 - error / deviation)
        return [float(np.mean(r2[count > 0])) if (count > 0).any() else float("nan")]

    return Measure((name,), sum_squares, finish, size=4 * columns)


def balanced_accuracy_measure(name: str, decide: Callable[[Any, Any, Any], Any], classes: int) -> Measure:
    """Makes balanced accuracy: the mean over the classes that occur of the share of their targets that are found.

    Args:
        name: the name of the value.
        decide: as `Objective.decide`, but with weights in place of the mask.
        classes: the number of classes.
    """

    def count_found(targets: Any, outputs: Any, weights: tf.Tensor) -> tf.Tensor:
        true, predicted, counts = decide(targets, outputs, weights)
        found = tf.cast(tf.equal(true, predicted), tf.float32) * counts
        return tf.concat([tf.math.unsorted_segment_sum(each, true, classes) for each in (counts, found)], axis=0)

    def finish(sums: Array, total: float) -> Sequence[float]:
        counts, found = np.reshape(sums, [2, classes])
        occurs = counts > 0
        return [float(np.mean(found[occurs] / counts[occurs])) if occurs.any() else float("nan")]

    return Measure((name,), count_found, finish, size=2 * classes)


def divide(value: float, total: float) -> float:
    return float(value) / float(total) if total else float("nan")
