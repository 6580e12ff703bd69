"""Computes the metrics of each kind of output: classes and labels, values, many positions per example.

All metrics take the examples' weights into account. They are defined as in scikit-learn:
`precision_recall_fscore_support`, `roc_auc_score`, `average_precision_score`, `log_loss`, `mean_absolute_error`,
`r2_score`, `jaccard_score` and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scaleflow.evaluation.intervals import (
    MAX_RARE,
    RARE_SHARE,
    Intervals,
    Rates,
    bound_calibration_error,
    find_low_area,
    find_tied_distances,
)
from scaleflow.evaluation.predictions import Predictions
from scaleflow.evaluation.resampling import count_effective
from scaleflow.interfaces import Outputs
from scaleflow.interfaces.estimate import Estimate
from scaleflow.interfaces.quantiles import weighted_quantiles

#: Number of equally wide bins of the confidence, for the reliability diagram and the calibration error (Guo et al.
#: 2017).
BINS = 10

#: The powers of probabilities that a calibration tries, the rounds for each, the maximum number of examples it uses,
#: and the minimum probability.
POWERS = np.geomspace(0.1, 2, 8)
FITTING_ROUNDS = 12
MAX_FITTED = 10_000
LEAST_CHANCE = 1e-9

#: Labels are doubted only if the model makes at most this share of a constant's errors, is sure about at least this
#: share of its own errors, and its mean confidence exceeds its accuracy by at most this.
ERRORS_LEFT = 0.5
SURE_SHARE = 2 / 3
MAX_TOO_SURE = 0.05

#: A model must save more log loss than this, summed over examples, because the calibration may save some by chance.
LEAST_SAVED = 4.0

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Classes:
    """The predictions of an output with one class per example, without examples whose target is missing.

    If an output is not finite, the answer counts as wrong: the true class has probability 0, and the other classes have
    equal probabilities. The prediction is the first of the others, with confidence 0.

    Attributes:
        rows: the rows of the table of predictions, [n].
        target, predicted: classes, [n] int64.
        confidence, of_target: the probabilities of the predicted and of the true class, [n] float64.
        rank: the rank of the true class among all, from 1, [n].
        chances: the probabilities, [n, classes] float32; None if there are too many classes to keep them.
        is_answered: whether the output is finite, [n].
    """

    names: Sequence[str]
    rows: Array
    target: Array
    predicted: Array
    confidence: Array
    of_target: Array
    rank: Array
    chances: Array | None
    is_answered: Array

    @property
    def is_correct(self) -> Array:
        return np.asarray(self.target == self.predicted)

    def select(self, is_used: Array) -> Classes:
        """Returns the chosen examples, [n] bool."""
        chosen: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                chosen[name] = value[is_used]
        return replace(self, **chosen)


def read_classes(predictions: Predictions, output: str, described: Outputs) -> Classes:
    """Reads the predictions of an output with one class per example."""
    count = 2 if described.kind == "binary" else described.shape[-1]
    names = described.names or tuple(map(str, range(count)))
    column = predictions.column
    target = number_classes(column("target", output), described.names)
    predicted = number_classes(column("prediction", output), described.names)
    rows = np.flatnonzero(target >= 0)
    target = target[rows]
    predicted = predicted[rows]
    confidence = column("probability", output)[rows].astype(np.float64)
    is_answered = np.isfinite(confidence) & (predicted >= 0)
    columns = [f"probability_{name}" for name in names]
    chances = None
    if predictions.has(columns[0], output):
        chances = np.stack([column(name, output)[rows] for name in columns], axis=1)
    of_target = column("target_probability", output)[rows].astype(np.float64)
    rank = column("target_rank", output)[rows]
    if not is_answered.all():
        is_bad = ~is_answered
        predicted = np.where(is_bad, target == 0, predicted)
        confidence = np.where(is_bad, 0.0, confidence)
        of_target = np.where(is_bad, 0.0, of_target)
        rank = np.where(is_bad, count, rank)
        if chances is not None:
            others = (np.arange(count) != target[:, None]) / np.float32(max(1, count - 1))
            chances = np.where(is_bad[:, None], others.astype(np.float32), chances)
    return Classes(
        names,
        rows,
        target,
        predicted=predicted.astype(np.int64),
        confidence=confidence,
        of_target=of_target,
        rank=rank.astype(np.int64),
        chances=chances,
        is_answered=is_answered,
    )


def number_classes(values: Array, names: Sequence[str] | None) -> Array:
    """Converts a column to class numbers, [n] int64; -1 for a missing class."""
    if names is not None:
        numbers = {name: n for n, name in enumerate(names)}
        return np.array([numbers.get(value, -1) for value in values], np.int64)
    if values.dtype.kind == "f":
        return np.where(np.isnan(values), -1, values).astype(np.int64)
    return values


def count_confusion(data: Classes, weights: Array) -> Array:
    """Returns the confusion matrix, [true, predicted]."""
    count = len(data.names)
    return np.bincount(data.target * count + data.predicted, weights, count**2).reshape(count, count)


def measure_classes(data: Classes, intervals: Intervals) -> tuple[dict[str, Estimate], list[dict[str, Any]]]:
    """Returns the metrics of all examples, and a row per class with its metrics and counts."""
    rates = rate_classes(data, intervals)
    losses = -np.log(np.clip(data.of_target, EPSILON, 1 - EPSILON))
    estimates = {
        **measure_decisions(data, intervals, rates),
        "log_loss": intervals.mean(losses, is_error=True),
    }
    for k in (3, 5):
        if len(data.names) > 2 * k:
            estimates[f"top_{k}_accuracy"] = intervals.mean(data.rank <= k)
    estimates["calibration_error"] = measure_calibration(data.confidence, data.is_correct, intervals)
    support = np.bincount(data.target, intervals.weights, len(data.names))
    predicted = np.bincount(data.predicted, intervals.weights, len(data.names))
    rows = make_class_rows(data.names, support, predicted, rates)
    if data.chances is not None:
        estimates |= rank_all_classes(data, data.chances, intervals, rows=rows)
    return estimates, rows


def measure_decisions(
    data: Classes, intervals: Intervals, rates: Mapping[str, Rates] | None = None
) -> dict[str, Estimate]:
    """Returns the metrics that depend only on the predicted classes. `rates` is the result of `rate_classes`."""
    rates = rates or rate_classes(data, intervals)
    return {
        "accuracy": intervals.mean(data.is_correct),
        "balanced_accuracy": intervals.average(rates["recall"]),
        "macro_f1": intervals.average(rates["f1"]),
    }


def rate_classes(data: Classes, intervals: Intervals) -> dict[str, Rates]:
    """Returns precision, recall and F1 of each class."""
    count = len(data.names)
    wrong = np.flatnonzero(~data.is_correct)
    entries = np.concatenate([np.arange(len(data.target)), wrong])  # a mistake belongs to two classes
    classes = np.concatenate([data.target, data.predicted[wrong]])
    is_hit = np.concatenate([data.is_correct, np.zeros(len(wrong), bool)])
    overlap = intervals.rate_groups(classes, count, is_hit, rows=entries)
    return {
        "precision": intervals.rate_groups(data.predicted, count, data.is_correct),
        "recall": intervals.rate_groups(data.target, count, data.is_correct),
        "f1": overlap.transform(to_f1),
    }


def to_f1(overlap: Array) -> Array:
    """Converts intersection over union, as a share of examples, to F1."""
    return np.asarray(2 * overlap / (1 + overlap))


#: Smaller probabilities are clipped before the logarithm, as in scikit-learn.
EPSILON = float(np.finfo(np.float64).eps)


def divide_or(values: Array, by: Array, otherwise: float = 0.0) -> Array:
    """Returns quotients, with another value if the divisor is not above 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(by > 0, values / by, otherwise))


