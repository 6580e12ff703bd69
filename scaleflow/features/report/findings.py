"""Findings: what a user should know first, each with its number and the rule behind it.

Thresholds are those of skore's checks if it has one: an overfit gap of max(0.03, 10 %), a baseline within max(0.01, 3
%), one column within max(0.03, 10 %) of the model, an importance below 1e-3.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scaleflow.evaluation.outputs import OutputAnalysis
from scaleflow.evaluation.resampling import MIN_UNITS, Units
from scaleflow.interfaces import is_smaller_better, name_metric
from scaleflow.interfaces.estimate import Estimate, describe_estimate
from scaleflow.interfaces.formatting import format_number, join_first

#: Above this calibration error, probabilities mislead decisions.
MAX_CALIBRATION_ERROR = 0.05

#: Suspected labels are reported from this number and this share on.
MIN_SUSPECTS = 5
MIN_SUSPECT_SHARE = 0.02

#: A model is overfit from this gap between training and test on. For errors only the share counts.
MIN_OVERFIT_GAP = 0.03
MIN_OVERFIT_SHARE = 0.1

#: Minimum gain over the baseline. For errors only the share counts.
MIN_BASELINE_GAIN = 0.01
MIN_BASELINE_SHARE = 0.03

#: A model is better than a constant if it saves this share of the constant's loss (log loss or squared error). Accuracy
#: alone does not show that: with a rare class, or class weights, a useful model may be as accurate as a constant.
MIN_LOSS_GAIN = 0.03

#: One column predicts as well as the model if it is this close. For errors only the share counts.
COLUMN_GAP = 0.03
COLUMN_SHARE = 0.1

#: F1 is judged from MIN_POSITIVES examples of the class on. Another threshold must gain MIN_F1_GAIN, and this share.
MIN_POSITIVES = 50
MIN_F1_GAIN = 0.1

#: Another threshold must save this share of the cost at the usual threshold.
MIN_SAVING = 0.1

#: Maximum number of findings of one rule that are listed.
MAX_NAMED = 3

#: Maximum number of columns that a finding names.
MAX_COLUMNS = 10

#: Metrics for comparing training, test and baseline. The first one that an output has is used.
COMPARED = ("accuracy", "mae")


@dataclass(frozen=True)
class KnownOfRun:
    """Facts about a run in addition to its predictions.

    Attributes:
        train: metrics of the training split, by name: `accuracy`, `price/mae`.
        together: findings about rows that belong together: then metrics are too optimistic.
        doubts: texts about the model by the rule that found them: BatchNorm, frozen layers.
        columns: a row per input column: its `importance`, and how good it is `alone`; empty if not measured.
        mattered: what mattered in an example, by its index: a grid of shares for a picture, or (word, share) for a
            text.
        curves: points of metrics and of the learning rate during training. `curve_unit` is the unit of x.
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
    """A fact that the user should know."""

    rule: str
    text: str  # the finding, with its number
    because: str  # the rule in words, with its threshold


def find_all(
    analyses: Sequence[OutputAnalysis],
    slices: Sequence[Mapping[str, Any]],
    context: KnownOfRun,
    is_calibrated: bool = False,
) -> list[Finding]:
    """Returns all findings: outputs that are not numbers first, then the data, the model, and each output.

    `is_calibrated`: whether validation rows were used to calibrate the probabilities.
    """
    findings: list[Finding] = []
    for analysis in analyses:
        findings += judge_finite(analysis)
    for together in context.together:
        findings.append(Finding(together["rule"], together["text"], together["because"]))
    for rule, text in context.doubts.items():
        findings.append(Finding(rule, text, "of the model, before its training"))
    for analysis in analyses:
        findings += compare_splits(analysis, context)
        findings += judge_classes(analysis, is_calibrated)
        findings += judge_threshold(analysis)
    findings += judge_columns(analyses[0], context.columns)
    findings += judge_slices(slices)
    return findings


