"""Findings: what a user should know first, each with its figure and the rule behind it.

The thresholds are those of skore's checks where it has one: an overfit gap of max(0.03, 10 %), a baseline within
max(0.01, 3 %), one column within max(0.03, 10 %) of the model, an importance below 1e-3.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scaleflow.evaluation.outputs import OutputAnalysis
from scaleflow.evaluation.resampling import MIN_UNITS, Units
from scaleflow.interfaces import is_smaller_better, name_metric
from scaleflow.interfaces.figure import Figure, describe_figure
from scaleflow.interfaces.formatting import format_number, join_first

#: Above this, probabilities are wrong by so much that decisions suffer.
MAX_CALIBRATION_ERROR = 0.05

#: The least number of labels that are suspected, and their least share.
MIN_SUSPECTS = 5
MIN_SUSPECT_SHARE = 0.02

#: The gap between training and test from which on a model is overfit; of errors only the share counts.
MIN_OVERFIT_GAP = 0.03
MIN_OVERFIT_SHARE = 0.1

#: The least gain over the baseline; of errors only the share counts.
MIN_BASELINE_GAIN = 0.01
MIN_BASELINE_SHARE = 0.03

#: The share of a constant's loss (log loss, or squared error) that a model has to save to be better, whatever its
#: accuracy: if one class is rare, or classes have weights, the accuracy of a useful model may be that of a constant.
MIN_LOSS_GAIN = 0.03

#: One column tells as much as the model if it is so close; of errors only the share counts.
COLUMN_GAP = 0.03
COLUMN_SHARE = 0.1

#: F1 at the usual threshold is judged by so many examples of the class; another threshold has to gain so much.
MIN_POSITIVES = 50
MIN_F1_GAIN = 0.1

#: Another threshold has to save this share of the cost at the usual one.
MIN_SAVING = 0.1

#: The most findings of a rule that are named one by one.
MAX_NAMED = 3

#: The most columns that a finding names.
MAX_COLUMNS = 10

#: Metrics that compare training, test and baseline, the first that an output has.
COMPARED = ("accuracy", "mae")


@dataclass(frozen=True)
class KnownOfRun:
    """What is known of the run besides its predictions.

    Attributes:
        train: the metrics of the training split, by the name of the metric: `accuracy`, `price/mae`.
        together: findings about the data, of rows that belong together: the figures are too good.
        doubts: texts about the model by the rule that found them: BatchNorm, frozen layers.
        columns: a row for each input column: its `importance`, and how good it is `alone`; empty if not measured.
        mattered: what mattered in examples, by their index: a grid of shares of a picture, or the words of a text, each
            with its share.
        curves: the points of metrics and of the learning rate during the training; `curve_unit` is what they count.
    """

    train: Mapping[str, float] = field(default_factory=dict)
    baseline: Mapping[str, float] = field(default_factory=dict)
    together: Sequence[Mapping[str, str]] = ()
    doubts: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[Mapping[str, Any]] = ()
    mattered: Mapping[int, Any] = field(default_factory=dict)
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    curve_unit: str = "epoch"


@dataclass(frozen=True)
class Finding:
    """Something that a user should know."""

    rule: str
    text: str  # what was found, with its figure
    because: str  # the rule in words, with its threshold


def find_all(
    analyses: Sequence[OutputAnalysis],
    slices: Sequence[Mapping[str, Any]],
    context: KnownOfRun,
    is_calibrated: bool = False,
) -> list[Finding]:
    """Returns all findings: outputs that are no numbers first, then those about the data and the model as a whole.

    `is_calibrated` says that the validation rows have decided about a calibration.
    """
    found = [finding for analysis in analyses for finding in judge_finite(analysis)]
    found += [Finding(each["rule"], each["text"], each["because"]) for each in context.together]
    found += [Finding(rule, text, "of the model, before its training") for rule, text in context.doubts.items()]
    for analysis in analyses:
        found += compare_splits(analysis, context)
        found += judge_classes(analysis, is_calibrated)
        found += judge_threshold(analysis)
    found += judge_columns(analyses[0], context.columns)
    found += judge_slices(slices)
    return found


def judge_slices(slices: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Names the first weak slices, and says how many more there are."""
    weak = [row for row in slices if row["is_weak"]]
    for row in weak[:MAX_NAMED]:
        metric = name_metric(row["output"], row["metric"])
        figure = describe_figure(Figure(row["value"], row["low"], row["high"]))
        where = f"{row['column']}={row['slice']} ({row['examples']:,} examples)"
        whole = format_number(row["value"] - row["difference"])
        text = f"{metric} {figure} for {where}, {whole} for all"
        yield Finding("weak slice", text, "worse than all by max(0.03, 10 %), and not by chance (5 %)")
    if len(weak) > MAX_NAMED:
        text = f"{len(weak) - MAX_NAMED} more slices are weak; slices.csv lists them"
        yield Finding("weak slice", text, "the same")


