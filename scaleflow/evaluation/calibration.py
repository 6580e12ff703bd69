"""Learns from validation rows how a model should answer: calibration, a threshold, sets of classes, intervals.

All results take the weights of the rows into account. No TensorFlow.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scaleflow.evaluation.measures import accumulate, divide_or
from scaleflow.evaluation.resampling import count_effective
from scaleflow.interfaces.quantiles import weighted_quantiles

if TYPE_CHECKING:
    from scaleflow.interfaces.config import ThresholdGoal

Array = np.ndarray[Any, Any]

#: The number of parts of a cross-validation, and the seed that draws them.
PARTS = 5
SEED = 0xCA11

#: The range of the factor of logits.
FACTORS = 0.01, 100.0

#: The tolerance for rounding errors in sums of weights.
ROUNDING = 1e-9

#: The minimum number of rows per class to choose a calibration or a threshold.
MIN_CLASS_ROWS = 10


def fit_calibration(target: Array, logits: Array, weights: Array) -> tuple[float, float] | None:
    """Returns the factor and the shift of logits that calibrate the probabilities; None if calibration does not help.

    Two classes get both (Platt 1999). More classes get only a factor, a temperature (Guo et al. 2017). Cross-validation
    decides whether it helps: it compares the log loss of each part, calibrated on the other parts, to the uncalibrated
    loss.

    Args:
        target: classes, [n] int64.
        logits: [n] for two classes, or [n, classes].
        weights: [n], at least 0.
    """
    parts = np.random.default_rng([SEED, len(target)]).permutation(len(target)) % PARTS
    before = after = 0.0
    for part in range(PARTS):
        is_out = parts == part
        factor, shift = minimise_loss(target[~is_out], logits[~is_out], weights[~is_out])
        before += float(compute_losses(target[is_out], logits[is_out]) @ weights[is_out])
        after += float(compute_losses(target[is_out], logits[is_out] * factor + shift) @ weights[is_out])
    return minimise_loss(target, logits, weights) if after < before else None


def minimise_loss(target: Array, logits: Array, weights: Array) -> tuple[float, float]:
    """Returns the factor, above 0, and the shift of logits that minimise the log loss."""
    from scipy.optimize import minimize

    has_shift = logits.ndim == 1

    def compute(values: Array) -> float:
        moved = logits * math.exp(values[0]) + (values[1] if has_shift else 0.0)
        return float(compute_losses(target, moved) @ weights / weights.sum())

    bounds: list[Any] = [tuple(map(math.log, FACTORS))]
    if has_shift:
        bounds.append((None, None))
    fitted = minimize(compute, np.zeros(len(bounds)), method="L-BFGS-B", bounds=bounds).x
    shift = float(fitted[1]) if has_shift else 0.0
    return math.exp(fitted[0]), shift


def compute_losses(target: Array, logits: Array) -> Array:
    """Returns the log loss of each row, [n] float64."""
    values = logits.astype(np.float64)
    if values.ndim == 1:
        return np.asarray(np.logaddexp(0, np.where(target > 0, -values, values)))
    peak = values.max(axis=1)
    sums = peak + np.log(np.exp(values - peak[:, None]).sum(axis=1))
    return np.asarray(sums - values[np.arange(len(values)), target])


def choose_threshold(
    target: Array, chance: Array, weights: Array, goal: Literal["auto"] | ThresholdGoal
) -> tuple[float | None, str]:
    """Returns the minimum probability at which the second class is predicted, and a description of its result.

    `auto` maximises F1. A threshold lies halfway between two probabilities that occur. It lies above all of them if
    predicting the class never is cheapest. None: no threshold reaches the goal.

    Args:
        target: 0 or 1, [n].
        chance: the probability of 1, [n].
        weights: [n], at least 0.
    """
    scores, hits, alarms = accumulate(chance.astype(np.float64), target > 0, weights)
    if scores[0] < 1:  # adds a threshold that no row reaches
        scores = np.append(1, scores)
        hits = np.append(0, hits)
        alarms = np.append(0, alarms)
    precision = divide_or(hits, hits + alarms)
    recall = divide_or(hits, hits[-1:])
    if goal == "auto":
        at = int(divide_or(2 * hits, hits + alarms + hits[-1]).argmax())
    elif goal.cost is not None:
        miss, alarm = goal.cost
        at = int(((hits[-1] - hits) * miss + alarms * alarm).argmin())
    else:
        reached, least = (recall, goal.recall) if goal.recall is not None else (precision, goal.precision)
        places = np.flatnonzero(reached >= float(least or 0.0) - ROUNDING)
        if not len(places):
            return None, f"the highest precision is {precision.max():.3g}"
        # With enough recall, the first threshold gives the fewest false alarms. With enough precision, the last finds
        # the most.
        at = int(places[0] if goal.recall is not None else places[-1])
    below = scores[at + 1] if at + 1 < len(scores) else 0.0
    between = float(np.float32((scores[at] + below) / 2))
    threshold = between if between > max(below, np.finfo(np.float32).tiny) else float(scores[at])
    return threshold, f"precision {precision[at]:.3g} and recall {recall[at]:.3g} there"


def find_margins(errors: Array, level: float, weights: Array) -> Array:
    """Returns the distances from predictions within which new targets lie with probability `level`, [k] float64.

    This is split conformal prediction (Vovk et al. 2005; Lei et al. 2018): among n rows it takes the absolute error
    number ceil((n + 1) x level). It holds for new rows that are distributed like the validation rows, for any model.
    Unequal weights reduce the effective number of rows.

    Args:
        errors: predictions minus targets, [n, k].
    """
    return np.array([find_bound(np.abs(of_value), level, weights) for of_value in errors.T])


def find_set_threshold(of_target: Array, level: float, weights: Array) -> float:
    """Returns the minimum probability of classes in a set, so that the set contains a new target with probability
    `level`.

    This is split conformal prediction whose score is 1 - the probability of the true class (Sadinle et al. 2019). No
    other sets of this coverage are smaller on average. A class is in the set if a comparison with one threshold holds,
    which is the same wherever the model answers.

    Args:
        of_target: the probabilities of the true classes, [n].
    """
    bound = -find_bound(-of_target.astype(np.float64), level, weights)
    return float(np.float32(bound * (1 - 1e-5)))  # slightly lower, so that rounding elsewhere does not matter


def find_bound(scores: Array, level: float, weights: Array) -> float:
    """Returns the bound that new scores do not exceed with probability `level`: of n scores [n] number ceil((n + 1) x
    level).
    """
    count = count_effective(weights)
    share = min(1.0, level * (count + 1) / count)
    return float(weighted_quantiles(scores, [share - ROUNDING], weights)[0])


def count_needed(level: float) -> int:
    """Returns the minimum number of rows for an interval of a level; with fewer rows it would be unbounded."""
    return math.ceil(level / (1 - level) - 1e-9)
