"""Analyses the kept predictions of one output: its metrics, its charts, and the errors of the examples."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from scaleflow.evaluation.collector import choose_form
from scaleflow.evaluation.intervals import Intervals
from scaleflow.evaluation.measures import (
    BINS,
    Classes,
    MakeIntervals,
    Ranking,
    Vectors,
    calibrate,
    count_confusion,
    divide_or,
    find_chance_error,
    find_error_quantiles,
    find_gain,
    find_label_errors,
    measure_classes,
    measure_decisions,
    measure_labels,
    measure_positions,
    measure_values,
    name_thresholds,
    rank_scores,
    read_classes,
    sum_bins,
)
from scaleflow.evaluation.predictions import Predictions
from scaleflow.interfaces import Outputs, is_smaller_better
from scaleflow.interfaces.estimate import Estimate
from scaleflow.interfaces.formatting import format_number
from scaleflow.interfaces.quantiles import average_pinball_losses
from scaleflow.pages.charts import Chart, Drawing, draw_confusion_matrix, draw_rates
from scaleflow.serving.prediction_columns import bound_values, find_sets

Array = np.ndarray[Any, Any]

#: Maximum number of classes in a chart: the weakest ones.
MAX_BARS = 25

#: Maximum number of confused pairs of classes in the report.
MAX_CONFUSED_PAIRS = 10

#: Maximum number of points in a scatter plot, and the number of bars in a histogram.
MAX_DOTS = 2000
HISTOGRAM_BARS = 40

#: A class with at most this share of the weight is rare: then its AUC and average precision are metrics of the run.
RARE_CLASS = 0.2

#: Metrics of classes that depend on the threshold.
DECIDED = ("accuracy", "balanced_accuracy", "macro_f1")


@dataclass(frozen=True)
class OutputAnalysis:
    """The analysis of the kept predictions of one output."""

    name: str  # the output's name; "" if it is the only output
    estimates: dict[str, Estimate]
    classes: list[dict[str, Any]]  # a row per class, label or value: metrics and counts
    drawings: list[Drawing]
    rows: Array  # the rows that count in the table of predictions, [n]
    scores: Array  # the score of each prediction, [n]; `measure` names it
    measure: str  # the name of the scores' mean
    worst: Array  # places in [n] of wrong predictions, the worst first
    #: Places in [n] of examples whose label is probably wrong
    suspects: Array = field(default_factory=lambda: np.array([], np.int64))
    #: Values that divide examples into slices, by name, [n]: texts or numbers
    groups: Mapping[str, Array] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # the facts that findings use

    @property
    def is_error(self) -> bool:
        """Whether smaller scores are better."""
        return is_smaller_better(self.measure)


def analyse_output(
    predictions: Predictions,
    output: str,
    described: Outputs,
    interval_count: int = 0,
    costs: tuple[float, float] | None = None,
) -> OutputAnalysis:
    """Computes the metrics and charts of an output's kept predictions.

    Args:
        interval_count: `evaluation.intervals`; 0: metrics have no intervals.
        costs: the costs of a missed positive of two classes and of a false alarm; None: the user sets none.
    """
    make_intervals = functools.partial(predictions.make_intervals, is_wanted=interval_count > 0)
    form = choose_form(described)
    if form in ("class", "best"):
        data = read_classes(predictions, output, described)
        return analyse_classes(output, described, data, make_intervals=make_intervals, costs=costs)
    if form == "positions":
        return analyse_positions(predictions, output, described, make_intervals=make_intervals)
    return analyse_vectors(predictions, output, described, make_intervals=make_intervals)


def analyse_classes(
    output: str,
    described: Outputs,
    data: Classes,
    make_intervals: MakeIntervals,
    costs: tuple[float, float] | None,
) -> OutputAnalysis:
    if not len(data.rows):
        return make_empty_analysis(output, "accuracy")
    intervals = make_intervals(data.rows)
    threshold = described.threshold
    estimates, rows = measure_classes(data, intervals)
    if threshold is not None:
        estimates = name_at_threshold(estimates, rows[1])
        if data.chances is not None:
            estimates |= measure_decisions(choose_likelier(data, data.chances), intervals)
    if costs is not None and len(data.names) == 2:
        miss_cost, alarm_cost = costs
        is_missed = (data.target == 1) & ~data.is_correct
        is_alarm = (data.target == 0) & ~data.is_correct
        estimates["cost_at_threshold"] = intervals.mean(miss_cost * is_missed + alarm_cost * is_alarm, is_error=True)
    counts = count_confusion(data, intervals.weights)
    weights = intervals.weights
    is_covered = np.array([], bool)
    if described.set_threshold is not None and data.chances is not None:
        sets = find_sets(described, data.chances)
        is_covered = sets[np.arange(len(sets)), data.target]
        estimates["coverage"] = intervals.mean(is_covered)
        estimates["set_size"] = intervals.mean(sets.sum(axis=1))
    answered = data.select(data.is_answered)
    calibrated = calibrate(answered, weights[data.is_answered])
    facts: dict[str, Any] = {
        "not_finite": int((~data.is_answered & (weights > 0)).sum()),
        "covered": is_covered,
        "chance error": find_chance_error(data.confidence, weights, intervals.members) if len(data.rows) else np.nan,
        "confused": list_confused(counts, data.names),
        "gain": find_gain(calibrated, weights[data.is_answered]) if data.chances is not None else 0.0,
    }
    drawings = []
    if len(data.names) <= 200:
        matrix = draw_confusion_matrix("confusion matrix", counts.tolist(), data.names)
        caption = "The shade is the share of the true class."
        drawings.append(Drawing("confusion_matrix", "Confusion matrix", matrix, caption=caption))
    drawings.append(draw_reliability(data, weights, estimates["calibration_error"]))
    if len(data.names) == 2 and data.chances is not None:
        ranking = rank_scores(data.chances[:, 1], data.target == 1, intervals)
        positives = float(weights[data.target == 1].sum())
        others = float(weights.sum()) - positives
        facts["thresholds"] = name_thresholds(ranking, positives, others, costs or (1.0, 1.0), chosen=threshold)
        facts["costs"] = costs
        facts["positives"] = float((data.target == 1).sum())
        facts["positive"] = data.names[1]
        facts["is_rare"] = 0 < min(positives, others) <= RARE_CLASS * (positives + others)
        drawings += draw_ranking(ranking, estimates, facts["thresholds"], name=data.names[1])
    else:
        drawings.append(draw_weakest(rows, "f1", "F1 of each class"))
    worst = np.flatnonzero(~data.is_correct)
    badness = np.where(data.is_answered, data.confidence - data.of_target, np.inf)
    worst = worst[np.argsort(-badness[worst], kind="stable")]
    return OutputAnalysis(
        output,
        estimates,
        rows,
        drawings=drawings,
        rows=data.rows,
        scores=data.is_correct.astype(np.float64),
        measure="accuracy",
        worst=worst,
        suspects=np.flatnonzero(data.is_answered)[find_label_errors(calibrated)],
        groups={"class": np.array(data.names, object)[data.target]},
        facts=facts,
    )


def name_at_threshold(estimates: Mapping[str, Estimate], positive: Mapping[str, Any]) -> dict[str, Estimate]:
    """Returns metrics with the suffix `_at_threshold` for those that depend on a chosen threshold.

    Without the suffix, they mean the more likely class. `positive` is the row of the second class, whose precision,
    recall and F1 are added.
    """
    named = {}
    for name, estimate in estimates.items():
        named[f"{name}_at_threshold" if name in DECIDED else name] = estimate
    for name in ("precision", "recall", "f1"):
        named[f"{name}_at_threshold"] = positive[name]
    return named


def choose_likelier(data: Classes, chances: Array) -> Classes:
    """Returns predictions of the more likely class, instead of predictions at a threshold."""
    return replace(data, predicted=np.where(data.is_answered, chances.argmax(axis=1), data.predicted))


def make_empty_analysis(output: str, measure: str, not_finite: int = 0) -> OutputAnalysis:
    """Returns the analysis of an output without any example whose target can be compared with it."""
    nothing = np.array([], np.int64)
    return OutputAnalysis(
        output,
        {measure: Estimate(math.nan)},
        classes=[],
        drawings=[],
        rows=nothing,
        scores=nothing.astype(np.float64),
        measure=measure,
        worst=nothing,
        facts={"not_finite": not_finite},
    )


def analyse_vectors(
    predictions: Predictions, output: str, described: Outputs, make_intervals: MakeIntervals
) -> OutputAnalysis:
    """Analyses an output with values or labels."""
    data = read_vectors(predictions, output, described)
    if not len(data.rows):
        measure = "mae" if data.chances is None else "accuracy"
        return make_empty_analysis(output, measure, not_finite=data.not_finite)
    if data.chances is not None:
        return analyse_labels(output, described, data, data.chances, make_intervals)
    return analyse_values(predictions, output, described, data, make_intervals)


def name_columns(described: Outputs) -> Sequence[str]:
    """Returns the names of an output's labels or values; their numbers if they have no names."""
    count = described.shape[0] if described.shape else 1
    return described.names or tuple(map(str, range(count)))


