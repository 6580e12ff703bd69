"""Baselines: the metrics of a constant prediction that uses the training targets only.

The prediction is the majority class, the more frequent value of each label, or the mean target; for a model with
quantiles, the median. The loss uses the frequency of each class or label, or the quantiles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.interfaces import MAX_CONFUSION_CLASSES, Objective, ObjectiveOptions, Outputs
from scaleflow.interfaces.quantiles import average_pinball_losses, weighted_quantiles
from scaleflow.training.evaluation import MetricSums

Array = np.ndarray[Any, Any]

#: The minimum share of a class. Its logarithm is finite.
MIN_SHARE = 1e-7

#: The maximum number of output values whose metrics are computed at once.
MAX_VALUES_AT_ONCE = 1 << 22

#: The maximum number of output values. Metrics of more are not computed.
MAX_VALUES = 100_000_000


@dataclass(frozen=True)
class Targets:
    """The targets of one output in a split."""

    values: Array  # [n] or [n, *positions] for classification, else [n, *outputs.shape]; ignored values are 0
    counted: Array  # 1 for each value that counts, else 0
    weights: Array  # the weights of the examples, [n]

    @property
    def shares(self) -> Array:
        """The weight of each value."""
        shares: Array = self.counted * np.reshape(self.weights, [-1] + [1] * (self.values.ndim - 1))
        return shares

    @property
    def center(self) -> Array:
        """The mean of the values that count, by weights, [*positions]."""
        mean: Array = (self.values * self.shares).sum(axis=0) / np.maximum(self.shares.sum(axis=0), 1e-12)
        return mean

    def mean(self, values: Array) -> float:
        """Averages over all values that count, as metrics do."""
        return float((values * self.shares).sum() / self.shares.sum())

    def mean_of_examples(self, values: Array) -> float:
        """Averages over an example's values that count, then over examples, as the loss does."""
        sums = flatten_examples(values * self.counted).sum(axis=1)
        counts = flatten_examples(self.counted).sum(axis=1)
        means = sums / np.maximum(counts, 1)
        return float((means * self.weights).sum() / self.weights.sum())


def flatten_examples(values: Array) -> Array:
    """Returns values [n, ...] as [n, values of an example]."""
    return np.reshape(values, [len(values), -1])


def make_targets(outputs: Outputs, values: Array, weights: Array | None) -> Targets:
    counted = np.ones(values.shape)
    if outputs.ignore is not None:
        counted = (values != outputs.ignore).astype(np.float64)
    weights = np.ones(len(values)) if weights is None else weights.astype(np.float64)
    return Targets(np.where(counted > 0, values, 0), counted, weights)


def baseline(outputs: Outputs, train: Targets, evaluated: Targets) -> Mapping[str, float]:
    """Computes the metrics of the constant prediction, and its loss if that is finite."""
    if outputs.kind == "classification":
        return classes_baseline(outputs.shape[-1], train, evaluated)
    center = train.center
    if outputs.kind == "regression":
        unit = 1.0 if outputs.scaling is None else outputs.scaling[1]
        if outputs.levels is None:
            return values_baseline(center, evaluated, unit)
        quantiles = find_quantiles(train, outputs.levels)
        losses = average_pinball_losses(evaluated.values, quantiles, np.array(outputs.levels))
        values = values_baseline(quantiles[:, outputs.levels.index(0.5)], evaluated, unit)
        return values | {"loss": evaluated.mean_of_examples(losses / unit)}
    values = labels_baseline(center, evaluated)
    if outputs.kind == "binary":
        del values["exact_match"]
        predicted = np.broadcast_to(center > 0.5, evaluated.values.shape)
        values["balanced_accuracy"] = balanced_accuracy(evaluated, evaluated.values > 0.5, predicted)
    return values


def find_quantiles(train: Targets, levels: Sequence[float]) -> Array:
    """Returns the quantiles of targets [n, k] at the levels, [k, levels]."""
    columns = zip(train.values.T, train.shares.T, strict=True)
    return np.stack([weighted_quantiles(values, levels, shares) for values, shares in columns])


