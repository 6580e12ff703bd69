"""The loss and the metrics of each kind of target. Models return logits (or values), never probabilities."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from scaleflow.interfaces import Objective, Outputs


def objective_for(outputs: Outputs) -> Objective:
    """Returns the loss and the metrics for `outputs.kind`."""
    if outputs.kind == "classification":
        count = outputs.shape[-1]
        return Objective(crossentropy, {"accuracy": class_accuracy}, classes=count, decide=largest_classes)
    if outputs.kind == "regression":
        return Objective(squared_error, {"mae": absolute_error, "rmse": squared_error}, finish={"rmse": square_root})
    if outputs.kind == "multi_label":
        return Objective(binary_crossentropy, {"accuracy": binary_accuracy, "exact_match": exact_match})
    is_one = outputs.shape == (1,)
    return Objective(
        binary_crossentropy,
        {"accuracy": binary_accuracy},
        classes=2 if is_one else None,
        decide=positive_outputs if is_one else None,
    )


def crossentropy(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Computes the loss [b] from integer classes [b], or from mixup's shares of the classes [b, classes]."""
    if is_shares(targets, outputs):
        return keras.losses.categorical_crossentropy(targets, outputs, from_logits=True)
    return keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)


def class_accuracy(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Computes the accuracy [b]; with shares, the class with the largest share is the true one."""
    if is_shares(targets, outputs):
        return keras.metrics.categorical_accuracy(targets, outputs)
    return keras.metrics.sparse_categorical_accuracy(targets, outputs)


def is_shares(targets: tf.Tensor, outputs: tf.Tensor) -> bool:
    return bool(targets.shape.rank == outputs.shape.rank)


def binary_crossentropy(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    losses = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(targets, outputs.dtype), outputs)
    return average_outputs(losses)


def binary_accuracy(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return average_outputs(tf.cast(find_correct(targets, outputs), tf.float32))


def exact_match(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns 1 for each example [b] with all labels correct, else 0."""
    correct = find_correct(targets, outputs)
    return tf.cast(tf.reduce_all(tf.reshape(correct, [tf.shape(correct)[0], -1]), axis=1), tf.float32)


def find_correct(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.equal(tf.cast(targets, tf.float32) > 0.5, outputs > 0)


def largest_classes(targets: tf.Tensor, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the true classes [b], and those of the largest logits [b]."""
    return tf.cast(targets, tf.int32), tf.argmax(outputs, axis=-1, output_type=tf.int32)


def positive_outputs(targets: tf.Tensor, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns 0 or 1 for targets [b, 1] and for the signs of the logits [b, 1], both as [b]."""
    return tf.cast(tf.cast(targets[:, 0], tf.float32) > 0.5, tf.int32), tf.cast(outputs[:, 0] > 0, tf.int32)


def square_root(mean: Any) -> Any:
    return mean**0.5


def squared_error(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return average_outputs(tf.square(tf.cast(targets, outputs.dtype) - outputs))


def absolute_error(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return average_outputs(tf.abs(tf.cast(targets, outputs.dtype) - outputs))


def average_outputs(values: tf.Tensor) -> tf.Tensor:
    """Averages [b, ...] over the outputs of each example, to [b]."""
    return tf.reduce_mean(tf.reshape(values, [tf.shape(values)[0], -1]), axis=1)