def make_class_rows(
    names: Sequence[str], support: Array, predicted: Array, rates: Mapping[str, Rates]
) -> list[dict[str, Any]]:
    """Returns a row per class, from the weights of its examples and of its predictions, both [classes]."""
    rows: list[dict[str, Any]] = []
    for n, name in enumerate(names):
        rows.append({"class": name, "support": float(support[n]), "predicted": float(predicted[n])})
    for metric, of_classes in rates.items():
        for row, estimate in zip(rows, of_classes.estimates(), strict=True):
            row[metric] = estimate
    return rows


# Ranking -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """How well scores separate one class from the others.

    Attributes:
        auc: the area under the ROC curve.
        average_precision: the area under the precision-recall curve, by steps.
        false_rate, true_rate, precision: the rates at each threshold, [thresholds].
        thresholds: the distinct scores, descending.
    """

    auc: Estimate
    average_precision: Estimate
    false_rate: Array
    true_rate: Array
    precision: Array
    thresholds: Array


def rank_all_classes(
    data: Classes, chances: Array, intervals: Intervals, rows: Sequence[dict[str, Any]]
) -> dict[str, Estimate]:
    """Adds the areas of each class to its row. For two classes, returns the second class's areas instead."""
    if len(data.names) == 2:
        ranking = rank_scores(chances[:, 1], data.target == 1, intervals)
        return {"roc_auc": ranking.auc, "average_precision": ranking.average_precision}
    for n, row in enumerate(rows):
        ranking = rank_scores(chances[:, n], data.target == n, intervals)
        row |= {"roc_auc": ranking.auc, "average_precision": ranking.average_precision}
    return {}


