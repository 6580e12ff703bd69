"""Baselines: the metrics of a constant prediction that uses the training targets only.

The prediction is the majority class, the more frequent value of each label, or the mean target, of quantiles the
median. For the loss it is the frequency of each class or label, or the quantiles.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.interfaces import MOST_CONFUSION_CLASSES, Objective, ObjectiveOptions, Outputs
from scaleflow.interfaces.quantiles import average_pinball_losses, weighted_quantiles
from scaleflow.training.evaluation import MetricSums

Array = np.ndarray[Any, Any]

#: The least share of a class, whose logarithm is taken.
LEAST_SHARE = 1e-7


@dataclass(frozen=True)
class Targets:
    """The targets of one output in a split."""

    values: Array  # [n] or [n, *positions] for classification, else [n, *outputs.shape]; 0 for those that are ignored
    counted: Array  # 1 for each value that counts, else 0
    weights: Array  # of the examples, [n]

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
        flat, counted = (np.reshape(each, [len(values), -1]) for each in (values * self.counted, self.counted))
        each = flat.sum(axis=1) / np.maximum(counted.sum(axis=1), 1)
        return float((each * self.weights).sum() / self.weights.sum())


def make_targets(outputs: Outputs, values: Array, weights: Array | None) -> Targets:
    counted = np.ones(values.shape) if outputs.ignore is None else (values != outputs.ignore).astype(np.float64)
    each = np.ones(len(values)) if weights is None else weights.astype(np.float64)
    return Targets(np.where(counted > 0, values, 0), counted, each)


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
    if classes <= MOST_CONFUSION_CLASSES:  # above, a run has no such metric
        values["balanced_accuracy"] = balanced_accuracy(evaluated, true, predicted)
    target_counts = np.where(evaluated.counted > 0, counts[true], 1)
    if target_counts.all():  # a class that the training split lacks makes the loss infinite
        values["loss"] = -evaluated.mean_of_examples(np.log(target_counts / counts.sum()))
    return values


def balanced_accuracy(targets: Targets, true: Array, predicted: Array) -> float:
    """Averages the share of each class's targets that are found, over the classes that occur."""
    classes, shares = np.ravel(true).astype(np.int64), np.ravel(targets.shares)
    found = np.bincount(classes, weights=shares * np.ravel(true == predicted))
    all_shares = np.bincount(classes, weights=shares)
    occurs = all_shares > 0
    return float(np.mean(found[occurs] / all_shares[occurs]))


def labels_baseline(frequency: Array, evaluated: Targets) -> dict[str, float]:
    is_true = evaluated.values > 0.5
    correct = is_true == (frequency > 0.5)
    exact = np.reshape(correct | (evaluated.counted == 0), [len(correct), -1]).all(axis=1)
    weights = evaluated.weights * (np.reshape(evaluated.counted, [len(correct), -1]) > 0).any(axis=1)
    values = {"accuracy": evaluated.mean(correct), "exact_match": float((exact * weights).sum() / weights.sum())}
    probability = np.where(evaluated.counted > 0, np.where(is_true, frequency, 1 - frequency), 1)
    if probability.all():
        values["loss"] = -evaluated.mean_of_examples(np.log(probability))
    return values


