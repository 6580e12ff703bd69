"""The loss and the metrics of each kind of target. Models return logits (or values), never probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import keras
import tensorflow as tf

from scaleflow.interfaces import MOST_CONFUSION_CLASSES, Measure, Outputs
from scaleflow.objective.measures import Values, balanced_accuracy_measure, mean_measure, r2_measure
from scaleflow.objective.positions import find_counted, flatten_examples, is_shares, replace_ignored

#: (targets, outputs) of one output -> the loss of each target [b, ...], before it is averaged over positions.
Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

#: (targets, outputs, weights [b]) -> the true and the predicted class [n], and their weights [n].
Decide = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor, tf.Tensor]]


@dataclass(frozen=True)
class Defaults:
    """The loss and the metrics of one output by its kind. Targets and outputs are tensors [b, ...].

    Attributes:
        loss: the loss of each target.
        measures, evaluation_measures, modes: as in `Objective`.
        classes: the number of classes, if targets are classes and there is a confusion matrix; otherwise None.
        decide: with `classes`.
    """

    loss: Loss
    measures: tuple[Measure, ...]
    evaluation_measures: tuple[Measure, ...] = ()
    modes: Mapping[str, Literal["min", "max"]] = field(default_factory=dict)
    classes: int | None = None
    decide: Decide | None = None


def defaults_for(described: Outputs) -> Defaults:
    """Returns the loss and the metrics for `Outputs.kind`."""

    def mean(name: str, value: Loss, finish: Callable[[float], float] = float) -> Measure:
        return mean_measure(name, with_counted(described, value), described.ignore is not None, finish)

    if described.kind == "regression":
        columns = described.shape[-1] if described.shape else 1
        targets, outputs = (with_counted(described, each) for each in (get_targets, get_outputs))
        return Defaults(
            squared_error,
            (mean("mae", absolute_error), mean("rmse", squared_error, square_root)),
            (r2_measure("r2", targets, outputs, columns, described.scaling[0] if described.scaling else 0.0),),
            {"mae": "min", "rmse": "min", "r2": "max"},
        )
    modes: dict[str, Literal["min", "max"]] = {"accuracy": "max", "exact_match": "max", "balanced_accuracy": "max"}
    if described.kind == "multi_label":
        exact = mean_measure("exact_match", exact_match(described), described.ignore is not None)
        return Defaults(binary_crossentropy, (mean("accuracy", binary_accuracy), exact), modes=modes)
    is_classes = described.kind == "classification"
    loss, accuracy = (crossentropy, class_accuracy) if is_classes else (binary_crossentropy, binary_accuracy)
    count = described.shape[-1] if is_classes else 2
    if count > MOST_CONFUSION_CLASSES or described.shape[-1:] == () or not (is_classes or described.shape[-1] == 1):
        return Defaults(loss, (mean("accuracy", accuracy),), modes=modes)
    decide = decide_classes(described)
    balanced = balanced_accuracy_measure("balanced_accuracy", decide, count)
    return Defaults(loss, (mean("accuracy", accuracy),), (balanced,), modes, count, decide)


def with_counted(described: Outputs, value: Loss) -> Values:
    """Returns a function that computes values for valid targets, and which of them count."""

    def values(targets: tf.Tensor, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        counted = find_counted(described, targets)
        return value(replace_ignored(targets, counted), outputs), counted

    return values


# ---------------------------------------------------------------------------------------------
# Classes
# ---------------------------------------------------------------------------------------------


def crossentropy(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Computes the losses [b, ...] from integer classes [b, ...], or from mixup's shares [b, ..., classes]."""
    if is_shares(targets, outputs):
        return keras.losses.categorical_crossentropy(targets, outputs, from_logits=True)
    return keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)


def class_accuracy(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Computes whether the class is found [b, ...]; with shares, the class with the largest share is the true one."""
    if is_shares(targets, outputs):
        return keras.metrics.categorical_accuracy(targets, outputs)
    return keras.metrics.sparse_categorical_accuracy(targets, outputs)


def decide_classes(described: Outputs) -> Decide:
    """Makes `Objective.decide` for classes, and for 0 or 1."""

    def decide(targets: tf.Tensor, outputs: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        counted = find_counted(described, targets)
        targets = replace_ignored(targets, counted)
        if described.kind == "classification":
            true, predicted = tf.cast(targets, tf.int32), tf.argmax(outputs, axis=-1, output_type=tf.int32)
        else:
            true, predicted = (tf.cast(each, tf.int32) for each in (tf.cast(targets, tf.float32) > 0.5, outputs > 0))
        if true.shape.rank > 1:
            weights = tf.repeat(weights, tf.shape(flatten_examples(true))[1])
        if counted is not None:
            weights *= tf.cast(tf.reshape(counted, [-1]), weights.dtype)
        return tf.reshape(true, [-1]), tf.reshape(predicted, [-1]), weights

    return decide


# ---------------------------------------------------------------------------------------------
# 0 or 1
# ---------------------------------------------------------------------------------------------


def binary_crossentropy(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(targets, outputs.dtype), outputs)


def binary_accuracy(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.cast(find_correct(targets, outputs), tf.float32)


def exact_match(described: Outputs) -> Values:
    """Makes a function that returns 1 for each example [b] with all labels correct, else 0."""

    def values(targets: tf.Tensor, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        counted = find_counted(described, targets)
        correct = find_correct(targets, outputs)
        if counted is None:
            return tf.cast(tf.reduce_all(flatten_examples(correct), axis=1), tf.float32), None
        is_exact = tf.reduce_all(flatten_examples(correct | (counted == 0)), axis=1)
        return tf.cast(is_exact, tf.float32), tf.reduce_max(flatten_examples(counted), axis=1)

    return values


def find_correct(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.equal(tf.cast(targets, tf.float32) > 0.5, outputs > 0)


# ---------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------


def get_targets(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return targets


def get_outputs(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return outputs


def squared_error(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.square(subtract(targets, outputs))


def absolute_error(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.abs(subtract(targets, outputs))


def subtract(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns the errors in float32, without rounding what they are the difference of."""
    return tf.cast(tf.cast(targets, tf.float64) - tf.cast(outputs, tf.float64), tf.float32)


def square_root(mean: float) -> float:
    return float(mean**0.5)
