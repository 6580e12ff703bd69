"""Figures of each kind of output: classes and labels, values, many positions for each example.

All are weighted by the examples' weights. scikit-learn defines them: `precision_recall_fscore_support`,
`roc_auc_score`, `average_precision_score`, `log_loss`, `mean_absolute_error`, `r2_score`, `jaccard_score` and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scaleflow.evaluation.predictions import Predictions
from scaleflow.evaluation.resampling import Figure, Resamples
from scaleflow.interfaces import Outputs
from scaleflow.interfaces.quantiles import weighted_quantiles

#: Bins of equal width of the confidence, for the reliability diagram and the calibration error (Guo et al. 2017).
BINS = 10

#: Ranking figures take a sort and two running sums for each class: fewer resamples are enough for their intervals.
RANKED_RESAMPLES = 200

#: Where units are drawn, scores are rounded to so many steps.
MOST_STEPS = 1000

#: The powers of probabilities that a calibration tries, its rounds for each, the examples that it uses, and the least
#: probability that it sees.
POWERS, FITTING_ROUNDS, MOST_FITTED, LEAST_CHANCE = np.geomspace(0.1, 2, 8), 12, 10_000, 1e-9

#: Labels are doubted only by a model with at most this share of a constant's errors, that is sure at this share of its
#: own, and whose mean confidence is above its accuracy by at most this.
ERRORS_LEFT, SURE_SHARE, MOST_TOO_SURE = 0.5, 2 / 3, 0.05

#: The log loss, summed over examples, that a model has to save beyond what the calibration may save by chance.
LEAST_SAVED = 4.0

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Classes:
    """The predictions of one output with a class for each example, without those whose target is missing.

    An example whose output is not finite has a wrong answer: the probability of its class is 0, and that of the others
    is the same. Its prediction is the first of the others, and its confidence is 0.

    Attributes:
        rows: of the table of predictions, [n].
        target, predicted: classes, [n] int64.
        confidence, of_target: the probabilities of the predicted and of the true class, [n] float64.
        rank: of the true class among all, from 1, [n].
        chances: [n, classes] float32; None if there are too many classes to keep them.
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
        """Returns some of the examples, [n] bool."""
        arrays: dict[str, Any] = {name: each for name, each in vars(self).items() if isinstance(each, np.ndarray)}
        return replace(self, **{name: each[is_used] for name, each in arrays.items()})


def read_classes(predictions: Predictions, output: str, described: Outputs) -> Classes:
    """Reads the predictions of an output with a class for each example."""
    count = 2 if described.kind == "binary" else described.shape[-1]
    names = described.names or tuple(map(str, range(count)))
    column = predictions.column
    target, predicted = (number_classes(column(name, output), described.names) for name in ("target", "prediction"))
    rows = np.flatnonzero(target >= 0)
    target, predicted, confidence = (
        target[rows],
        predicted[rows],
        column("probability", output)[rows].astype(np.float64),
    )
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
        confidence, of_target = np.where(is_bad, 0.0, confidence), np.where(is_bad, 0.0, of_target)
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
    """Returns the classes of a column, [n] int64; -1 for a missing one."""
    if names is None:
        return np.where(np.isnan(values), -1, values).astype(np.int64) if values.dtype.kind == "f" else values
    places = {name: n for n, name in enumerate(names)}
    return np.array([places.get(value, -1) for value in values], np.int64)


def count_confusion(data: Classes, weights: Array) -> Array:
    """Returns the confusion matrix, [true, predicted]."""
    count = len(data.names)
    return np.bincount(data.target * count + data.predicted, weights, count**2).reshape(count, count)