def judge_slices(slices: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yields the first weak slices, then their remaining number."""
    weak = [row for row in slices if row["is_weak"]]
    for row in weak[:MAX_NAMED]:
        metric = name_metric(row["output"], row["metric"])
        estimate = describe_estimate(Estimate(row["value"], row["low"], row["high"]))
        where = f"{row['column']}={row['slice']} ({row['examples']:,} examples)"
        whole = format_number(row["value"] - row["difference"])
        text = f"{metric} {estimate} for {where}, {whole} for all"
        yield Finding("weak slice", text, "worse than all by max(0.03, 10 %), and not by chance (5 %)")
    if len(weak) > MAX_NAMED:
        text = f"{len(weak) - MAX_NAMED} more slices are weak; slices.csv lists them"
        yield Finding("weak slice", text, "the same")


def add_name(analysis: OutputAnalysis, text: str) -> str:
    """Returns a text about an output. It begins with the output's name if there are several."""
    return f"{analysis.name}: {text}" if analysis.name else text


def judge_finite(analysis: OutputAnalysis) -> Iterator[Finding]:
    """Checks whether all outputs are finite."""
    count = analysis.facts.get("not_finite", 0)
    if not count:
        return
    effect = "there is no mean error" if "mae" in analysis.estimates else "they count as wrong answers"
    text = f"the model has no answer for {count:,} examples, whose outputs are NaN or infinite; {effect}"
    yield Finding("not finite", add_name(analysis, text), "an output that is not finite, for a target that counts")


def judge_group_count(units: Units | None) -> Iterator[Finding]:
    """Checks whether the intervals, whose units are groups of rows, have enough groups."""
    if units is not None and units.effective < MIN_UNITS:
        yield Finding("few groups", f"intervals are rough, over {units.describe()}", f"fewer than {MIN_UNITS}")


def compare_splits(analysis: OutputAnalysis, context: KnownOfRun) -> Iterator[Finding]:
    """Compares a metric with its training value, and with the baseline."""
    metric = next((name for name in COMPARED if name in analysis.estimates), None)
    if metric is None:
        return
    name = name_metric(analysis.name, metric)
    estimate = analysis.estimates[metric]
    is_error = is_smaller_better(metric)
    train = context.train.get(name)
    baseline = context.baseline.get(name)
    if train is not None and is_overfit(estimate, train, is_error):
        text = f"{name} is {format_number(train)} in training and {describe_estimate(estimate)} here"
        yield Finding("overfit", text, "a gap of at least max(0.03, 10 %), beyond the interval")
    best = 0.0 if is_error else 1.0
    if baseline is not None and baseline != best:  # there is something to gain
        gain = baseline - estimate.value if is_error else estimate.value - baseline
        needed = max(0.0 if is_error else MIN_BASELINE_GAIN, MIN_BASELINE_SHARE * abs(baseline))
        if gain < needed and analysis.facts.get("gain", 0.0) < MIN_LOSS_GAIN:
            text = f"{name} {describe_estimate(estimate)} is no better than {format_number(baseline)}"
            text += ", always the same answer"
            yield Finding("baseline", text, "a gain of less than max(0.01, 3 %), and of 3 % of the loss")


def is_overfit(estimate: Estimate, train: float, is_error: bool) -> bool:
    """Returns whether the training metric is much better than the test metric, and outside its interval."""
    gap = estimate.value - train if is_error else train - estimate.value
    needed = max(0.0 if is_error else MIN_OVERFIT_GAP, MIN_OVERFIT_SHARE * abs(train))
    is_large = gap >= needed
    if not is_large or np.isnan(estimate.low):
        return is_large
    return train < estimate.low if is_error else train > estimate.high


def judge_classes(analysis: OutputAnalysis, is_calibrated: bool) -> Iterator[Finding]:
    """Checks an output's classes, probabilities and labels."""
    lost = [row for row in analysis.classes if "recall" in row and row["support"] and not row["recall"].value]
    if lost:
        unit = analysis.facts.get("unit", "examples")
        texts = []
        for row in sorted(lost, key=lambda row: -float(row["support"])):
            never = "" if row["predicted"] else ", never predicted"
            texts.append(f"{row['class']} ({format_number(row['support'])} {unit}{never})")
        text = add_name(analysis, f"not found once: {join_first(texts)}")
        yield Finding("recall 0", text, "a class of any size with recall 0")
    error = analysis.estimates.get("calibration_error")
    chance = analysis.facts.get("chance error", np.nan)
    if error is not None and error.value > max(MAX_CALIBRATION_ERROR, chance):
        text = add_name(analysis, f"probabilities are off by {describe_estimate(error)} on average")
        if not is_calibrated:
            text += "; try evaluation.calibrate=auto"
        yield Finding("calibration", text, "a calibration error above 0.05, and above what chance gives (95 %)")
    suspects = len(analysis.suspects)
    count = len(analysis.rows)
    if count and suspects >= max(MIN_SUSPECTS, MIN_SUSPECT_SHARE * count):
        text = add_name(analysis, f"{suspects:,} of {count:,} labels may be wrong; mistakes.csv lists them first")
        yield Finding("labels", text, "confident learning suspects at least 2 %")


def judge_threshold(analysis: OutputAnalysis) -> Iterator[Finding]:
    """Checks the usual threshold of two classes, unless the run chose another one."""
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
    # The user has set the costs of errors, so F1 decides nothing.
    best = next(row for name, row in rows.items() if name.startswith("least cost"))
    if usual["cost"] - best["cost"] > MIN_SAVING * usual["cost"]:
        text = f"the cost of {positive} is {usual['cost']:.3g} at 0.5, and down to {best['cost']:.3g} at "
        text += f"{best['probability']:.3g}; evaluation.threshold={{cost: [{costs[0]:g}, {costs[1]:g}]}} lets the "
        text += "validation rows choose"
        yield Finding("threshold", text, f"a saving of more than 10 %, and {MIN_POSITIVES} examples of the class")


def judge_columns(analysis: OutputAnalysis, columns: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Checks the columns that the model uses."""
    score = analysis.estimates.get(analysis.measure, Estimate(np.nan)).value
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