def add_name(analysis: OutputAnalysis, text: str) -> str:
    """Returns a text about an output, which names it if there are several."""
    return f"{analysis.name}: {text}" if analysis.name else text


def judge_finite(analysis: OutputAnalysis) -> Iterator[Finding]:
    """Judges whether the model answers with numbers at all."""
    count = analysis.facts.get("not_finite", 0)
    if not count:
        return
    effect = "there is no mean error" if "mae" in analysis.figures else "they count as wrong answers"
    text = f"the model has no answer for {count:,} examples, whose outputs are NaN or infinite; {effect}"
    yield Finding("not finite", add_name(analysis, text), "an output that is not finite, for a target that counts")


def judge_units(units: Units | None) -> Iterator[Finding]:
    """Judges whether there are enough units for the intervals."""
    if units is not None and units.effective < MIN_UNITS:
        yield Finding("few groups", f"intervals are rough, over {units.describe()}", f"fewer than {MIN_UNITS}")


def compare_splits(analysis: OutputAnalysis, context: KnownOfRun) -> Iterator[Finding]:
    """Compares a metric with that of training, and with the baseline."""
    metric = next((name for name in COMPARED if name in analysis.figures), None)
    if metric is None:
        return
    name = name_metric(analysis.name, metric)
    figure = analysis.figures[metric]
    is_error = is_smaller_better(metric)
    train = context.train.get(name)
    baseline = context.baseline.get(name)
    if train is not None and is_overfit(figure, train, is_error):
        text = f"{name} is {format_number(train)} in training and {describe_figure(figure)} here"
        yield Finding("overfit", text, "a gap of at least max(0.03, 10 %), beyond the interval")
    best = 0.0 if is_error else 1.0
    if baseline is not None and baseline != best:  # there is something to gain
        gain = baseline - figure.value if is_error else figure.value - baseline
        needed = max(0.0 if is_error else MIN_BASELINE_GAIN, MIN_BASELINE_SHARE * abs(baseline))
        if gain < needed and analysis.facts.get("gain", 0.0) < MIN_LOSS_GAIN:
            text = f"{name} {describe_figure(figure)} is no better than {format_number(baseline)}"
            text += ", always the same answer"
            yield Finding("baseline", text, "a gain of less than max(0.01, 3 %), and of 3 % of the loss")


def is_overfit(figure: Figure, train: float, is_error: bool) -> bool:
    """Returns whether a metric of the training is much better than the figure, and better than its whole interval."""
    gap = figure.value - train if is_error else train - figure.value
    needed = max(0.0 if is_error else MIN_OVERFIT_GAP, MIN_OVERFIT_SHARE * abs(train))
    is_large = gap >= needed
    if not is_large or np.isnan(figure.low):
        return is_large
    return train < figure.low if is_error else train > figure.high


