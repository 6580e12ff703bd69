"""Converts a model's outputs to the user's terms: classes, probabilities, values in their unit. Needs only NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # at run time it may also be a namespace that was read from the record of a logged model
    from scaleflow.interfaces import Outputs

#: With more classes, there is no column for each class unless the user asks for all of them.
MAX_PROBABILITIES = 20

Array = np.ndarray[Any, Any]


def make_prediction_columns(
    outputs: Mapping[str, Outputs], values: Mapping[str, Array], has_all: bool = False
) -> dict[str, Array]:
    """Converts outputs [rows, ...] to columns by name: [rows], or [rows, ...] with a value for each position.

    - classification and binary: `prediction`, the class, and `probability`, its probability. If the output has
      prediction sets, `prediction_set`, a JSON list of classes. With at most `MAX_PROBABILITIES` classes, or with
      `has_all`, also `probability_CLASS` for each class.
    - multi_label: `prediction_LABEL`, a boolean, and `probability_LABEL`.
    - regression: `prediction`, or `prediction_NAME` for several values. With intervals also `prediction_low` and
      `prediction_high`. With quantiles also these, such as `prediction_q10`; `prediction` is the median.

    A class without a name is its number, counted from 0. With several outputs, column names start with the output's
    name.
    """
    columns: dict[str, Array] = {}
    for name, described in outputs.items():
        chances = compute_probabilities(described, values[name])
        if chances is None:
            of_output = make_value_columns(described, values[name])
        elif is_one_of_several(described):
            of_output = make_class_columns(described, values[name], chances, has_all)
        else:
            of_output = divide_columns("prediction", chances >= 0.5, described.names)
            of_output |= divide_columns("probability", chances, described.names)
        columns |= prefix_names(name, of_output)
    return columns


def make_value_columns(described: Outputs, values: Array) -> dict[str, Array]:
    """Returns the columns of predicted values, and of the ends of their intervals or their quantiles."""
    columns = divide_columns("prediction", take_prediction(described, values), described.names)
    for end, ends in bound_values(described, values).items():
        for name, column in divide_columns("prediction", ends, described.names).items():
            columns[f"{name}_{end}"] = column
    return columns


def make_class_columns(described: Outputs, values: Array, chances: Array, has_all: bool) -> dict[str, Array]:
    """Returns the columns of a predicted class. `chances` has the probabilities of the outputs `values`."""
    best = choose_classes(described, chances)
    names = described.names
    if names is None:
        columns = {"prediction": best}
    else:
        words = np.array(names, object)[best]
        words[find_not_finite(described, values)] = None  # outputs that are not finite predict no class
        columns = {"prediction": words}
    columns["probability"] = np.take_along_axis(chances, best[..., None], axis=-1)[..., 0]
    if described.set_threshold is not None:
        columns["prediction_set"] = write_sets(find_sets(described, chances), names)
    if chances.ndim == 2 and (has_all or chances.shape[-1] <= MAX_PROBABILITIES):
        columns |= divide_columns("probability", chances, names)
    return columns


def make_probability_columns(outputs: Mapping[str, Outputs], values: Mapping[str, Array]) -> dict[str, Array]:
    """Converts outputs to the probability of every class or label.

    The columns are `probability_CLASS` [rows], or `probabilities` [rows, ..., classes] if there are several positions.
    Regression outputs give no columns.
    """
    columns: dict[str, Array] = {}
    for name, described in outputs.items():
        chances = compute_probabilities(described, values[name])
        if chances is None:
            continue
        if chances.ndim > 2:
            columns |= prefix_names(name, {"probabilities": chances})
        else:
            columns |= prefix_names(name, divide_columns("probability", chances, described.names))
    return columns


def make_logit_columns(outputs: Mapping[str, Outputs], values: Mapping[str, Array]) -> dict[str, Array]:
    """Converts outputs to columns `logit_CLASS` or `logit`. Regression outputs give no columns."""
    columns: dict[str, Array] = {}
    for name, described in outputs.items():
        if described.kind in ("classification", "binary", "multi_label"):
            is_one = described.kind == "binary" and values[name].shape[1:] in ((), (1,))
            columns |= prefix_names(name, divide_columns("logit", values[name], None if is_one else described.names))
    return columns


def find_not_finite(described: Outputs, values: Array) -> Array:
    """Returns True where outputs [rows, ...] of classes or labels are NaN or infinite.

    Classes may have the logit -inf, as long as the largest logit is finite.

    Returns:
        [rows] for one class per example, [rows, ...] for one class per position, or for labels.
    """
    if described.kind == "classification":
        return np.asarray(np.isnan(values).any(axis=-1) | ~np.isfinite(values.max(axis=-1)))
    is_bad = np.asarray(~np.isfinite(values))
    return is_bad.reshape(len(values)) if is_one_of_several(described) else is_bad


def choose_classes(described: Outputs, chances: Array) -> Array:
    """Returns the predicted classes [rows, ...] int64, by `Outputs.threshold` or the highest probability."""
    if described.threshold is None:
        return np.asarray(chances.argmax(axis=-1))
    is_second = chances[..., 1] >= np.float32(described.threshold)
    return np.asarray(is_second.astype(np.int64))


def find_sets(described: Outputs, chances: Array) -> Array:
    """Returns the prediction set of each example, [rows, classes] bool. It always has the predicted class."""
    is_inside = chances >= np.float32(described.set_threshold)
    is_inside[np.arange(len(chances)), choose_classes(described, chances)] = True
    return np.asarray(is_inside)


def write_sets(is_inside: Array, names: Sequence[str] | None) -> Array:
    """Converts sets of classes [rows, classes] bool to JSON lists of names or numbers, texts [rows]."""
    words = quote_classes(names, is_inside.shape[1])
    distinct, places = np.unique(is_inside, axis=0, return_inverse=True)
    texts = []
    for is_in_set in distinct:
        listed = ", ".join(words[n] for n in np.flatnonzero(is_in_set))
        texts.append(f"[{listed}]")
    return np.array(texts, object)[places.reshape(-1)]


def quote_classes(names: Sequence[str] | None, count: int) -> list[str]:
    """Returns the names of classes, or else their numbers, in JSON notation."""
    return [json.dumps(name, ensure_ascii=False) for name in names or range(count)]


def take_prediction(described: Outputs, values: Any) -> Any:
    """Returns the predicted values: the medians [rows, n] of quantiles [rows, n, levels], or the values as they are.

    `values` is an array or a tensor.
    """
    return values if described.levels is None else values[..., list(described.levels).index(0.5)]


def bound_values(described: Outputs, values: Any) -> dict[str, Any]:
    """Returns quantiles (`q10`) or the ends of intervals (`low`, `high`) by name; {} for an output with neither.

    `values` is an array or a tensor.
    """
    if described.levels is not None:
        return {f"q{level * 100:.10g}": values[..., n] for n, level in enumerate(described.levels)}
    if described.margins is None:
        return {}
    dtype = getattr(values.dtype, "as_numpy_dtype", values.dtype)
    margins = np.asarray(described.margins, dtype).reshape(described.shape)
    return {"low": values - margins, "high": values + margins}


def is_one_of_several(described: Outputs) -> bool:
    """Returns whether an output predicts one of two or more classes for each example or position."""
    return described.kind == "classification" or (described.kind == "binary" and described.shape in ((), (1,)))


def compute_probabilities(described: Outputs, values: Array) -> Array | None:
    """Converts logits to probabilities [rows, ..., classes] or [rows, labels], float32; None for regression."""
    if described.kind == "classification":
        return compute_softmax(values)
    if described.kind not in ("binary", "multi_label"):
        return None
    chances = compute_sigmoid(values)
    if not is_one_of_several(described):
        return chances
    chance = chances.reshape(len(values))
    return np.stack([1 - chance, chance], axis=-1)


def compute_softmax(values: Array) -> Array:
    """Computes the softmax over the last axis, float32."""
    with np.errstate(invalid="ignore"):  # inf - inf
        raised = np.exp(values.astype(np.float64) - values.max(axis=-1, keepdims=True))
    chances: Array = raised / raised.sum(axis=-1, keepdims=True)
    return chances.astype(np.float32)


def compute_sigmoid(values: Array) -> Array:
    """Computes the sigmoid of each value, float32."""
    with np.errstate(over="ignore"):
        return (1 / (1 + np.exp(-values.astype(np.float64)))).astype(np.float32)


def divide_columns(label: str, values: Array, names: Sequence[str] | None) -> dict[str, Array]:
    """Divides values [rows, k] into k columns `label_NAME`. Values of another shape become one column `label`."""
    if values.ndim != 2:
        return {label: values}
    count = values.shape[1]
    if count <= 1:
        return {label: values.reshape(len(values))}
    columns = {}
    for n in range(count):
        column = names[n] if names else n
        columns[f"{label}_{column}"] = np.ascontiguousarray(values[:, n])
    return columns


def prefix_names(output: str, columns: Mapping[str, Array]) -> dict[str, Array]:
    """Puts the name of an output before the names of its columns."""
    return {f"{output}_{column}" if output else column: values for column, values in columns.items()}