def measure_classes(data: Classes, resamples: Resamples) -> tuple[dict[str, Figure], list[dict[str, Any]]]:
    """Returns the figures of all examples, and a row for each class: its figures and its counts."""
    count, weights = len(data.names), resamples.weights
    groups = (data.target, data.predicted, np.where(data.is_correct, data.target, count))
    exact = [np.bincount(group, weights, count + 1)[:count] for group in groups]
    drawn = [resamples.sum_classes(group, count + 1)[:, :count] for group in groups]
    figures = {
        "accuracy": resamples.mean(data.is_correct),
        "balanced_accuracy": resamples.figure(mean_recall(*exact), mean_recall(*drawn), is_rate=True),
        "macro_f1": resamples.figure(macro_f1(*exact), macro_f1(*drawn), is_rate=True),
        "log_loss": resamples.mean(-np.log(np.clip(data.of_target, EPSILON, 1 - EPSILON)), is_error=True),
    }
    figures |= {f"top_{k}_accuracy": resamples.mean(data.rank <= k) for k in (3, 5) if count > 2 * k}
    figures["calibration_error"] = measure_calibration(data.confidence, data.is_correct, resamples)
    rows = make_class_rows(data.names, exact, drawn, resamples=resamples)
    if data.chances is not None:
        figures |= rank_all_classes(data, data.chances, resamples, rows=rows)
    return figures, rows


#: The least probability whose logarithm is taken, as in scikit-learn.
EPSILON = float(np.finfo(np.float64).eps)