def judge_classes(analysis: OutputAnalysis, is_calibrated: bool) -> Iterator[Finding]:
    """Judges the classes of an output, their probabilities and their labels."""
    lost = [row for row in analysis.classes if "recall" in row and row["support"] and not row["recall"].value]
    if lost:
        unit = analysis.facts.get("unit", "examples")
        texts = []
        for row in sorted(lost, key=lambda row: -float(row["support"])):
            never = "" if row["predicted"] else ", never predicted"
            texts.append(f"{row['class']} ({format_number(row['support'])} {unit}{never})")
        text = add_name(analysis, f"not found once: {join_first(texts)}")
        yield Finding("recall 0", text, "a class of any size with recall 0")
    error = analysis.figures.get("calibration_error")
    chance = analysis.facts.get("chance error", np.nan)
    if error is not None and error.value > max(MAX_CALIBRATION_ERROR, chance):
        text = add_name(analysis, f"probabilities are off by {describe_figure(error)} on average")
        if not is_calibrated:
            text += "; try evaluation.calibrate=auto"
        yield Finding("calibration", text, "a calibration error above 0.05, and above what chance gives (95 %)")
    suspects = len(analysis.suspects)
    count = len(analysis.rows)
    if count and suspects >= max(MIN_SUSPECTS, MIN_SUSPECT_SHARE * count):
        text = add_name(analysis, f"{suspects:,} of {count:,} labels may be wrong; mistakes.csv lists them first")
        yield Finding("labels", text, "confident learning suspects at least 2 %")


def judge_threshold(analysis: OutputAnalysis) -> Iterator[Finding]:
    """Judges the usual threshold of two classes, if another one was not chosen."""
    rows = {row["threshold"]: row for row in analysis.facts.get("thresholds", ())}
    if "chosen" in rows or "usual" not in rows or analysis.facts["positives"] < MIN_POSITIVES:
        return
    positive = analysis.facts["positive"]
    usual = rows["usual"]
    costs = analysis.facts.get("costs")
    if costs is None:
        best = rows["highest F1"]
        if best["f1"] - usual["f1"] > max(MIN_F1_GAIN, MIN_F1_GAIN * usual["f1"]):
            text = f"F1 of {positive} is {usual['f1']:.3g} at 0.5, and up to {best['f1']:.3g} at "
            text += f"{best['probability']:.3g}; evaluation.threshold=auto lets the validation rows choose"
            yield Finding("threshold", text, f"a gain of more than 0.1, and {MIN_POSITIVES} examples of the class")
        return
    # The user has said how errors compare, so F1 decides nothing.
    best = next(row for name, row in rows.items() if name.startswith("least cost"))
    if usual["cost"] - best["cost"] > MIN_SAVING * usual["cost"]:
        text = f"the cost of {positive} is {usual['cost']:.3g} at 0.5, and down to {best['cost']:.3g} at "
        text += f"{best['probability']:.3g}; evaluation.threshold={{cost: [{costs[0]:g}, {costs[1]:g}]}} lets the "
        text += "validation rows choose"
        yield Finding("threshold", text, f"a saving of more than 10 %, and {MIN_POSITIVES} examples of the class")


def judge_columns(analysis: OutputAnalysis, columns: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Judges the columns that the model takes."""
    score = analysis.figures.get(analysis.measure, Figure(np.nan)).value
    allowed = max(0.0 if analysis.is_error else COLUMN_GAP, COLUMN_SHARE * abs(score))
    for row in columns:
        alone = row.get("alone", np.nan)
        behind = alone - score if analysis.is_error else score - alone
        if np.isfinite(alone) and behind <= allowed and row["tells"]:
            text = f"{row['column']} alone gives {analysis.measure} {format_number(alone)}"
            text += f", the model {format_number(score)}"
            yield Finding("one column", text, "within max(0.03, 10 %) of the model")
    known = [row for row in columns if np.isfinite(row["importance"].value)]
    useless = [row["column"] for row in known if row["is_useless"]]
    if useless and len(useless) < len(known):
        text = add_name(analysis, f"the model does not use {join_first(useless, MAX_COLUMNS)}")
        because = f"shuffled, they surely cost less than 1 % of a constant's {known[0]['measure']}"
        yield Finding("useless columns", text, because)