@dataclass(frozen=True)
class RankedRows:
    """The rows of a ranking, and the sums of weights from the highest score down to each threshold.

    Attributes:
        is_positive: [n] bool.
        threshold_of_row: [n] the index of each row's threshold, which is its score.
        true: the weights of the positives at or above each threshold.
        false: the weights of the other rows at or above each threshold.
        true_steps, false_steps: the weights that each threshold adds.
        positives, others: the weights of all positives and of all other rows.
        precision: the share of positives at or above each threshold.
        effective_counts: the effective numbers of positives and of other rows.
    """

    is_positive: Array
    threshold_of_row: Array
    true: Array
    false: Array
    true_steps: Array
    false_steps: Array
    positives: float
    others: float
    precision: Array
    effective_counts: tuple[float, float]


def rank_scores(scores: Array, is_positive: Array, intervals: Intervals) -> Ranking:
    """Returns how well scores [n] rank the positives [n] bool before the others."""
    thresholds, true, false = accumulate(scores, is_positive, intervals.weights)
    counts = []
    for is_member in (is_positive, ~is_positive):
        counts.append(count_effective(intervals.sum_units(intervals.weights * is_member)))
    ranked = RankedRows(
        is_positive=is_positive,
        threshold_of_row=np.searchsorted(-thresholds, -scores),
        true=true,
        false=false,
        true_steps=np.diff(true, prepend=0.0),
        false_steps=np.diff(false, prepend=0.0),
        positives=float(true[-1]) if len(true) else 0.0,
        others=float(false[-1]) if len(false) else 0.0,
        precision=divide_or(true, true + false),
        effective_counts=(counts[0], counts[1]),
    )
    auc = average_precision = Estimate(math.nan)
    if ranked.positives:
        average_precision = estimate_average_precision(ranked, intervals)
    if ranked.positives and ranked.others:
        auc = estimate_roc_auc(ranked, intervals)
    false_rate = divide_or(false, np.array(ranked.others))
    true_rate = divide_or(true, np.array(ranked.positives))
    return Ranking(
        auc, average_precision, false_rate, true_rate=true_rate, precision=ranked.precision, thresholds=thresholds
    )