def analyse_labels(
    output: str, described: Outputs, data: Vectors, chances: Array, make_intervals: MakeIntervals
) -> OutputAnalysis:
    """Analyses an output with labels. `chances` are their probabilities, [n, labels]."""
    intervals = make_intervals(data.rows)
    estimates, classes = measure_labels(name_columns(described), data, intervals, make_intervals)
    is_right = (data.target > 0.5) == (data.prediction > 0.5)
    scores = data.average(is_right)
    losses = -np.log(np.clip(np.where(data.target > 0.5, chances, 1 - chances), 1e-12, 1))
    worst = np.flatnonzero(scores < 1)
    worst = worst[np.argsort(-data.average(losses)[worst], kind="stable")]
    return OutputAnalysis(
        output,
        estimates,
        classes,
        drawings=[draw_weakest(classes, "f1", "F1 of each label")],
        rows=data.rows,
        scores=scores,
        measure="accuracy",
        worst=worst,
        facts={"not_finite": data.not_finite},
    )


def analyse_values(
    predictions: Predictions, output: str, described: Outputs, data: Vectors, make_intervals: MakeIntervals
) -> OutputAnalysis:
    """Analyses an output with values."""
    names = name_columns(described)
    count = len(names)
    intervals = make_intervals(data.rows)
    estimates, classes = measure_values(names, data, intervals, make_intervals)
    is_covered = np.array([], bool)
    ends = list(bound_values(described, np.zeros((1, *described.model_shape))))
    if ends:
        read = functools.partial(read_number_columns, predictions, output, described)
        bounds = [read(column="prediction", end=f"_{end}")[data.rows] for end in ends]
        is_inside = (bounds[0] <= data.target) & (data.target <= bounds[-1])
        is_covered = data.average(is_inside)
        estimates |= measure_bounds(described, data, bounds, is_inside, intervals)
    errors = data.prediction - data.target
    scores = data.average(np.abs(errors) / find_scales(data, count))
    drawings = []
    for n, name in enumerate(names[:4]):
        if not data.is_used[:, n].any():
            continue
        label = "" if count == 1 else name
        weights = intervals.weights[data.is_used[:, n]]
        drawings += draw_errors(data.column(n, data.prediction), data.column(n, errors), label, weights=weights)
    gain = np.nan_to_num(np.fmin(estimates["r2"].low, estimates["r2"].value))
    facts = {
        "not_finite": data.not_finite,
        "covered": is_covered,
        "quantiles": find_error_quantiles(scores, intervals.weights),
        "gain": gain,
    }
    return OutputAnalysis(
        output,
        estimates,
        classes,
        drawings=drawings,
        rows=data.rows,
        scores=scores,
        measure="mae" if count == 1 else "error in standard deviations",
        worst=np.argsort(-scores, kind="stable"),
        groups={"target": data.target[:, 0]} if count == 1 else {},
        facts=facts,
    )


