"""Exact values of the metrics that Keras counts at fixed probabilities: areas under curves, rates at other rates.

They are computed from the scores of all examples of an evaluation. The metrics of training are Keras's.
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

#: The arguments by which a user asks for Keras's own thresholds.
GRID_ARGUMENTS = ("num_thresholds", "thresholds")

#: Keras's metrics of one rate at another: which rate is wanted, and which one is given.
RATES: Mapping[type, tuple[str, str]] = {
    keras.metrics.SensitivityAtSpecificity: ("sensitivity", "specificity"),
    keras.metrics.SpecificityAtSensitivity: ("specificity", "sensitivity"),
    keras.metrics.PrecisionAtRecall: ("precision", "sensitivity"),
    keras.metrics.RecallAtPrecision: ("sensitivity", "precision"),
}

#: Computes the results of a metric from the tables of its columns.
Finish = Callable[[Sequence[ScoreTable]], Sequence[float]]


def find_exact_form(metric: Any, target: Target) -> tuple[Finish, bool] | None:
    """Returns how a metric is computed from scores, and whether each class or label has a column of its own.

    None if the metric has no such form, is of the user's own class, or if the user asks for Keras's thresholds.
    """
    if any(target.arguments.get(name) is not None for name in GRID_ARGUMENTS):
        return None
    if type(metric) in RATES:
        wanted, given = RATES[type(metric)]
        least = float(metric.value)
        return lambda tables: [find_best_rate(tables[0], wanted, given, least)], False
    if type(metric) not in (keras.metrics.AUC, MacroAUC):
        return None
    if metric.summation_method.name != "INTERPOLATION" or metric.label_weights is not None:
        return None
    compute = compute_roc_area if metric.curve.name == "ROC" else compute_average_precision

    def finish(tables: Sequence[ScoreTable]) -> list[float]:
        areas = np.array([compute(each) for each in tables])
        known = areas[~np.isnan(areas)]  # of the classes that occur, and are not the only ones
        return [float(known.mean()) if len(known) else float("nan")]

    return finish, bool(metric.multi_label)