def estimate_average_precision(ranked: RankedRows, intervals: Intervals) -> Estimate:
    """Returns the average precision with its interval.

    The influence of a row is its effect on the precision at its own score and at all lower scores.
    """
    positives = ranked.positives
    rows = ranked.threshold_of_row
    value = float(ranked.precision @ ranked.true_steps) / positives
    share = ranked.true_steps / positives * divide_or(np.ones(len(ranked.true)), np.square(ranked.true + ranked.false))
    false_at_lower = np.cumsum((share * ranked.false)[::-1])[::-1][rows]
    true_at_lower = np.cumsum((share * ranked.true)[::-1])[::-1][rows]
    influence_of_positives = (ranked.precision[rows] - value) / positives + false_at_lower
    influence = np.where(ranked.is_positive, influence_of_positives, -true_at_lower)
    return intervals.area(value, intervals.weights * influence, ranked.effective_counts[0])


def estimate_roc_auc(ranked: RankedRows, intervals: Intervals) -> Estimate:
    """Returns the area under the ROC curve with its interval.

    The influence of a row is its placement: the share of the other class that it is on the right side of (DeLong et al.
    1988).
    """
    positives = ranked.positives
    others = ranked.others
    true_steps = ranked.true_steps
    false_steps = ranked.false_steps
    counts = ranked.effective_counts
    value = float((ranked.true - true_steps / 2) @ false_steps) / positives / others
    above = (others - ranked.false + false_steps / 2) / others
    below = (ranked.true - true_steps / 2) / positives
    rows = ranked.threshold_of_row
    placements = np.where(ranked.is_positive, above[rows], below[rows])
    influence = (placements - value) / np.where(ranked.is_positive, positives, others)
    auc = intervals.area(value, intervals.weights * influence, min(counts))
    is_rare = ranked.is_positive if counts[0] <= counts[1] else ~ranked.is_positive
    if value > 0.5 and min(counts) <= min(MAX_RARE, RARE_SHARE * max(counts)) and intervals.has_ends:
        auc = auc._replace(low=min(auc.low, find_low_area(intervals, placements, max(counts), is_rare)))
    of_positives = find_tied_distances(intervals, (true_steps / positives)[::-1], above[::-1], counts[0])
    of_others = find_tied_distances(intervals, false_steps / others, below, counts[1])
    low = math.hypot(of_positives[0], of_others[0])
    high = math.hypot(of_positives[1], of_others[1])
    return auc._replace(low=min(auc.low, max(0.0, value - low)), high=max(auc.high, min(1.0, value + high)))