def measure_bounds(
    described: Outputs, data: Vectors, bounds: Sequence[Array], is_inside: Array, intervals: Intervals
) -> dict[str, Estimate]:
    """Returns the coverage of intervals, and for quantiles the pinball loss.

    Args:
        bounds: the ends of the intervals, or the quantiles, each [n, values].
        is_inside: which targets are inside of the intervals, [n, values] bool.
    """
    estimates = {"coverage": data.mean(is_inside, intervals)}
    if described.levels is not None:
        levels = np.array(described.levels)
        losses = average_pinball_losses(data.target, np.nan_to_num(np.stack(bounds, axis=-1)), levels)
        estimates["pinball"] = data.mean(losses, intervals, is_error=True)
    if data.not_finite:
        return dict.fromkeys(estimates, Estimate(math.nan))
    return estimates


def find_scales(data: Vectors, count: int) -> Array:
    """Returns the units in which errors are compared, [values]: of several values, the deviations of their targets."""
    scales = np.ones(count)
    for n in range(count):
        if count > 1 and data.is_used[:, n].any():
            scales[n] = max(float(data.column(n, data.target).std()), 1e-300)
    return scales


def read_vectors(predictions: Predictions, output: str, described: Outputs) -> Vectors:
    """Reads an output with values or labels, for the examples with a target that counts."""
    read = functools.partial(read_number_columns, predictions, output, described)
    target = read(column="target")
    prediction = read(column="prediction")
    chances = None if described.kind == "regression" else read(column="probability")
    has_target = np.isfinite(target)
    is_bad = has_target & ~np.isfinite(prediction if chances is None else prediction + chances)
    if chances is None:
        is_used = has_target & ~is_bad
        if described.levels is not None:
            for end in bound_values(described, np.zeros((1, *described.model_shape))):
                is_infinite = has_target & ~np.isfinite(read(column="prediction", end=f"_{end}"))
                is_bad = is_bad | is_infinite
                is_used = is_used & ~is_infinite
    else:
        is_used = has_target
        prediction = np.where(is_bad, target <= 0.5, prediction)
        chances = np.where(is_bad, target <= 0.5, chances)
    weights = predictions.weights()
    if weights is not None:
        is_bad &= (weights > 0)[:, None]
    rows = np.flatnonzero(is_used.any(axis=1))
    return Vectors(
        rows,
        np.where(is_used, target, 0.0)[rows],
        np.where(is_used, prediction, 0.0)[rows],
        None if chances is None else np.where(is_used, chances, 0.0)[rows],
        is_used[rows],
        not_finite=int(is_bad.any(axis=1).sum()),
        bad_columns=np.asarray(is_bad.any(axis=0)),
    )