def divide_or(values: Array, by: Array, otherwise: float = 0.0) -> Array:
    """Returns quotients, or another value where the divisor is not above 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(by > 0, values / by, otherwise))


def rate_classes(support: Array, predicted: Array, correct: Array) -> dict[str, Array]:
    """Returns precision, recall and F1 of each class, [..., classes]; 0 where they are not defined."""
    return {
        "precision": divide_or(correct, predicted),
        "recall": divide_or(correct, support),
        "f1": divide_or(2 * correct, support + predicted),
    }


def make_class_rows(
    names: Sequence[str],
    exact: Sequence[Array],
    drawn: Sequence[Array],
    resamples: Resamples,
    rate: Callable[..., dict[str, Array]] = rate_classes,
) -> list[dict[str, Any]]:
    """Returns a row for each class, from the sums (true, predicted, both), [classes] and [1 + resamples, classes]."""
    pairs = zip(rate(*exact).items(), rate(*drawn).values(), strict=True)
    figures = {name: resamples.figures(values, resampled, is_rate=True) for (name, values), resampled in pairs}
    return [
        {
            "class": name,
            "support": float(exact[0][n]),
            "predicted": float(exact[1][n]),
            **{key: each[n] for key, each in figures.items()},
        }
        for n, name in enumerate(names)
    ]


def mean_recall(support: Array, predicted: Array, correct: Array) -> Any:
    """Returns the mean recall of the classes that occur, [...]."""
    return divide_or(divide_or(correct, support).sum(axis=-1), (support > 0).sum(axis=-1))


def macro_f1(support: Array, predicted: Array, correct: Array) -> Any:
    """Returns the mean F1 of the classes that occur or are predicted, [...]."""
    occurs = (support + predicted > 0).sum(axis=-1)
    return divide_or(rate_classes(support, predicted, correct)["f1"].sum(axis=-1), occurs)


# Ranking -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """How well scores tell one class from the others.

    Attributes:
        auc: the area under the ROC curve.
        average_precision: the area under the precision-recall curve, by steps.
        false_rate, true_rate, precision: at each threshold, from the highest on, [thresholds].
        thresholds: the distinct scores, descending.
    """

    auc: Figure
    average_precision: Figure
    false_rate: Array
    true_rate: Array
    precision: Array
    thresholds: Array


def rank_all_classes(
    data: Classes, chances: Array, resamples: Resamples, rows: Sequence[dict[str, Any]]
) -> dict[str, Figure]:
    """Adds the areas of each class to its row, and returns their means; of two classes those of the second."""
    if len(data.names) == 2:
        ranking = rank_scores(chances[:, 1], data.target == 1, resamples)
        return {"roc_auc": ranking.auc, "average_precision": ranking.average_precision}
    for n, row in enumerate(rows):
        ranking = rank_scores(chances[:, n], data.target == n, resamples)
        row |= {"roc_auc": ranking.auc, "average_precision": ranking.average_precision}
    return {}


def rank_scores(scores: Array, is_positive: Array, resamples: Resamples) -> Ranking:
    """Returns how well scores [n] rank the positives [n] bool before the others."""
    thresholds, *curve = accumulate(scores, is_positive, resamples.weights[None])
    values, most = areas(*curve), 1 + RANKED_RESAMPLES
    if resamples.members is None:
        drawn = areas(*accumulate(resamples.take(scores), resamples.take(is_positive), resamples.draws[:most])[1:])
    else:
        steps = min(len(thresholds), MOST_STEPS)
        step = np.searchsorted(-thresholds, -scores) * steps // max(1, len(thresholds))
        sums = (resamples.sum_classes(step, steps, is_kind, most=most) for is_kind in (is_positive, ~is_positive))
        drawn = areas(*(np.cumsum(each, axis=1, dtype=np.float64) for each in sums))
    auc, precision = (resamples.figure(float(v[0]), each, is_rate=True) for v, each in zip(values, drawn, strict=True))
    true, false = (each[0] for each in curve)
    false_rate, true_rate, share = divide_or(false, false[-1]), divide_or(true, true[-1]), divide_or(true, true + false)
    return Ranking(auc, precision, false_rate, true_rate=true_rate, precision=share, thresholds=thresholds)


def accumulate(scores: Array, is_positive: Array, draws: Array) -> tuple[Array, Array, Array]:
    """Returns distinct scores, descending, and the positives and the others with at least each, [draws, thresholds]."""
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
    drawn = draws[:, order].astype(np.float64)
    true, total = (np.cumsum(each, axis=1)[:, ends] for each in (drawn * is_positive[order], drawn))
    return scores[order][ends], true, total - true


def areas(true: Array, false: Array) -> tuple[Array, Array]:
    """Returns the area under the ROC curve and the average precision of each draw; NaN if a class does not occur."""
    positives, others = true[:, -1:], false[:, -1:]
    with np.errstate(invalid="ignore", divide="ignore"):
        true_steps, false_steps = (np.diff(each, axis=1, prepend=0.0) for each in (true, false))
        auc = ((true - true_steps / 2) * false_steps).sum(axis=1) / (positives * others)[:, 0]
        precision = (divide_or(true, true + false) * true_steps).sum(axis=1) / positives[:, 0]
    is_both = (positives > 0) & (others > 0)
    return np.where(is_both[:, 0], auc, np.nan), np.where(positives[:, 0] > 0, precision, np.nan)


def name_thresholds(
    ranking: Ranking, positives: float, others: float, costs: tuple[float, float], chosen: float | None = None
) -> list[dict[str, Any]]:
    """Returns a row for each threshold of the probability of the positive class that may be of use: the usual one, the
    one that was chosen, the one with the highest F1, and the one whose errors cost least.

    `costs` are those of a miss and of a false alarm; the cost of a row is a mean over all examples. With the last row,
    1 may stand for "never".
    """
    found = np.append(ranking.true_rate * positives, 0.0)
    alarms = np.append(ranking.false_rate * others, 0.0)
    miss_cost, alarm_cost = costs
    mean_costs = (alarms * alarm_cost + (positives - found) * miss_cost) / (positives + others)
    f1 = divide_or(2 * found, found + alarms + positives)
    fixed = {"usual": 0.5, **({} if chosen is None else {"chosen": chosen})}
    least = {name: np.float32(each) for name, each in fixed.items()}  # as `choose_classes` compares
    least["usual"] = np.nextafter(least["usual"], np.float32(1))  # the class is predicted if it is the likelier one
    places = {name: int(np.searchsorted(-ranking.thresholds, -each, "right")) - 1 for name, each in least.items()}
    cost = f"least cost (a miss costs {miss_cost:g}, a false alarm {alarm_cost:g})"
    rows = []
    for name, at in {**places, "highest F1": int(f1.argmax()), cost: int(mean_costs.argmin())}.items():
        is_never = at in (-1, len(ranking.thresholds))
        rows.append(
            {
                "threshold": name,
                "probability": fixed[name] if name in fixed else 1.0 if is_never else float(ranking.thresholds[at]),
                "precision": float(divide_or(found, found + alarms)[at]),
                "recall": float(divide_or(found, np.array(positives))[at]),
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
    """Returns the weights, the sums of the confidence, and those of the correct predictions of each bin."""
    bins = bin_confidence(confidence)
    total, sure, right = (
        np.bincount(bins, weights * each, BINS) for each in (np.ones(len(bins)), confidence, is_correct)
    )
    return total, sure, right


def measure_calibration(confidence: Array, is_correct: Array, resamples: Resamples) -> Figure:
    """Returns the expected calibration error: the mean distance of confidence and accuracy over the bins."""
    total, sure, right = sum_bins(confidence, is_correct, resamples.weights)
    value = float(np.abs(sure - right).sum() / total.sum()) if total.sum() else float("nan")
    gaps = resamples.sum_classes(bin_confidence(confidence), BINS, confidence - is_correct)
    return resamples.figure(value, np.abs(gaps).sum(axis=1) / resamples.totals)


def find_chance_error(confidence: Array, weights: Array, units: Array | None = None, count: int = 200) -> float:
    """Returns the calibration error that 95 % of models with this confidence stay below if they are well calibrated.

    It is drawn (Broecker and Smith 2007): few examples, or units that are right or wrong as a whole, make an error.
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
    """Returns predictions whose probabilities are right on average, fitted on their own labels with weights [n].

    Weights of classes move probabilities, and so does a model that is too sure. A temperature and a factor for each
    class undo that: the mean probability of each class becomes its share of the labels.
    """
    if data.chances is None or not len(data.rows):
        return data
    chances = np.maximum(data.chances, LEAST_CHANCE).astype(np.float64)
    places = np.unique(np.linspace(0, len(chances) - 1, MOST_FITTED).astype(np.int64))
    target, fitted, shares, count = data.target[places], chances[places], weights[places], len(data.names)
    if not shares.any():
        return data
    support = np.bincount(target, shares, count)
    best = math.inf, 1.0, np.ones(count)
    for power in POWERS:
        powered, factors = fitted**power, np.ones(count)
        for _ in range(FITTING_ROUNDS):
            factors = divide_or(support, (shares / (powered @ factors)) @ powered)
        of_target = (powered * factors)[np.arange(len(target)), target] / (powered @ factors)
        loss = float(-np.average(np.log(np.maximum(of_target, EPSILON)), weights=shares))
        best = min(best, (loss, power, factors), key=lambda each: each[0])
    chances = chances ** best[1] * best[2]
    chances /= chances.sum(axis=1, keepdims=True)
    of_target, confidence = chances[np.arange(len(chances)), data.target], chances.max(axis=1)
    return replace(data, predicted=chances.argmax(axis=1), confidence=confidence, of_target=of_target, chances=chances)


