"""The default loss and metrics for each kind of target.

Metrics are computed from sums over examples. Models return logits (or values), never probabilities. If an output has
several positions, an example's value is the mean over its positions. Ignored targets (`Outputs.ignore`) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import MAX_CONFUSION_CLASSES, Measure, Mode, Outputs, find_directions


def is_shares(targets: tf.Tensor, outputs: tf.Tensor) -> bool:
    """Returns True for the soft targets of mixup [b, ..., classes], False for integer classes [b, ...]."""
    return bool(targets.shape.rank == outputs.shape.rank)


def find_counted(described: Outputs, targets: tf.Tensor) -> tf.Tensor | None:
    """Returns 1 for each target that counts and 0 for each ignored one, float32; None if no target can be ignored.

    Raises ConfigError for the soft targets of mixup: they no longer show which targets were ignored.
    """
    if described.ignore is None:
        return None
    if described.kind == "classification" and targets.shape.rank != len(described.shape):
        raise ConfigError(
            f"dataset.augment.mixup with targets of which {described.ignore} is ignored (Outputs.ignore): a mixture "
            "of an ignored target and another one has no meaning; remove mixup"
        )
    return tf.cast(tf.not_equal(targets, tf.cast(described.ignore, targets.dtype)), tf.float32)


def replace_ignored(targets: tf.Tensor, counted: tf.Tensor | None) -> tf.Tensor:
    """Replaces ignored targets by 0. That is valid for every kind of target, so their loss is not NaN."""
    return targets if counted is None else tf.where(counted > 0, targets, tf.zeros_like(targets))


#: In a wrong answer, the true class has the logit -WRONG_LOGIT, that is, probability 0.
WRONG_LOGIT = 1e9

#: The logit of the class that a wrong answer predicts. The remaining classes have 0, so there is no tie.
FIRST_LOGIT = 1e-3


def find_not_finite(described: Outputs, targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns True where a target counts but its output is NaN or infinite, [b, ...] bool.

    Classes may have the logit -inf, as long as the largest logit is finite.
    """
    if described.kind == "classification":
        largest = tf.reduce_max(outputs, axis=-1)
        is_bad = tf.reduce_any(tf.math.is_nan(outputs), axis=-1) | ~tf.math.is_finite(largest)
    else:
        is_bad = ~tf.math.is_finite(outputs)
        if described.levels is not None:
            is_bad = tf.reduce_any(is_bad, axis=-1)
    counted = find_counted(described, targets)
    return is_bad if counted is None else is_bad & (counted > 0)


def clear_uncounted(
    described: Outputs, targets: tf.Tensor, outputs: tf.Tensor, weights: tf.Tensor | None = None
) -> tf.Tensor:
    """Replaces NaN and infinite outputs by 0 where the target does not count: NaN * 0 would be NaN.

    Args:
        weights: the weights of the examples [b]. No target of an example with weight 0 counts.
    """
    counted = find_counted(described, targets)
    is_counted = tf.ones(tf.shape(targets), tf.bool) if counted is None else counted > 0
    if weights is not None:
        is_counted &= spread_weights(weights, is_counted) > 0
    if outputs.shape.rank > targets.shape.rank:
        is_counted = is_counted[..., None]
    return tf.where(is_counted | tf.math.is_finite(outputs), outputs, tf.zeros_like(outputs))


def make_answers_wrong(described: Outputs, targets: tf.Tensor, outputs: tf.Tensor, is_bad: tf.Tensor) -> tf.Tensor:
    """Replaces the outputs at `is_bad` by wrong answers. Regression outputs stay unchanged, so their errors are NaN.

    A wrong answer gives the true class the probability 0 and all other classes nearly equal probabilities. It predicts
    the first of them.
    """
    if described.kind == "regression":
        return outputs
    valid = replace_ignored(targets, find_counted(described, targets))
    if described.kind == "classification":
        true = tf.cast(valid, tf.int32)
        classes = tf.range(outputs.shape[-1])
        first_other = tf.where(true == 0, 1, 0)[..., None]
        wrong = tf.where(classes == first_other, FIRST_LOGIT, 0.0)
        wrong = tf.where(classes == true[..., None], -WRONG_LOGIT, wrong)
        return tf.where(is_bad[..., None], tf.cast(wrong, outputs.dtype), outputs)
    sign = tf.where(tf.cast(valid, tf.float32) > 0.5, -1.0, 1.0)
    return tf.where(is_bad, tf.cast(sign * WRONG_LOGIT, outputs.dtype), outputs)