def read_number_columns(predictions: Predictions, output: str, described: Outputs, column: str, end: str = "") -> Array:
    """Reads the columns of an output's values, [rows, k] float64. `end` is the suffix of their names."""
    count = described.shape[0] if described.shape else 1
    names = described.names or tuple(map(str, range(count)))
    suffixes = [""] if count == 1 else [f"_{name}" for name in names]
    parts = [predictions.column(f"{column}{suffix}{end}", output) for suffix in suffixes]
    return np.stack([np.asarray(part, np.float64) for part in parts], axis=1)


def analyse_positions(
    predictions: Predictions, output: str, described: Outputs, make_intervals: MakeIntervals
) -> OutputAnalysis:
    """Analyses an output with many positions per example."""
    kept = ("positions", "loss", "correct", "mean_error", "squared_error")
    columns = {name: predictions.column(name, output) for name in kept if predictions.has(name, output)}
    main = "correct" if "correct" in columns else "mean_error"
    rows = np.flatnonzero((columns["positions"] > 0) & np.isfinite(columns[main]))
    bad = np.zeros(len(predictions.table))
    if predictions.has("not_finite", output):
        bad = predictions.column("not_finite", output)
    weights = predictions.weights()
    if weights is not None:
        bad = np.where(weights > 0, bad, 0)
    if not len(rows):
        return make_empty_analysis(output, "accuracy" if main == "correct" else "mae", not_finite=int((bad > 0).sum()))
    columns = {name: values[rows].astype(np.float64) for name, values in columns.items()}
    for name in ("true", "predicted", "both"):
        if predictions.has(name, output):
            columns[name] = read_lists(predictions, name, output)[rows]
    names = described.names or tuple(map(str, range(described.shape[-1])))
    is_sequence = described.kind == "classification" and len(described.shape) == 2
    intervals = make_intervals(rows)
    estimates, classes = measure_positions(columns, names, is_sequence, intervals=intervals)
    drawings = []
    if classes:
        drawings.append(draw_weakest(classes, "iou", "Intersection over union of each class"))
    sums = predictions.positions.get(output)
    if sums:
        losses = divide_or(np.array(sums["loss"]), np.array(sums["count"]), np.nan)
        drawings.append(draw_by_position(np.exp(losses)))
    is_error = main == "mean_error"
    scores = columns[main]
    title = "Mean error of the examples" if is_error else "Share of correct positions of the examples"
    drawings.append(draw_histogram("examples", title, scores, label=title.lower(), weights=intervals.weights))
    worst = np.argsort(-scores if is_error else scores, kind="stable")
    if is_sequence:
        worst = np.argsort(-np.nan_to_num(columns["loss"], nan=np.inf), kind="stable")
    measure = "mae" if is_error else "accuracy"
    facts = {"unit": "positions", "not_finite": int((bad > 0).sum())}
    if is_error and facts["not_finite"]:
        estimates = dict.fromkeys(estimates, Estimate(math.nan))
    return OutputAnalysis(
        output,
        estimates,
        classes,
        drawings=drawings,
        rows=rows,
        scores=scores,
        measure=measure,
        worst=worst,
        facts=facts,
    )