def find_gain(calibrated: Classes, weights: Array) -> float:
    """Returns the share of a constant's log loss that the model saves; 0 if that may be chance."""
    if not weights.any():
        return 0.0
    shares = np.bincount(calibrated.target, weights) / weights.sum()
    constant = float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())
    saved = constant + float(np.average(np.log(np.maximum(calibrated.of_target, EPSILON)), weights=weights))
    return saved / constant if constant and saved * len(calibrated.target) > LEAST_SAVED else 0.0


def find_label_errors(calibrated: Classes) -> Array:
    """Returns the examples whose label is probably wrong, the most likely first: places in [n].

    Confident learning (Northcutt et al. 2021): the model predicts another class with at least the mean probability that
    it gives this class where it is the label. There are none if the model does not know better than the labels: it has
    to make at most half of the errors of a constant, it has to be sure at most of them, and not more often than right.
    """
    data = calibrated
    count, wrong = len(data.names), ~data.is_correct
    support = np.bincount(data.target, minlength=count)
    usual = divide_or(np.bincount(data.target, data.of_target, count), support, 1.0)
    places = np.flatnonzero(wrong & (data.confidence >= usual[data.predicted]))
    if not len(wrong):
        return places
    is_good = wrong.sum() <= ERRORS_LEFT * (len(wrong) - support.max()) and len(places) >= SURE_SHARE * wrong.sum()
    if not is_good or data.confidence.mean() > 1 - wrong.mean() + MOST_TOO_SURE:
        return places[:0]
    order = np.argsort(data.of_target[places] - data.confidence[places], kind="stable")
    return np.asarray(places[order])