def accumulate(scores: Array, is_positive: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Returns the distinct scores, descending, and the weights of positives and of others at or above each score."""
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
    is_hit = is_positive[order]
    ordered = weights[order].astype(np.float64)
    true = np.cumsum(ordered * is_hit)[ends]
    return scores[order][ends], true, np.cumsum(ordered * ~is_hit)[ends]


def name_thresholds(
    ranking: Ranking, positives: float, others: float, costs: tuple[float, float], chosen: float | None = None
) -> list[dict[str, Any]]:
    """Returns a row for each useful threshold of the positive class's probability.

    These are the usual threshold, the chosen one, the one with the highest F1, and the one with the lowest cost.
    `costs` are the costs of a miss and of a false alarm; a row has the mean cost over all examples. In the last row,
    probability 1 may mean "never predict the class".
    """
    hits = np.append(ranking.true_rate * positives, 0.0)
    alarms = np.append(ranking.false_rate * others, 0.0)
    miss_cost, alarm_cost = costs
    mean_costs = (alarms * alarm_cost + (positives - hits) * miss_cost) / (positives + others)
    f1 = divide_or(2 * hits, hits + alarms + positives)
    fixed = {"usual": 0.5}
    if chosen is not None:
        fixed["chosen"] = chosen
    places = {}
    for name, threshold in fixed.items():
        least = np.float32(threshold)  # compares as `choose_classes` does
        if name == "usual":  # at 0.5 the class is predicted only if it is more likely
            least = np.nextafter(least, np.float32(1))
        places[name] = int(np.searchsorted(-ranking.thresholds, -least, "right")) - 1
    cost = f"least cost (a miss costs {miss_cost:g}, a false alarm {alarm_cost:g})"
    rows = []
    for name, at in {**places, "highest F1": int(f1.argmax()), cost: int(mean_costs.argmin())}.items():
        is_never = at in (-1, len(ranking.thresholds))
        if name in fixed:
            probability = fixed[name]
        else:
            probability = 1.0 if is_never else float(ranking.thresholds[at])
        rows.append(
            {
                "threshold": name,
                "probability": probability,
                "precision": float(divide_or(hits, hits + alarms)[at]),
                "recall": float(divide_or(hits, np.array(positives))[at]),
                "f1": float(f1[at]),
                "cost": float(mean_costs[at]),
            }
        )
    return rows


# Calibration ---------------------------------------------------------------------------------


def bin_confidence(confidence: Array) -> Array:
    """Returns the bin of each confidence, [n]: (0, 0.1], (0.1, 0.2] and so on."""
    return np.asarray(np.clip(np.ceil(confidence * BINS) - 1, 0, BINS - 1), np.int64)


def sum_bins(confidence: Array, is_correct: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Returns the weight, the sum of confidences and the sum of correct predictions of each bin."""
    bins = bin_confidence(confidence)
    total = np.bincount(bins, weights * np.ones(len(bins)), BINS)
    confidences = np.bincount(bins, weights * confidence, BINS)
    correct = np.bincount(bins, weights * is_correct, BINS)
    return total, confidences, correct


def measure_calibration(confidence: Array, is_correct: Array, intervals: Intervals) -> Estimate:
    """Returns the expected calibration error: the mean distance between confidence and accuracy over the bins."""
    return bound_calibration_error(intervals, bin_confidence(confidence), BINS, confidence - is_correct)


def find_chance_error(confidence: Array, weights: Array, units: Array | None = None, count: int = 200) -> float:
    """Returns the calibration error below which 95 % of well calibrated models with this confidence stay.

    It is simulated (Broecker and Smith 2007): with few examples, or with units that are right or wrong as a whole, even
    a well calibrated model has an error.
    """
    random = np.random.default_rng([len(confidence), count])
    bins = bin_confidence(confidence)
    errors = []
    for _ in range(count):
        chance = random.random(len(confidence))
        gaps = weights * (confidence - ((chance if units is None else chance[units]) < confidence))
        errors.append(np.abs(np.bincount(bins, gaps, BINS)).sum() / weights.sum())
    return float(np.percentile(errors, 95))


def calibrate(data: Classes, weights: Array) -> Classes:
    """Returns predictions whose probabilities are right on average, fitted to their own labels with weights [n].

    Class weights shift probabilities, and so does an overconfident model. A temperature and a factor per class undo
    that: the mean probability of each class becomes its share of the labels.
    """
    if data.chances is None or not len(data.rows):
        return data
    chances = np.maximum(data.chances, LEAST_CHANCE).astype(np.float64)
    places = np.unique(np.linspace(0, len(chances) - 1, MAX_FITTED).astype(np.int64))
    target = data.target[places]
    fitted = chances[places]
    shares = weights[places]
    count = len(data.names)
    if not shares.any():
        return data
    support = np.bincount(target, shares, count)
    best = math.inf, 1.0, np.ones(count)
    for power in POWERS:
        powered = fitted**power
        factors = np.ones(count)
        for _ in range(FITTING_ROUNDS):
            factors = divide_or(support, (shares / (powered @ factors)) @ powered)
        of_target = (powered * factors)[np.arange(len(target)), target] / (powered @ factors)
        loss = float(-np.average(np.log(np.maximum(of_target, EPSILON)), weights=shares))
        best = min(best, (loss, power, factors), key=lambda fit: fit[0])
    chances = chances ** best[1] * best[2]
    chances /= chances.sum(axis=1, keepdims=True)
    of_target = chances[np.arange(len(chances)), data.target]
    confidence = chances.max(axis=1)
    return replace(data, predicted=chances.argmax(axis=1), confidence=confidence, of_target=of_target, chances=chances)


def find_gain(calibrated: Classes, weights: Array) -> float:
    """Returns the share of a constant's log loss that the model saves; 0 if the saving may be chance."""
    if not weights.any():
        return 0.0
    shares = np.bincount(calibrated.target, weights) / weights.sum()
    constant = float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())
    saved = constant + float(np.average(np.log(np.maximum(calibrated.of_target, EPSILON)), weights=weights))
    return saved / constant if constant and saved * len(calibrated.target) > LEAST_SAVED else 0.0