#: Implements `Objective.answers`.
Answers = Callable[[Any, Any, tf.Tensor], tuple[Any, Any, tf.Tensor]]


def make_answers(described: Outputs) -> Answers:
    """Returns `Objective.answers` for one output."""

    def answers(targets: tf.Tensor, outputs: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        def judge() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            is_bad = find_not_finite(described, targets, outputs)
            is_bad_example = tf.reduce_any(flatten_examples(is_bad), axis=1) & (weights > 0)
            usable = clear_uncounted(described, targets, outputs, weights)
            return usable, make_answers_wrong(described, targets, usable, is_bad), is_bad_example

        def take_all() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            return tf.identity(outputs), tf.identity(outputs), tf.zeros(tf.shape(weights), tf.bool)

        usable, measured, is_bad = tf.cond(tf.reduce_all(tf.math.is_finite(outputs)), take_all, judge)
        return tf.ensure_shape(usable, outputs.shape), tf.ensure_shape(measured, outputs.shape), is_bad

    return answers


def average_positions(values: tf.Tensor, counted: tf.Tensor | None = None) -> tf.Tensor:
    """Averages values [b, ...] over the counted positions of each example, to [b]. The mean is 0 if none counts."""
    if values.shape.rank == 1 and counted is None:
        return values
    values = flatten_examples(values)
    if counted is None:
        return tf.reduce_mean(values, axis=1)
    counted = flatten_examples(counted)
    return tf.reduce_sum(values * counted, axis=1) / tf.maximum(tf.reduce_sum(counted, axis=1), 1.0)


def flatten_examples(values: tf.Tensor) -> tf.Tensor:
    """Reshapes [b, ...] to [b, n]."""
    return tf.reshape(values, [tf.shape(values)[0], -1])


def spread_weights(weights: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Repeats the examples' weights [b] to the shape of `like` [b, ...]."""
    return tf.reshape(weights, [-1] + [1] * (like.shape.rank - 1)) * tf.ones_like(like, tf.float32)


Array = np.ndarray[Any, Any]

#: (targets, outputs) -> (values [b, ...], 1 where a value counts and 0 elsewhere [b, ...], or None if all count).
Values = Callable[[Any, Any], tuple[tf.Tensor, tf.Tensor | None]]


def mean_measure(name: str, values: Values, ignores: bool, finish: Callable[[float], float] = float) -> Measure:
    """Returns a measure: the mean over all targets that count.

    Args:
        ignores: whether the dataset can have ignored targets.
        finish: a function to apply to the mean, such as the square root.
    """

    def sum_examples(targets: Any, outputs: Any, weights: tf.Tensor) -> tf.Tensor:
        errors, _ = values(targets, outputs)
        return tf.reduce_sum(tf.cast(average_positions(errors), tf.float32) * weights)

    def sum_counted(targets: Any, outputs: Any, weights: tf.Tensor) -> tf.Tensor:
        errors, counted = values(targets, outputs)
        counts = spread_weights(weights, errors) * counted
        return tf.stack([tf.reduce_sum(tf.cast(errors, tf.float32) * counts), tf.reduce_sum(counts)])

    if ignores:
        return Measure((name,), sum_counted, lambda sums, total: [finish(divide(sums[0], sums[1]))], size=2)
    return Measure((name,), sum_examples, lambda sums, total: [finish(divide(sums[0], total))])


def r2_measure(name: str, targets_of: Values, outputs_of: Values, columns: int, center: float = 0.0) -> Measure:
    """Returns the measure R2: 1 - (squared error / squared deviation from the mean target), averaged over columns.

    As in scikit-learn, a column whose targets are all equal has R2 = 1 if all its predictions are exact, else 0.

    Args:
        targets_of, outputs_of: return targets and outputs [b, ..., columns].
        columns: the size of the last axis.
        center: a value near the mean of the targets. The measure sums squared distances from it.
    """

    def sum_squares(targets: Any, outputs: Any, weights: tf.Tensor) -> tf.Tensor:
        # In float64: the squared deviation is a small difference of large sums if the mean is far from the center.
        true, counted = targets_of(targets, outputs)
        counts = spread_weights(weights, true)
        if counted is not None:
            counts *= counted
        predicted, _ = outputs_of(targets, outputs)
        counts = to_rows(counts)
        true = to_rows(true)
        errors = true - to_rows(predicted)
        deviations = true - center
        terms = (counts, counts * deviations, counts * deviations**2, counts * errors**2)
        return tf.concat([tf.reduce_sum(term, axis=0) for term in terms], axis=0)

    def to_rows(values: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.cast(values, tf.float64), [-1, columns])

    def finish(sums: Array, total: float) -> Sequence[float]:
        count, true, squared, error = np.reshape(sums, [4, columns])
        with np.errstate(divide="ignore", invalid="ignore"):
            deviation = np.maximum(squared - true**2 / count, 0)
            is_constant = deviation <= 1e-14 * squared  # rounding can leave that much instead of 0
            r2 = np.where(is_constant, np.where(error > 0, 0.0, 1.0), 1 - error / deviation)
        return [float(np.mean(r2[count > 0])) if (count > 0).any() else float("nan")]

    return Measure((name,), sum_squares, finish, size=4 * columns)


def balanced_accuracy_measure(name: str, decide: Callable[[Any, Any, Any], Any], classes: int) -> Measure:
    """Returns the measure balanced accuracy: the mean recall of the classes that occur.

    Args:
        decide: like `Objective.decide`, but with weights instead of the mask.
    """

    def count_found(targets: Any, outputs: Any, weights: tf.Tensor) -> tf.Tensor:
        true, predicted, counts = decide(targets, outputs, weights)
        hits = tf.cast(tf.equal(true, predicted), tf.float32) * counts
        return tf.concat([tf.math.unsorted_segment_sum(weighted, true, classes) for weighted in (counts, hits)], axis=0)

    def finish(sums: Array, total: float) -> Sequence[float]:
        counts, hits = np.reshape(sums, [2, classes])
        occurs = counts > 0
        return [float(np.mean(hits[occurs] / counts[occurs])) if occurs.any() else float("nan")]

    return Measure((name,), count_found, finish, size=2 * classes)


def divide(value: float, total: float) -> float:
    return float(value) / float(total) if total else float("nan")


#: (targets, outputs) of one output -> the loss of each target [b, ...], not yet averaged over positions.
Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

#: (targets, outputs, weights [b]) -> the true and the predicted class [n], and their weights [n].
Decide = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor, tf.Tensor]]


