"""Writes the rows for fitting the baselines, and the rows for comparing them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scaleflow.features.baselines.models import BaselineData, count_trees
from scaleflow.interfaces import Arrays, Inputs, Outputs, Rows, name_leaves

if TYPE_CHECKING:
    from scaleflow.dataset import Splits

Array = np.ndarray[Any, Any]

#: Maximum number of feature values, times the trees per iteration (boosting grows one tree per class). This bounds the
#: time. A clock must not, because the records of a run must not depend on the machine.
MAX_VALUES = 50_000_000

#: Maximum number of rows read for the baselines if the split is read during training.
MAX_STREAMED = 100_000

#: With fewer training rows, a baseline is meaningless.
MIN_ROWS = 20

#: With more classes, boosting takes minutes.
MAX_CLASSES = 50


def write_baseline_data(splits: Splits, max_rows: int, path: Path, keeps_outputs: bool = False) -> None:
    """Writes the rows for the baselines to a file: rows of the training split, and rows that judge the model.

    If a split has more than `max_rows` rows, it writes a sample. It writes nothing if the data are not a table, if
    there are no baselines for the kind of target, or if the disk is full (the run itself will report that).

    Args:
        keeps_outputs: whether to keep the baselines' outputs, for metrics that only the worker computes.

    Raises:
        ValueError: if an input is text: baselines take only numbers.
        ConfigError: if a row cannot be used.
    """
    outputs = splits.outputs
    judge = find_judge(splits)
    if judge is None or not is_table(splits.inputs) or not isinstance(outputs, Outputs) or not has_baselines(outputs):
        return
    check_numbers(splits.inputs)
    data = collect_data(splits, judge, outputs, max_rows=max_rows, keeps_outputs=keeps_outputs)
    if data is None:
        return
    try:
        data.save(path)
    except OSError:
        path.unlink(missing_ok=True)


def is_table(inputs: Any) -> bool:
    """Returns whether examples are rows: several inputs by name, each a value or a list of values."""
    return isinstance(inputs, Mapping) and all(len(described.shape) < 2 for described in name_leaves(inputs).values())


def has_baselines(outputs: Outputs) -> bool:
    """Returns whether the target of a row is one class or one number."""
    is_one_number = outputs.kind == "regression" and outputs.shape == (1,)
    return outputs.is_one_class or is_one_number


def find_judge(splits: Splits) -> Rows | None:
    """Returns the split for comparing the baselines: the test split, or else the validation split.

    Returns None if neither exists. With folds, the validation split does not count, because it is the training split.
    """
    if splits.test is not None:
        return splits.test
    return None if splits.folds else splits.validation


def check_numbers(inputs: Any) -> None:
    """Raises ValueError if an input is text."""
    for name, described in name_leaves(inputs).items():
        if described.dtype == "string":
            raise ValueError(f"the input {name} is text, and they take numbers")


def collect_data(
    splits: Splits, judge: Rows, outputs: Outputs, max_rows: int, keeps_outputs: bool
) -> BaselineData | None:
    """Reads rows of the training split and of `judge`. Returns None for too few rows or too many classes.

    Raises ConfigError if a row cannot be used.
    """
    from scaleflow import dataset

    classes = count_classes(outputs)
    count = limit_rows(splits, max_rows, classes)
    if classes > MAX_CLASSES or count < MIN_ROWS or len(splits.train) < MIN_ROWS:
        return None
    rows = dataset.sample_rows(splits.train, count, splits.transforms)
    test_rows = dataset.sample_rows(judge, count, splits.transforms)
    if rows is None or test_rows is None:
        return None
    is_sample = len(rows) < len(splits.train)
    rows = leave_out_ignored(rows, outputs.ignore)
    test_rows = leave_out_ignored(test_rows, outputs.ignore)
    if len(rows) < MIN_ROWS or not len(test_rows):
        return None
    return BaselineData(
        features=make_features(rows, splits.inputs),
        targets=read_targets(rows, classes),
        weights=rows.weights,
        test_features=make_features(test_rows, splits.inputs),
        test_targets=read_targets(test_rows, classes),
        test_weights=test_rows.weights,
        classes=classes,
        unit=find_unit(outputs),
        is_sample=is_sample,
        keeps_outputs=keeps_outputs,
    )


def count_classes(outputs: Outputs) -> int:
    """Returns the number of classes; 0 if targets are numbers."""
    if outputs.kind == "classification":
        return outputs.shape[-1]
    return 2 if outputs.kind == "binary" else 0


def limit_rows(splits: Splits, max_rows: int, classes: int) -> int:
    """Returns how many rows to read per split: at most `max_rows`, fewer for many features or classes."""
    features = sum(count_features(described) for described in name_leaves(splits.inputs).values())
    values = max(features * count_trees(classes), 1)
    count = min(max_rows, MAX_VALUES // values)
    return min(count, MAX_STREAMED) if splits.train.place == "stream" else count


def count_features(spec: Inputs) -> int:
    """Returns how many features an input becomes: one per number, or one per word or category."""
    if spec.vocabulary:
        return spec.vocabulary
    return spec.shape[0] if spec.shape else 1


def leave_out_ignored(rows: Arrays, ignore: int | None) -> Arrays:
    """Returns the rows without those with the target `ignore`."""
    if ignore is None:
        return rows
    return rows.map(lambda values: values[np.ravel(rows.targets) != ignore])


def make_features(rows: Arrays, inputs: Any) -> Array:
    """Returns the inputs of rows as features [n, features] float32, in the order of their names."""
    values = name_leaves(rows.inputs)
    columns = [make_columns(values[name], spec) for name, spec in name_leaves(inputs).items()]
    return np.concatenate(columns, axis=1)


def make_columns(values: Array, spec: Inputs) -> Array:
    """Returns the features of one input, [n, features] float32: its numbers, or 1 for each word that occurs."""
    flat = np.reshape(values, [len(values), -1])
    if spec.vocabulary is None:
        return flat.astype(np.float32)
    occurs = np.zeros([len(values), spec.vocabulary], np.float32)
    np.put_along_axis(occurs, flat, 1, axis=1)
    return occurs


def read_targets(rows: Arrays, classes: int) -> Array:
    """Returns the targets [n]: classes as int64, numbers unchanged."""
    targets = np.ravel(rows.targets)
    return targets.astype(np.int64) if classes else targets


def find_unit(outputs: Outputs) -> float:
    """Returns the divisor of numbers in the loss; NaN if the run's loss is a quantile loss."""
    if outputs.levels:
        return math.nan
    return 1.0 if outputs.scaling is None else outputs.scaling[1]