def classes_baseline(classes: int, train: Targets, evaluated: Targets) -> dict[str, float]:
    counts = np.bincount(np.ravel(train.values).astype(np.int64), weights=np.ravel(train.shares), minlength=classes)
    true = evaluated.values.astype(np.int64)
    predicted = np.full(true.shape, counts.argmax())
    values = {"accuracy": evaluated.mean(true == predicted)}
    if classes <= MAX_CONFUSION_CLASSES:  # above, a run has no such metric
        values["balanced_accuracy"] = balanced_accuracy(evaluated, true, predicted)
    target_counts = np.where(evaluated.counted > 0, counts[true], 1)
    if target_counts.all():  # a class that the training split lacks makes the loss infinite
        values["loss"] = -evaluated.mean_of_examples(np.log(target_counts / counts.sum()))
    return values


def balanced_accuracy(targets: Targets, true: Array, predicted: Array) -> float:
    """Averages the recall over the classes that occur."""
    classes = np.ravel(true).astype(np.int64)
    shares = np.ravel(targets.shares)
    correct_shares = np.bincount(classes, weights=shares * np.ravel(true == predicted))
    all_shares = np.bincount(classes, weights=shares)
    occurs = all_shares > 0
    return float(np.mean(correct_shares[occurs] / all_shares[occurs]))


def labels_baseline(frequency: Array, evaluated: Targets) -> dict[str, float]:
    is_true = evaluated.values > 0.5
    correct = is_true == (frequency > 0.5)
    exact = flatten_examples(correct | (evaluated.counted == 0)).all(axis=1)
    weights = evaluated.weights * (flatten_examples(evaluated.counted) > 0).any(axis=1)
    values = {"accuracy": evaluated.mean(correct), "exact_match": float((exact * weights).sum() / weights.sum())}
    probability = np.where(evaluated.counted > 0, np.where(is_true, frequency, 1 - frequency), 1)
    if probability.all():
        values["loss"] = -evaluated.mean_of_examples(np.log(probability))
    return values


def values_baseline(center: Array, evaluated: Targets, unit: float) -> dict[str, float]:
    """Computes the metrics of a constant. The loss uses values divided by `unit`, as with `Outputs.scaling`."""
    errors = evaluated.values - center
    columns = errors.shape[-1] if errors.ndim > 1 else 1
    true = np.reshape(evaluated.values, [-1, columns])
    squared = np.reshape(errors**2, [-1, columns])
    shares = np.reshape(evaluated.shares, [-1, columns])
    mean = (true * shares).sum(axis=0) / shares.sum(axis=0)
    deviation = (shares * (true - mean) ** 2).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        r2 = 1 - (squared * shares).sum(axis=0) / deviation
    values = {
        "loss": evaluated.mean_of_examples((errors / unit) ** 2),
        "mae": evaluated.mean(np.abs(errors)),
        "rmse": evaluated.mean(errors**2) ** 0.5,
    }
    if (deviation > 0).all():
        values["r2"] = float(r2.mean())
    return values


def baselines(
    outputs: Outputs | Mapping[str, Outputs],
    splits: Mapping[str, Any],
    options: ObjectiveOptions | None = None,
    weights: Mapping[str, Array | None] | None = None,
    objective: Objective | None = None,
) -> Mapping[str, float]:
    """Computes the finite baselines under their metric names, from the targets of the splits.

    `baseline/<metric>` is over the validation split, or over the test split if there is no validation split. If there
    are both, `baseline/test/<metric>` is over the test split. With several outputs it is `baseline/<output>/<metric>`.

    Args:
        outputs: the outputs of the dataset: one, or several by name.
        splits: the targets of the splits `train`, `validation` and `test` that exist: an array, or several by output.
        options: the config group `objective`. A baseline has a loss only if it is the default loss of its target.
        weights: the weights of the examples by split; None for 1 each.
        objective: the metrics; None for the default metrics of the kinds of target.
    """
    options = options or ObjectiveOptions()
    weights = weights or {}
    prefixes = {"validation": "baseline", "test": "baseline/test"}
    if "validation" not in splits:
        prefixes["test"] = "baseline"
    named = {}
    for split, prefix in prefixes.items():
        if split not in splits:
            continue
        values = split_baseline(outputs, options, splits, split=split, weights=weights)
        if objective is not None:
            values = {name: value for name, value in values.items() if name not in objective.replaced}
            if options.metrics:
                constants = make_constants(outputs, splits["train"], weights.get("train"), evaluated=splits[split])
                measured = measure_outputs(objective, splits[split], constants, weights=weights.get(split))
                values = drop_losses(measured) | values
        for name, value in values.items():
            if np.isfinite(value):
                named[f"{prefix}/{name}"] = value
    return named