@dataclass(frozen=True)
class Defaults:
    """The default loss and metrics of one output. Targets and outputs are tensors [b, ...].

    Attributes:
        loss: the loss of each target.
        measures, evaluation_measures, modes: as in `Objective`.
        classes: the number of classes in the confusion matrix; None if there is no confusion matrix.
        decide: returns true and predicted classes for that matrix; None if `classes` is None.
    """

    loss: Loss
    measures: tuple[Measure, ...]
    evaluation_measures: tuple[Measure, ...] = ()
    modes: Mapping[str, Mode] = field(default_factory=dict)
    classes: int | None = None
    decide: Decide | None = None


def defaults_for(described: Outputs) -> Defaults:
    """Returns the loss and the metrics for `Outputs.kind`."""

    def mean(name: str, value: Loss, finish: Callable[[float], float] = float) -> Measure:
        return mean_measure(name, with_counted(described, value), described.ignore is not None, finish=finish)

    if described.kind == "regression":
        columns = described.shape[-1] if described.shape else 1
        targets = with_counted(described, lambda targets, outputs: targets)
        outputs = with_counted(described, lambda targets, outputs: outputs)
        center = described.scaling[0] if described.scaling else 0.0
        return Defaults(
            squared_error if described.levels is None else make_pinball_loss(described.levels),
            (mean("mae", absolute_error), mean("rmse", squared_error, math.sqrt)),
            (r2_measure("r2", targets, outputs, columns=columns, center=center),),
            modes=find_directions("mae", "rmse", "r2"),
        )
    modes = find_directions("accuracy", "exact_match", "balanced_accuracy")
    if described.kind == "multi_label":
        exact = mean_measure("exact_match", exact_match(described), described.ignore is not None)
        return Defaults(binary_crossentropy, (mean("accuracy", binary_accuracy), exact), modes=modes)
    is_classes = described.kind == "classification"
    loss, accuracy = (crossentropy, class_accuracy) if is_classes else (binary_crossentropy, binary_accuracy)
    count = described.shape[-1] if is_classes else 2
    if count > MAX_CONFUSION_CLASSES or described.shape[-1:] == () or not (is_classes or described.shape[-1] == 1):
        return Defaults(loss, (mean("accuracy", accuracy),), modes=modes)
    decide = decide_classes(described)
    balanced = balanced_accuracy_measure("balanced_accuracy", decide, count)
    return Defaults(loss, (mean("accuracy", accuracy),), (balanced,), modes=modes, classes=count, decide=decide)


