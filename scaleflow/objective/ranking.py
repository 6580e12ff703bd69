"""Exact values of AUC and rate metrics (such as precision at recall), which Keras computes at fixed thresholds.

Evaluations compute them from the scores of all examples. During training, Keras's approximation is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from scaleflow.interfaces import Target
from scaleflow.objective.score_tables import (
    ScoreTable,
    compute_average_precision,
    compute_roc_area,
    find_best_rate,
)
from scaleflow.objective.scores import MacroAUC

#: If the user sets one of these arguments, Keras's thresholds are used.
GRID_ARGUMENTS = ("num_thresholds", "thresholds")

#: Keras metrics of one rate at another -> (the rate to maximise, the rate with a minimum).
RATES: Mapping[type, tuple[str, str]] = {
    keras.metrics.SensitivityAtSpecificity: ("sensitivity", "specificity"),
    keras.metrics.SpecificityAtSensitivity: ("specificity", "sensitivity"),
    keras.metrics.PrecisionAtRecall: ("precision", "sensitivity"),
    keras.metrics.RecallAtPrecision: ("sensitivity", "precision"),
}

#: Computes the results of a metric from the tables of its columns.
Finish = Callable[[Sequence[ScoreTable]], Sequence[float]]


def find_exact_form(metric: Any, target: Target) -> tuple[Finish, bool] | None:
    """Returns a function that computes a metric from scores, and whether it needs a column per class or label.

    Returns None if no exact form is known (also for classes of the user's), or if the user sets Keras's thresholds.
    """
    if any(target.arguments.get(name) is not None for name in GRID_ARGUMENTS):
        return None
    if type(metric) in RATES:
        wanted, limited = RATES[type(metric)]
        least = float(metric.value)
        return lambda tables: [find_best_rate(tables[0], wanted, limited, least)], False
    if type(metric) not in (keras.metrics.AUC, MacroAUC):
        return None
    if metric.summation_method.name != "INTERPOLATION" or metric.label_weights is not None:
        return None
    compute = compute_roc_area if metric.curve.name == "ROC" else compute_average_precision

    def finish(tables: Sequence[ScoreTable]) -> list[float]:
        areas = np.array(list(map(compute, tables)))
        known = areas[~np.isnan(areas)]  # the area is NaN for a class with no positives or no negatives
        return [float(known.mean()) if len(known) else float("nan")]

    return finish, bool(metric.multi_label)