def find_label_errors(calibrated: Classes) -> Array:
    """Returns the examples whose label is probably wrong, the most likely first, as places in [n].

    This is confident learning (Northcutt et al. 2021): the model predicts another class, with at least the mean
    probability that it gives this class where the class is the label. The result is empty if the model does not know
    better than the labels. It must make at most half of a constant's errors, be sure about most of its own errors, and
    not be overconfident.
    """
    data = calibrated
    count = len(data.names)
    wrong = ~data.is_correct
    support = np.bincount(data.target, minlength=count)
    usual = divide_or(np.bincount(data.target, data.of_target, count), support, 1.0)
    places = np.flatnonzero(wrong & (data.confidence >= usual[data.predicted]))
    if not len(wrong):
        return places
    is_good = wrong.sum() <= ERRORS_LEFT * (len(wrong) - support.max()) and len(places) >= SURE_SHARE * wrong.sum()
    if not is_good or data.confidence.mean() > 1 - wrong.mean() + MAX_TOO_SURE:
        return places[:0]
    order = np.argsort(data.of_target[places] - data.confidence[places], kind="stable")
    return np.asarray(places[order])


#: The quantiles of the absolute error in a report.
QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

Rows = list[dict[str, Any]]


#: Makes the intervals for some rows of the table of predictions.
MakeIntervals = Callable[[Array], Intervals]


@dataclass(frozen=True)
class Vectors:
    """The predictions of an output with values or labels, for the examples with a target that counts.

    A label whose output is not finite counts as wrong. A value whose output is not finite is not used.

    Attributes:
        rows: the rows of the table of predictions, [n].
        target, prediction: [n, k] float64; 0 where they are not used.
        chances: the probabilities of labels, [n, k] float64; None for values.
        is_used: whether the target counts and the prediction can be compared with it, [n, k].
        not_finite: the number of examples with an output that is not finite.
        bad_columns: which values or labels have such outputs, [k] bool.
    """

    rows: Array
    target: Array
    prediction: Array
    chances: Array | None
    is_used: Array
    not_finite: int
    bad_columns: Array

    @property
    def is_complete(self) -> bool:
        """Whether every example has all of its targets."""
        return bool(self.is_used.all())

    def column(self, n: int, values: Array) -> Array:
        """Returns column `n` of values [n, k], for the examples that have it."""
        return np.asarray(values[self.is_used[:, n], n])

    def select_intervals(self, n: int, make_intervals: MakeIntervals, intervals: Intervals) -> Intervals:
        """Returns the intervals for the examples that have column `n`. `intervals` are for all examples."""
        return intervals if self.is_used[:, n].all() else make_intervals(self.rows[self.is_used[:, n]])

    def find_measured(self, intervals: Intervals) -> Array:
        """Returns which columns occur in an example with a weight above 0, [k] bool."""
        return np.asarray(self.is_used[intervals.weights > 0].any(axis=0))

    def average(self, values: Array) -> Array:
        """Averages values [n, k] over the columns that each example has, [n]."""
        return np.asarray((values * self.is_used).sum(axis=1) / self.is_used.sum(axis=1))

    def mean(self, values: Array, intervals: Intervals, finish: Any = None, is_error: bool = False) -> Estimate:
        """Returns the mean of all used values [n, k], as the metrics of training do. The mean of bool is a rate."""
        is_rate = values.dtype == bool
        sums = (values * self.is_used).sum(axis=1).astype(np.float64)
        amounts = self.is_used.sum(axis=1).astype(np.float64)
        return intervals.ratio(sums, amounts, finish, is_error=is_error, is_rate=is_rate)