def with_counted(described: Outputs, value: Loss) -> Values:
    """Returns a function that replaces ignored targets, computes `value`, and also returns which targets count."""

    def values(targets: tf.Tensor, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        counted = find_counted(described, targets)
        return value(replace_ignored(targets, counted), outputs), counted

    return values


# Classes -------------------------------------------------------------------------------------


def crossentropy(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Computes the cross-entropy [b, ...] for integer classes [b, ...] or soft targets of mixup [b, ..., classes]."""
    if is_shares(targets, outputs):
        return keras.losses.categorical_crossentropy(targets, outputs, from_logits=True)
    return keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)


def class_accuracy(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns 1 where the predicted class is the true one, else 0, [b, ...].

    The true class of a soft target is the class with the largest share.
    """
    if is_shares(targets, outputs):
        return keras.metrics.categorical_accuracy(targets, outputs)
    return keras.metrics.sparse_categorical_accuracy(targets, outputs)


def decide_classes(described: Outputs) -> Decide:
    """Returns the function `Decide` for classification and binary targets."""

    def decide(targets: tf.Tensor, outputs: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        counted = find_counted(described, targets)
        targets = replace_ignored(targets, counted)
        if described.kind == "classification":
            true = tf.cast(targets, tf.int32)
            predicted = tf.argmax(outputs, axis=-1, output_type=tf.int32)
        else:
            true = tf.cast(tf.cast(targets, tf.float32) > 0.5, tf.int32)
            predicted = tf.cast(outputs > 0, tf.int32)
        if true.shape.rank > 1:
            weights = tf.repeat(weights, tf.shape(flatten_examples(true))[1])
        if counted is not None:
            weights *= tf.cast(tf.reshape(counted, [-1]), weights.dtype)
        return tf.reshape(true, [-1]), tf.reshape(predicted, [-1]), weights

    return decide


# 0 or 1 --------------------------------------------------------------------------------------


def binary_crossentropy(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(targets, outputs.dtype), outputs)


def binary_accuracy(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.cast(find_correct(targets, outputs), tf.float32)


def exact_match(described: Outputs) -> Values:
    """Returns a function that gives 1 for each example [b] with all labels correct, else 0."""

    def values(targets: tf.Tensor, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        counted = find_counted(described, targets)
        correct = find_correct(targets, outputs) | (False if counted is None else counted == 0)
        is_exact = tf.cast(tf.reduce_all(flatten_examples(correct), axis=1), tf.float32)
        return is_exact, None if counted is None else tf.reduce_max(flatten_examples(counted), axis=1)

    return values


def find_correct(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.equal(tf.cast(targets, tf.float32) > 0.5, outputs > 0)


# Values --------------------------------------------------------------------------------------


def squared_error(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.square(subtract(targets, outputs))


def absolute_error(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.abs(subtract(targets, outputs))


def make_pinball_loss(levels: Sequence[float]) -> Loss:
    """Returns the pinball loss, averaged over the levels. Its optimum is the quantile (Koenker and Bassett 1978)."""

    def loss(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        errors = subtract(targets[..., None], outputs)
        shares = tf.constant(levels, tf.float32)
        return tf.reduce_mean(tf.maximum(shares * errors, (shares - 1) * errors), axis=-1)

    return loss


def subtract(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns targets - outputs in float32. It subtracts in float64, so close values lose no digits."""
    return tf.cast(tf.cast(targets, tf.float64) - tf.cast(outputs, tf.float64), tf.float32)


#: With more classes, `sum_positions` returns no counts by class.
MAX_COUNTED_CLASSES = 64


def rank_classes(described: Outputs, targets: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the predicted class of each example, its probability, and the probability and rank of the true class.

    Returns:
        `target` [b], `prediction` [b] int32, `probability` [b] of the prediction, `target_probability` [b], and
        `target_rank` [b] int32, which is 1 if no other class is more likely.
    """
    valid = replace_ignored(targets, find_counted(described, targets))
    chances = tf.nn.softmax(outputs)  # NaN where outputs are not finite, so that readers can find these rows
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
        `positions` [b]: the number of positions that count.
        `not_finite` [b]: the number of these whose outputs are NaN or infinite.
        Regression: `mean_error` (absolute) and `squared_error` [b], means over positions.
        Classes and labels: `loss` [b], the mean, and `correct` [b], the share of correct positions.
        Up to 64 classes: the positions of each class, [b, classes] int32, in the targets (`true`), in the predictions
        (`predicted`), and where target and prediction agree (`both`).
        Sequences of classes: `losses` and `counted` [b, positions].
    """
    counted = find_counted(described, targets)
    valid = replace_ignored(targets, counted)
    outputs = clear_uncounted(described, targets, outputs)
    is_counted = tf.ones_like(valid, tf.float32) if counted is None else counted
    is_bad = find_not_finite(described, targets, outputs)
    sums = {
        "positions": tf.cast(tf.reduce_sum(flatten_examples(is_counted), axis=1), tf.int32),
        "not_finite": tf.reduce_sum(tf.cast(flatten_examples(is_bad), tf.int32), axis=1),
    }
    if described.kind == "regression":
        errors = {"mean_error": absolute_error(valid, outputs), "squared_error": squared_error(valid, outputs)}
        for name, of_positions in errors.items():
            sums[name] = average_positions(of_positions, counted)
        return sums
    losses = tf.cast(defaults_for(described).loss(valid, outputs), tf.float32)
    if described.kind != "classification":
        is_correct = tf.cast(find_correct(valid, outputs) & ~is_bad, tf.float32)
        return sums | {"loss": average_positions(losses, counted), "correct": average_positions(is_correct, counted)}
    predicted = tf.argmax(outputs, axis=-1, output_type=tf.int32)
    true = tf.cast(valid, tf.int32)
    is_correct = tf.cast(tf.equal(predicted, true) & ~is_bad, tf.float32)
    is_answered = is_counted * tf.cast(~is_bad, tf.float32)
    sums |= {"loss": average_positions(losses, counted), "correct": average_positions(is_correct, counted)}
    if described.shape[-1] <= MAX_COUNTED_CLASSES:
        weights = {"true": is_counted, "predicted": is_answered, "both": is_counted * is_correct}
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
