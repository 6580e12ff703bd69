"""Figures of outputs with values, with labels, or with many positions for each example.

scikit-learn defines them: `mean_absolute_error`, `r2_score`, `f1_score`, `jaccard_score` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scaleflow.evaluation.classes import divide_or, make_class_rows, rank_scores, rate_classes
from scaleflow.evaluation.resampling import Figure, Resamples
from scaleflow.interfaces.quantiles import weighted_quantiles

#: The quantiles of the absolute error that a report has.
QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

Array = np.ndarray[Any, Any]
Rows = list[dict[str, Any]]


def measure_values(
    names: Sequence[str], target: Array, prediction: Array, resamples: Resamples
) -> tuple[dict[str, Figure], Rows]:
    """Returns the figures of values [n, k], and a row for each of them if there are several."""
    errors = prediction - target
    measured = [measure_one(target[:, n], errors[:, n], resamples) for n in range(len(names))]
    if len(names) == 1:
        return measured[0], []
    rows: Rows = [{"value": name, **each} for name, each in zip(names, measured, strict=True)]
    squared = np.square(errors).mean(axis=1)
    figures = {
        "mae": resamples.mean(np.abs(errors).mean(axis=1)),
        "rmse": resamples.mean(squared, np.sqrt),
        "r2": Figure(float(np.mean([each["r2"].value for each in measured]))),
    }
    return figures, rows


def measure_one(target: Array, errors: Array, resamples: Resamples) -> dict[str, Figure]:
    """Returns the figures of one value, from targets and errors [n]."""
    centred = target - np.average(target, weights=resamples.weights)
    columns = np.stack([np.ones(len(target)), centred, centred**2, errors**2], axis=1)
    exact, drawn = resamples.sum_columns(columns)

    def explain(sums: Array) -> Array:
        total, first, second, squared = np.moveaxis(sums, -1, 0)
        variance = second - first**2 / total
        return 1 - divide_or(squared, variance, np.nan)

    return {
        "mae": resamples.mean(np.abs(errors)),
        "rmse": resamples.mean(errors**2, np.sqrt),
        "r2": resamples.figure(float(explain(exact)), explain(drawn)),
        "bias": resamples.mean(errors),
    }


def find_error_quantiles(errors: Array, weights: Array) -> Rows:
    """Returns quantiles of the absolute errors [n]: the least error that at least this share of the weights has."""
    sizes = np.abs(errors)
    values = weighted_quantiles(sizes, QUANTILES, weights)
    return [{"quantile": q, "error": float(value)} for q, value in zip(QUANTILES, values, strict=True)]


def measure_labels(
    names: Sequence[str], target: Array, predicted: Array, chances: Array, resamples: Resamples
) -> tuple[dict[str, Figure], Rows]:
    """Returns the figures of labels, from targets and predictions [n, labels] bool, and a row for each label."""
    parts = [resamples.sum_columns(each.astype(np.float64)) for each in (target, predicted, target & predicted)]
    exact, drawn = ([part[n] for part in parts] for n in (0, 1))
    f1, drawn_f1 = (rate_classes(*each)["f1"] for each in (exact, drawn))
    is_right = target == predicted
    figures = {
        "accuracy": resamples.mean(is_right.mean(axis=1)),
        "exact_match": resamples.mean(is_right.all(axis=1).astype(np.float64)),
        "macro_f1": resamples.figure(float(f1.mean()), drawn_f1.mean(axis=1)),
    }
    rows = make_class_rows(names, exact, drawn, resamples)
    for n, row in enumerate(rows):
        ranking = rank_scores(chances[:, n], target[:, n], resamples)
        row |= {"roc_auc": ranking.auc, "average_precision": ranking.average_precision}
    return figures, rows


def measure_positions(
    columns: Mapping[str, Array], names: Sequence[str], is_sequence: bool, resamples: Resamples
) -> tuple[dict[str, Figure], Rows]:
    """Returns the figures of an output with many positions, and a row for each class if its positions are counted.

    Args:
        columns: what is kept of each example, [n, ...] by name.
        names: of the classes.
        is_sequence: whether the positions are those of a sequence, whose perplexity is of interest.
        resamples: of the examples.
    """
    positions = columns["positions"].astype(np.float64)

    def average(name: str, finish: Any = np.asarray) -> Figure:
        sums, drawn = resamples.sum_columns(np.stack([columns[name] * positions, positions], axis=1))
        value = finish(divide_or(sums[0], sums[1], np.nan))
        return resamples.figure(float(value), finish(divide_or(drawn[:, 0], drawn[:, 1], np.nan)))

    if "mean_error" in columns:
        return {"mae": average("mean_error"), "rmse": average("squared_error", np.sqrt)}, []
    figures = {"accuracy": average("correct"), "mean_loss": average("loss")}
    if is_sequence:
        figures["perplexity"] = average("loss", np.exp)
    if "both" not in columns:
        return figures, []
    parts = [resamples.sum_columns(columns[name].astype(np.float64)) for name in ("true", "predicted", "both")]
    exact, drawn = ([part[n] for part in parts] for n in (0, 1))
    overlaps = [overlap_classes(*each)["iou"] for each in (exact, drawn)]
    with np.errstate(invalid="ignore"):
        means = [np.nanmean(each, axis=-1) for each in overlaps]
    figures["mean_iou"] = resamples.figure(float(means[0]), means[1])
    return figures, make_class_rows(names, exact, drawn, resamples, overlap_classes)


def overlap_classes(true: Array, predicted: Array, both: Array) -> dict[str, Array]:
    """Returns the intersection over union of each class, [..., classes], NaN where it does not occur, and its rates."""
    return {"iou": divide_or(both, true + predicted - both, np.nan), **rate_classes(true, predicted, both)}