def measure_values(
    names: Sequence[str], data: Vectors, intervals: Intervals, make_intervals: MakeIntervals
) -> tuple[dict[str, Estimate], Rows]:
    """Returns the metrics of values [n, k], and a row per value if there are several.

    Each value is measured on the examples that have it. If one of its outputs is not finite, its metrics are NaN.
    """
    errors = data.prediction - data.target
    measured = []
    for n in range(len(names)):
        of_column = data.select_intervals(n, make_intervals, intervals)
        if of_column.weights.any() and not data.bad_columns[n]:
            measured.append(measure_one(data.column(n, data.target), data.column(n, errors), of_column))
        else:
            measured.append(dict.fromkeys(("mae", "rmse", "r2", "bias"), Estimate(math.nan)))
    if len(names) == 1:
        return measured[0], []
    rows: Rows = []
    for n, name in enumerate(names):
        rows.append({"value": name, "examples": int(data.is_used[:, n].sum()), **measured[n]})
    r2 = explain_all(data, errors, intervals, make_intervals)
    estimates = {
        "mae": data.mean(np.abs(errors), intervals, is_error=True),
        "rmse": data.mean(np.square(errors), intervals, np.sqrt, is_error=True),
        "r2": r2,
    }
    if data.bad_columns.any():
        estimates = dict.fromkeys(estimates, Estimate(math.nan))
    return estimates, rows


def measure_one(target: Array, errors: Array, intervals: Intervals) -> dict[str, Estimate]:
    """Returns the metrics of one value, from its targets and errors [n]."""
    return {
        "mae": intervals.mean(np.abs(errors), is_error=True),
        "rmse": intervals.mean(errors**2, np.sqrt, is_error=True),
        "r2": explain(*find_unexplained(target, errors, intervals), intervals),
        "bias": intervals.mean(errors),
    }


def explain_all(data: Vectors, errors: Array, intervals: Intervals, make_intervals: MakeIntervals) -> Estimate:
    """Returns the mean coefficient of determination over the values that occur in an example with a weight above 0."""
    values = []
    influence = np.zeros(len(data.rows))
    for n in np.flatnonzero(data.find_measured(intervals)).tolist():
        of_column = data.select_intervals(n, make_intervals, intervals)
        value, own = find_unexplained(data.column(n, data.target), data.column(n, errors), of_column)
        values.append(value)
        influence[data.is_used[:, n]] += own
    if not values:
        return Estimate(math.nan)
    return explain(float(np.mean(values)), influence / len(values), intervals)


def find_unexplained(target: Array, errors: Array, intervals: Intervals) -> tuple[float, Array]:
    """Returns the share of the variance of targets [n] that remains in errors [n], and the
    influence of each row on it.
    """
    weights = intervals.weights
    spread = np.square(target - np.average(target, weights=weights)) if weights.any() else np.zeros(len(target))
    total = float(weights @ spread)
    if not total:
        return math.nan, np.zeros(len(target))
    value = float(weights @ errors**2) / total
    return value, weights * (errors**2 - value * spread) / total


def explain(unexplained: float, influence: Array, intervals: Intervals) -> Estimate:
    """Returns the coefficient of determination, which is at most 1."""
    value, low, high = intervals.error(unexplained, influence)
    return Estimate(1 - value, 1 - high, 1 - low)