def values_baseline(center: Array, evaluated: Targets, unit: float) -> dict[str, float]:
    """Computes the metrics of a constant; the loss is that of values divided by `unit`, as with `Outputs.scaling`."""
    errors = evaluated.values - center
    columns = errors.shape[-1] if errors.ndim > 1 else 1
    true, squared, shares = (
        np.reshape(each, [-1, columns]) for each in (evaluated.values, errors**2, evaluated.shares)
    )
    mean = (true * shares).sum(axis=0) / shares.sum(axis=0)
    deviation = (shares * (true - mean) ** 2).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        r2 = 1 - (squared * shares).sum(axis=0) / deviation
    values = {
        "loss": evaluated.mean_of_examples((errors / unit) ** 2),
        "mae": evaluated.mean(np.abs(errors)),
        "rmse": evaluated.mean(errors**2) ** 0.5,
    }
    return values | ({"r2": float(r2.mean())} if (deviation > 0).all() else {})


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
        splits: the targets of `train`, `validation` and `test`, as far as they exist: an array, or several by output.
        options: the config group `objective`. A baseline has a loss only if that is the one of the kind of target.
        weights: the weights of the examples by split; None for 1 each.
        objective: the metrics; None: those of the kinds of target.
    """
    options, weights = options or ObjectiveOptions(), weights or {}
    replaced: Set[str] = frozenset() if objective is None else objective.replaced
    chosen = [split for split in ("validation", "test") if split in splits]
    found = {split: split_baseline(outputs, options, splits, split=split, weights=weights) for split in chosen}
    for split, values in found.items():
        kept = {name: value for name, value in values.items() if name not in replaced}
        if objective is not None and options.metrics:
            constant = make_constants(outputs, splits["train"], weights.get("train"), evaluated=splits[split])
            measured = measure_outputs(objective, splits[split], constant, weights=weights.get(split))
            kept = {name: value for name, value in measured.items() if name.rpartition("/")[2] != "loss"} | kept
        found[split] = kept
    names = {"validation": "baseline", "test": "baseline/test" if "validation" in splits else "baseline"}
    return {
        f"{prefix}/{name}": value
        for split, prefix in names.items()
        for name, value in found.get(split, {}).items()
        if np.isfinite(value)
    }


def make_constants(outputs: Outputs | Mapping[str, Outputs], train: Any, weights: Any, evaluated: Any) -> Any:
    """Returns what `make_constant` does for the only output, or for each output by name."""
    if isinstance(outputs, Outputs):
        return make_constant(outputs, make_targets(outputs, train, weights), len(evaluated))
    return {n: make_constants(each, train[n], weights, evaluated=evaluated[n]) for n, each in outputs.items()}


def make_constant(outputs: Outputs, train: Targets, count: int) -> Array:
    """Returns what a model returns that always gives the constant prediction: logits or values [count, ...] float32."""
    center = train.center
    if outputs.kind == "classification":
        classes = np.ravel(train.values).astype(np.int64)
        counts = np.bincount(classes, weights=np.ravel(train.shares), minlength=outputs.shape[-1])
        center = np.log(np.maximum(counts / counts.sum(), LEAST_SHARE))
    elif outputs.levels is not None:
        center = find_quantiles(train, outputs.levels)
    elif outputs.kind != "regression":
        clipped = np.clip(center, LEAST_SHARE, 1 - LEAST_SHARE)
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
        train, evaluated = (make_targets(outputs, splits[name], weights.get(name)) for name in ("train", split))
        values = baseline(outputs, train, evaluated)
        is_default = options.loss is None and not (options.label_smoothing and outputs.kind != "regression")
        return {name: value for name, value in values.items() if name != "loss" or is_default}
    factors, total, found = options.loss_weights or {}, 0.0, dict[str, float]()
    for output, described in outputs.items():
        loss = options.loss.get(output) if isinstance(options.loss, Mapping) else options.loss
        part = {name: targets[output] for name, targets in splits.items()}
        values = split_baseline(described, replace(options, loss=loss), part, split=split, weights=weights)
        found |= {f"{output}/{name}": value for name, value in values.items()}
        total += factors.get(output, 1.0) * values.get("loss", np.nan)
    return {**found, "loss": total}


#: The most values of outputs of which metrics are computed at once, and at all.
VALUES_AT_ONCE, MOST_VALUES = 1 << 22, 100_000_000


def measure_outputs(objective: Objective, targets: Any, outputs: Any, weights: Array | None = None) -> dict[str, float]:
    """Computes the metrics of outputs [n, ...] for targets [n, ...]: arrays, or dicts of them; none of too many."""
    leaves = tf.nest.flatten(outputs)
    count, values = len(leaves[0]), sum(each.size for each in leaves)
    if not count or values > MOST_VALUES:
        return {}
    sums = MetricSums(objective, evaluates=True, takes_scores=True)
    collectors = sums.make_collectors()
    total, step = np.zeros(sums.size), max(1, VALUES_AT_ONCE * count // max(values, 1))
    each_weight = np.ones(count) if weights is None else weights
    for first in range(0, count, step):
        part = slice(first, first + step)
        examples, found, weight = tf.nest.map_structure(
            lambda array, part=part: tf.constant(array[part]), (targets, outputs, each_weight.astype(np.float32))
        )
        answers = sums.take_answers(examples, found, weight)
        mask = tf.ones_like(weight)
        total += sums.compute(examples, found, None, mask=mask, weights=weight, answers=answers).numpy()
        for key, parts in sums.take_scores(examples, answers[1], weight).items():
            collectors[key].add(*(each.numpy() for each in parts))
    return dict(sums.means(total, count, collectors))