#: The quantiles of the absolute error that a report has.
QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

Rows = list[dict[str, Any]]


#: Makes resamples of some rows of the table of predictions.
Resample = Callable[[Array], Resamples]


@dataclass(frozen=True)
class Vectors:
    """The predictions of one output with values, or with labels, for the examples with a target that counts.

    A label whose output is not finite has a wrong answer. A value whose output is not finite is not used.

    Attributes:
        rows: of the table of predictions, [n].
        target, prediction: [n, k] float64; 0 where they are not used.
        chances: the probabilities of labels, [n, k] float64; None for values.
        is_used: whether the target counts, and the prediction can be compared with it, [n, k].
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
        """Returns column `n` of values [n, k] for the examples that have it."""
        return np.asarray(values[self.is_used[:, n], n])

    def resample_column(self, n: int, resample: Resample, resamples: Resamples) -> Resamples:
        """Returns resamples of the examples that have column `n`; `resamples` are those of all."""
        return resamples if self.is_used[:, n].all() else resample(self.rows[self.is_used[:, n]])

    def average(self, values: Array) -> Array:
        """Averages values [n, k] over what each example has, [n]."""
        return np.asarray((values * self.is_used).sum(axis=1) / self.is_used.sum(axis=1))

    def mean(self, values: Array, resamples: Resamples, finish: Any = None, is_error: bool = False) -> Figure:
        """Returns the mean of values [n, k] over all that are used, as the metrics of training."""
        if self.is_complete:
            return resamples.mean(values.mean(axis=1), finish, is_error=is_error)
        sums = np.stack([(values * self.is_used).sum(axis=1), self.is_used.sum(axis=1)], axis=1).astype(np.float64)
        exact, drawn = resamples.sum_columns(sums)
        finish = finish or np.asarray
        value = float(finish(divide_or(exact[0], exact[1], np.nan)))
        return resamples.figure(value, finish(divide_or(drawn[:, 0], drawn[:, 1], np.nan)), is_error=is_error)


def measure_values(
    names: Sequence[str], data: Vectors, resamples: Resamples, resample: Resample
) -> tuple[dict[str, Figure], Rows]:
    """Returns the figures of values [n, k], and a row for each of them if there are several.

    A value is measured on the examples that have it. It has no error if one of its outputs is not finite.
    """
    errors = data.prediction - data.target
    measured = []
    for n in range(len(names)):
        if data.is_used[:, n].any():
            of_column = data.resample_column(n, resample, resamples)
            found = measure_one(data.column(n, data.target), data.column(n, errors), of_column)
        else:
            found = dict.fromkeys(("mae", "rmse", "r2", "bias"), Figure(math.nan))
        measured.append(dict.fromkeys(found, Figure(math.nan)) if data.bad_columns[n] else found)
    if len(names) == 1:
        return measured[0], []
    rows: Rows = [
        {"value": name, "examples": int(data.is_used[:, n].sum()), **each}
        for n, (name, each) in enumerate(zip(names, measured, strict=True))
    ]
    r2 = [each["r2"].value for n, each in enumerate(measured) if data.is_used[:, n].any() or data.bad_columns[n]]
    figures = {
        "mae": data.mean(np.abs(errors), resamples, is_error=True),
        "rmse": data.mean(np.square(errors), resamples, np.sqrt, is_error=True),
        "r2": Figure(float(np.mean(r2)) if r2 else math.nan),
    }
    return (dict.fromkeys(figures, Figure(math.nan)) if data.bad_columns.any() else figures), rows


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
        "mae": resamples.mean(np.abs(errors), is_error=True),
        "rmse": resamples.mean(errors**2, np.sqrt, is_error=True),
        "r2": resamples.figure(float(explain(exact)), explain(drawn)),
        "bias": resamples.mean(errors),
    }


def find_error_quantiles(errors: Array, weights: Array) -> Rows:
    """Returns quantiles of the absolute errors [n]: the least error that at least this share of the weights has."""
    sizes = np.abs(errors)
    values = weighted_quantiles(sizes, QUANTILES, weights)
    return [{"quantile": q, "error": float(value)} for q, value in zip(QUANTILES, values, strict=True)]


def measure_labels(
    names: Sequence[str], data: Vectors, resamples: Resamples, resample: Resample
) -> tuple[dict[str, Figure], Rows]:
    """Returns the figures of labels [n, labels], and a row for each label, which is measured on the examples that have
    it.
    """
    assert data.chances is not None
    target, predicted = data.target > 0.5, data.prediction > 0.5
    is_right = target == predicted
    counted = (target & data.is_used, predicted & data.is_used, target & predicted & data.is_used)
    parts = [resamples.sum_columns(each.astype(np.float64)) for each in counted]
    exact, drawn = ([part[n] for part in parts] for n in (0, 1))
    f1, drawn_f1 = (rate_classes(*each)["f1"] for each in (exact, drawn))
    is_known = np.asarray(data.is_used.any(axis=0))
    macro = (f1[is_known].mean(), drawn_f1[:, is_known].mean(axis=1)) if is_known.any() else (math.nan, drawn_f1[:, 0])
    figures = {
        "accuracy": data.mean(is_right, resamples),
        "exact_match": resamples.mean((is_right | ~data.is_used).all(axis=1)),
        "macro_f1": resamples.figure(float(macro[0]), macro[1], is_rate=True),
    }
    rows = make_class_rows(names, exact, drawn, resamples=resamples)
    for n, row in enumerate(rows):
        if not data.is_complete:
            row["examples"] = int(data.is_used[:, n].sum())
        of_column = data.resample_column(n, resample, resamples)
        if not is_known[n]:
            row |= {"roc_auc": Figure(math.nan), "average_precision": Figure(math.nan)}
            continue
        ranking = rank_scores(data.column(n, data.chances), data.column(n, target), of_column)
        row |= {"roc_auc": ranking.auc, "average_precision": ranking.average_precision}
    return figures, rows


def measure_positions(
    columns: Mapping[str, Array], names: Sequence[str], is_sequence: bool, resamples: Resamples
) -> tuple[dict[str, Figure], Rows]:
    """Returns the figures of an output with many positions, and a row for each class if its positions are counted.

    Args:
        columns: what is kept of each example, [n, ...] by name.
        is_sequence: whether the positions are those of a sequence, whose perplexity is of interest.
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
    figures["mean_iou"] = resamples.figure(float(means[0]), means[1], is_rate=True)
    return figures, make_class_rows(names, exact, drawn, resamples=resamples, rate=overlap_classes)


def overlap_classes(true: Array, predicted: Array, both: Array) -> dict[str, Array]:
    """Returns the intersection over union of each class, [..., classes], NaN where it does not occur, and its rates."""
    return {"iou": divide_or(both, true + predicted - both, np.nan), **rate_classes(true, predicted, both)}