def find_error_quantiles(errors: Array, weights: Array) -> Rows:
    """Returns quantiles of the absolute errors [n]: each is the smallest error that covers this
    share of the weights.
    """
    sizes = np.abs(errors)
    values = weighted_quantiles(sizes, QUANTILES, weights)
    return [{"quantile": q, "error": float(value)} for q, value in zip(QUANTILES, values, strict=True)]


def measure_labels(
    names: Sequence[str], data: Vectors, intervals: Intervals, make_intervals: MakeIntervals
) -> tuple[dict[str, Estimate], Rows]:
    """Returns the metrics of labels [n, labels], and a row per label. Each label is measured on the examples that have
    it.
    """
    assert data.chances is not None
    target = data.target > 0.5
    predicted = data.prediction > 0.5
    is_right = target == predicted
    is_known = data.find_measured(intervals)
    counted = target & data.is_used
    answered = predicted & data.is_used
    rates = rate_columns(counted, answered, counted & answered, counted | answered, intervals)
    del rates["iou"]
    macro = rates["f1"].select(is_known)
    estimates = {
        "accuracy": data.mean(is_right, intervals),
        "exact_match": intervals.mean((is_right | ~data.is_used).all(axis=1)),
        "macro_f1": intervals.average(macro, of_all=True),
    }
    weights = intervals.weights
    rows = make_class_rows(names, weights @ counted, weights @ answered, rates)
    for n, row in enumerate(rows):
        if not data.is_complete:
            row["examples"] = int(data.is_used[:, n].sum())
        of_column = data.select_intervals(n, make_intervals, intervals)
        if not is_known[n]:
            row |= {"roc_auc": Estimate(math.nan), "average_precision": Estimate(math.nan)}
            continue
        ranking = rank_scores(data.column(n, data.chances), data.column(n, target), of_column)
        row |= {"roc_auc": ranking.auc, "average_precision": ranking.average_precision}
    return estimates, rows


def rate_columns(true: Array, predicted: Array, both: Array, either: Array, intervals: Intervals) -> dict[str, Rates]:
    """Returns the rates of labels, or of the classes of positions, from the counts of each example, [n, labels]."""
    overlap = intervals.rate_columns(both, either)
    return {
        "iou": overlap,
        "precision": intervals.rate_columns(both, predicted),
        "recall": intervals.rate_columns(both, true),
        "f1": overlap.transform(to_f1),
    }


def measure_positions(
    columns: Mapping[str, Array], names: Sequence[str], is_sequence: bool, intervals: Intervals
) -> tuple[dict[str, Estimate], Rows]:
    """Returns the metrics of an output with many positions, and a row per class if its positions are counted.

    Args:
        columns: the kept values of each example, [n, ...] by name.
        is_sequence: whether the positions form a sequence, which has a perplexity.
    """
    positions = columns["positions"].astype(np.float64)

    def average(name: str, finish: Any = None) -> Estimate:
        is_rate = name == "correct"
        return intervals.ratio(columns[name] * positions, positions, finish, is_error=not is_rate, is_rate=is_rate)

    if "mean_error" in columns:
        return {"mae": average("mean_error"), "rmse": average("squared_error", np.sqrt)}, []
    estimates = {"accuracy": average("correct"), "mean_loss": average("loss")}
    if is_sequence:
        estimates["perplexity"] = average("loss", np.exp)
    if "both" not in columns:
        return estimates, []
    true, predicted, both = (columns[name].astype(np.float64) for name in ("true", "predicted", "both"))
    rates = rate_columns(true, predicted, both, true + predicted - both, intervals)
    estimates["mean_iou"] = intervals.average(rates["iou"])
    weights = intervals.weights
    return estimates, make_class_rows(names, weights @ true, weights @ predicted, rates)