def read_lists(predictions: Predictions, name: str, output: str) -> Array:
    """Returns a column of equally long lists as an array [rows, length]."""
    lists = predictions.table[f"{output}_{name}" if output else name].combine_chunks()
    return np.asarray(lists.flatten().to_numpy()).reshape(len(lists), -1)


def list_confused(counts: Array, names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the pairs of classes that are confused most often, from a confusion matrix `counts` [true, predicted]."""
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:MAX_CONFUSED_PAIRS]
    pairs = []
    for cell in order:
        true, predicted = divmod(int(cell), len(names))
        examples = float(wrong[true, predicted])
        if examples > 0:
            pairs.append({"true": names[true], "predicted": names[predicted], "examples": examples})
    return pairs


# Charts --------------------------------------------------------------------------------------


def draw_reliability(data: Classes, weights: Array, error: Estimate) -> Drawing:
    total, sure, right = sum_bins(data.confidence, data.is_correct, weights)
    chart = Chart("reliability", (0, 1), (0, 1), labels=("probability of the prediction", "share that is right"))
    chart.add_bars(np.linspace(0, 1, BINS + 1).tolist(), divide_or(right, total).tolist()).add_line(
        [0, 1], [0, 1], "rule"
    )
    is_used = total > 0
    chart.add_points((sure[is_used] / total[is_used]), (right[is_used] / total[is_used]))
    caption = f"On the dashed line, probabilities are right. Expected calibration error {format_number(error.value)}."
    return Drawing("reliability", "Reliability", chart.to_svg(), caption=caption)


def draw_ranking(
    ranking: Ranking, estimates: Mapping[str, Estimate], thresholds: Sequence[Mapping[str, Any]], name: str
) -> list[Drawing]:
    """Draws the ROC and the precision-recall curve of the class `name`. The second one shows the thresholds."""
    keep = np.unique(np.linspace(0, len(ranking.thresholds) - 1, 200).astype(int))
    false = ranking.false_rate[keep]
    true = ranking.true_rate[keep]
    precision = ranking.precision[keep]
    roc = Chart("ROC", (0, 1), (0, 1), labels=("false positive rate", "true positive rate"))
    roc.add_line([0, *false], [0, *true]).add_line([0, 1], [0, 1], "rule")
    curve = Chart("precision and recall", (0, 1), (0, 1), labels=("recall", "precision")).add_line(true, precision)
    points = np.array([[row["recall"], row["precision"]] for row in thresholds])
    curve.add_points(points[:, 0], points[:, 1])
    area = f"Area {format_number(estimates['roc_auc'].value)}."
    texts = "; ".join(f"{row['threshold']} {format_number(row['probability'])}" for row in thresholds)
    other = f"Average precision {format_number(estimates['average_precision'].value)}. Thresholds for {name}: {texts}."
    return [
        Drawing("roc", "ROC curve", roc.to_svg(), caption=area),
        Drawing("precision_recall", "Precision and recall", curve.to_svg(), caption=other),
    ]


def draw_weakest(rows: Sequence[Mapping[str, Any]], metric: str, title: str) -> Drawing:
    """Draws a metric of the classes, the weakest first."""
    known = [row for row in rows if row["support"] and np.isfinite(row[metric].value)]
    chosen = sorted(known, key=lambda row: float(row[metric].value))[:MAX_BARS]
    svg = draw_rates(title, [row["class"] for row in chosen], [row[metric] for row in chosen])
    more = f"The weakest {len(chosen)} of {len(known)}. " if len(known) > len(chosen) else ""
    return Drawing(f"{metric}_of_classes", title, svg, caption=f"{more}Lines are 95 % intervals.")


def draw_errors(prediction: Array, errors: Array, name: str, weights: Array) -> list[Drawing]:
    """Draws the residuals of a value."""
    shown = np.unique(np.linspace(0, len(errors) - 1, MAX_DOTS).astype(int))
    label, suffix = (f" of {name}", f"_{name}") if name else ("", "")
    x = prediction[shown]
    y = errors[shown]
    ends = (float(x.min()), float(x.max())), (float(y.min()), float(y.max()))
    chart = Chart("residuals", *ends, labels=("prediction", "prediction - target")).add_line(ends[0], (0, 0), "rule")
    scatter = Drawing(f"residuals{suffix}", f"Residuals{label}", chart.add_points(x, y).to_svg())
    title = f"Errors{label}"
    return [scatter, draw_histogram(f"errors{suffix}", title, errors, label="prediction - target", weights=weights)]


def draw_histogram(name: str, title: str, values: Array, label: str, weights: Array) -> Drawing:
    low, high = np.quantile(values, (0.005, 0.995)) if len(values) > 1000 else (values.min(), values.max())
    heights, edges = np.histogram(np.clip(values, low, high), HISTOGRAM_BARS, weights=weights)
    chart = Chart(title, (float(edges[0]), float(edges[-1])), (0, float(heights.max())), labels=(label, "examples"))
    return Drawing(name, title, chart.add_bars(edges.tolist(), heights.tolist()).to_svg())


def draw_by_position(values: Array) -> Drawing:
    is_known = np.isfinite(values)
    places = np.arange(1, len(values) + 1)[is_known]
    y = (0, float(values[is_known].max()))
    labels = ("position in the sequence", "perplexity")
    chart = Chart("perplexity by position", (1, len(values)), y, labels=labels)
    return Drawing("positions", "Perplexity by position", chart.add_line(places, values[is_known]).to_svg())
