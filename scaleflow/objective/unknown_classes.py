"""Targets of classes that the model does not know: counts them, and takes them for wrong answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.interfaces import Measure, Objective, Outputs, name_leaves
from scaleflow.objective.measures import divide
from scaleflow.objective.positions import find_counted

#: The names of two values: the share of the examples whose class is known, and the number of the others.
KNOWN_SHARE, UNKNOWN_CLASSES = "known_share", "unknown_classes"


def add_unknown_count(goal: Objective, outputs: Mapping[str, Outputs]) -> Objective:
    """Adds the two values for outputs, by name, whose `ignore` is the target of unknown classes."""
    measures = [make_unknown_measure(name, each) for name, each in outputs.items()]
    return replace(goal, measures=[*goal.measures, *measures])


def make_unknown_measure(output: str, described: Outputs) -> Measure:
    """Makes the two values of one output; its name is "" if it is the only one."""

    def sums(targets: Any, outputs: Any, weights: tf.Tensor) -> tf.Tensor:
        counted = find_counted(described, name_leaves(targets)[output])
        is_known = tf.reshape(counted, [-1])
        is_unknown = tf.cast(weights > 0, tf.float32) * (1 - is_known)
        return tf.stack([tf.reduce_sum(is_known * weights), tf.reduce_sum(is_unknown)])

    def finish(values: np.ndarray[Any, Any], total: float) -> Sequence[float]:
        return [divide(values[0], total), float(values[1])]

    return Measure((join_name(output, KNOWN_SHARE), join_name(output, UNKNOWN_CLASSES)), sums, finish, size=2)


def count_as_wrong(values: Mapping[str, float], loss_weights: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics in which examples of unknown classes are wrong answers, without their share.

    The loss, which is 0 for them, becomes the mean over the known ones. Accuracies, all values whose name ends in
    `accuracy`, but not balanced ones, become those over all examples. Other values are of the known ones.

    Args:
        values: metrics by name, with the values of `add_unknown_count`.
        loss_weights: of several outputs, their weights in the loss.
    """
    result = dict(values)
    for key in [key for key in values if key.rpartition("/")[2] == KNOWN_SHARE]:
        output, share = key.rpartition("/")[0], result.pop(key)
        loss = values[join_name(output, "loss")]
        if share:
            result["loss"] += loss_weights.get(output, 1.0) * loss * (1 / share - 1)
        result[join_name(output, "loss")] = divide(loss, share)
        for name, value in values.items():
            metric = name.removeprefix(join_name(output, ""))
            if metric.endswith("accuracy") and metric != "balanced_accuracy" and "/" not in metric:
                result[name] = value * share if share else 0.0
    return result


def join_name(output: str, metric: str) -> str:
    return f"{output}/{metric}" if output else metric
