"""What is kept of an output for each example, if that is less than the output itself. Traced, in a replica."""

from __future__ import annotations

import tensorflow as tf

from scaleflow.interfaces import Outputs
from scaleflow.objective.kinds import (
    absolute_error,
    average_positions,
    defaults_for,
    find_correct,
    find_counted,
    flatten_examples,
    replace_ignored,
    squared_error,
)

#: With more classes, the positions of each class are not counted.
MOST_COUNTED_CLASSES = 64


def rank_classes(described: Outputs, targets: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the most likely class of each example, and what the model says of the true one.

    Returns:
        `prediction` [b] int32, its `probability` [b], `target_probability` [b], and `target_rank` [b] int32, which is 1
        if no other class is more likely.
    """
    valid = replace_ignored(targets, find_counted(described, targets))
    chances = tf.nn.softmax(outputs)
    of_target = tf.gather(chances, tf.cast(valid, tf.int32), batch_dims=1)
    return {
        "target": targets,
        "prediction": tf.argmax(outputs, axis=-1, output_type=tf.int32),
        "probability": tf.reduce_max(chances, axis=-1),
        "target_probability": of_target,
        "target_rank": 1 + tf.reduce_sum(tf.cast(chances > of_target[:, None], tf.int32), axis=-1),
    }


def sum_positions(described: Outputs, targets: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns means and sums over the positions of each example.

    Returns:
        `positions` [b]: how many of them count. Of values: `mean_error` and `squared_error` [b], means over positions.
        Of classes and labels: the mean `loss` [b] and the share that is `correct` [b]; of at most 64 classes also how
        many positions have each class by the targets (`true`), by the model (`predicted`) and by `both`, [b, classes]
        int32; of sequences also `losses` and `counted` [b, positions].
    """
    counted = find_counted(described, targets)
    valid = replace_ignored(targets, counted)
    is_counted = tf.ones_like(valid, tf.float32) if counted is None else counted
    sums = {"positions": tf.cast(tf.reduce_sum(flatten_examples(is_counted), axis=1), tf.int32)}
    if described.kind == "regression":
        errors = {"mean_error": absolute_error(valid, outputs), "squared_error": squared_error(valid, outputs)}
        return sums | {name: average_positions(each, counted) for name, each in errors.items()}
    losses = tf.cast(defaults_for(described).loss(valid, outputs), tf.float32)
    if described.kind != "classification":
        is_correct = tf.cast(find_correct(valid, outputs), tf.float32)
        return sums | {"loss": average_positions(losses, counted), "correct": average_positions(is_correct, counted)}
    predicted, true = tf.argmax(outputs, axis=-1, output_type=tf.int32), tf.cast(valid, tf.int32)
    is_correct = tf.cast(tf.equal(predicted, true), tf.float32)
    sums |= {"loss": average_positions(losses, counted), "correct": average_positions(is_correct, counted)}
    if described.shape[-1] <= MOST_COUNTED_CLASSES:
        weights = {"true": is_counted, "predicted": is_counted, "both": is_counted * is_correct}
        classes = {"true": true, "predicted": predicted, "both": true}
        sums |= {name: count_classes_of_examples(classes[name], weights[name], described.shape[-1]) for name in classes}
    if len(described.shape) == 2:
        sums |= {"losses": losses * is_counted, "counted": is_counted}
    return sums


def count_classes_of_examples(classes: tf.Tensor, weights: tf.Tensor, count: int) -> tf.Tensor:
    """Counts the positions of each class in each example, [b, count] int32, from classes and weights [b, ...]."""
    flat = flatten_examples(classes)
    examples = tf.shape(flat)[0]
    places = flat + tf.range(examples)[:, None] * count
    sums = tf.math.unsorted_segment_sum(tf.reshape(weights, [-1]), tf.reshape(places, [-1]), examples * count)
    return tf.cast(tf.reshape(sums, [examples, count]), tf.int32)