def drop_losses(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name.rpartition("/")[2] != "loss"}


def make_constants(outputs: Outputs | Mapping[str, Outputs], train: Any, weights: Any, evaluated: Any) -> Any:
    """Makes the constant predictions of the only output, or of each output by name; see `make_constant`."""
    if isinstance(outputs, Outputs):
        return make_constant(outputs, make_targets(outputs, train, weights), len(evaluated))
    constants = {}
    for name, output in outputs.items():
        constants[name] = make_constants(output, train[name], weights, evaluated=evaluated[name])
    return constants


def make_constant(outputs: Outputs, train: Targets, count: int) -> Array:
    """Returns the outputs of a model with the constant prediction: logits or values [count, ...] float32."""
    center = train.center
    if outputs.kind == "classification":
        classes = np.ravel(train.values).astype(np.int64)
        counts = np.bincount(classes, weights=np.ravel(train.shares), minlength=outputs.shape[-1])
        center = np.log(np.maximum(counts / counts.sum(), MIN_SHARE))
    elif outputs.levels is not None:
        center = find_quantiles(train, outputs.levels)
    elif outputs.kind != "regression":
        clipped = np.clip(center, MIN_SHARE, 1 - MIN_SHARE)
        center = np.log(clipped / (1 - clipped))
    return np.broadcast_to(center.astype(np.float32), (count, *outputs.model_shape))


def split_baseline(
    outputs: Outputs | Mapping[str, Outputs],
    options: ObjectiveOptions,
    splits: Mapping[str, Any],
    split: str,
    weights: Mapping[str, Array | None],
) -> dict[str, float]:
    """Computes the baselines over one split."""
    if isinstance(outputs, Outputs):
        train = make_targets(outputs, splits["train"], weights.get("train"))
        evaluated = make_targets(outputs, splits[split], weights.get(split))
        values = dict(baseline(outputs, train, evaluated))
        is_default = options.loss is None and not (options.label_smoothing and outputs.kind != "regression")
        if not is_default:
            values.pop("loss", None)
        return values
    factors = options.loss_weights or {}
    total = 0.0
    all_values: dict[str, float] = {}
    for name, output in outputs.items():
        loss = options.loss.get(name) if isinstance(options.loss, Mapping) else options.loss
        targets = {key: targets_by_output[name] for key, targets_by_output in splits.items()}
        values = split_baseline(output, replace(options, loss=loss), targets, split=split, weights=weights)
        for metric, value in values.items():
            all_values[f"{name}/{metric}"] = value
        total += factors.get(name, 1.0) * values.get("loss", np.nan)
    all_values["loss"] = total
    return all_values


def measure_outputs(objective: Objective, targets: Any, outputs: Any, weights: Array | None = None) -> dict[str, float]:
    """Computes the metrics of outputs [n, ...] for targets [n, ...]: arrays, or dicts of them.

    Returns none for more than `MAX_VALUES` values.
    """
    leaves = tf.nest.flatten(outputs)
    count = len(leaves[0])
    values = sum(leaf.size for leaf in leaves)
    if not count or values > MAX_VALUES:
        return {}
    sums = MetricSums(objective, evaluates=True, takes_scores=True)
    collectors = sums.make_collectors()
    total = np.zeros(sums.size)
    batch = max(1, MAX_VALUES_AT_ONCE * count // max(values, 1))
    all_weights = np.ones(count) if weights is None else weights
    data = (targets, outputs, all_weights.astype(np.float32))
    for first in range(0, count, batch):
        part = slice(first, first + batch)
        own_targets, own_outputs, own_weights = tf.nest.map_structure(
            lambda array, part=part: tf.constant(array[part]), data
        )
        answers = sums.take_answers(own_targets, own_outputs, own_weights)
        _, measured, _ = answers
        mask = tf.ones_like(own_weights)
        batch_sums = sums.compute(own_targets, own_outputs, None, mask=mask, weights=own_weights, answers=answers)
        total += batch_sums.numpy()
        for key, scores in sums.take_scores(own_targets, measured, own_weights).items():
            collectors[key].add(*(score.numpy() for score in scores))
    return dict(sums.means(total, count, collectors))
