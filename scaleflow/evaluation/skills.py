"""Measures skills, which a constant answer lacks: how well a model separates examples.

If one class is rare, a model that always gives the same answer has a high accuracy. So skills also decide whether an
export format, or a candidate, is as good as another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaleflow.evaluation.collector import choose_form
from scaleflow.evaluation.intervals import Intervals
from scaleflow.evaluation.measures import measure_classes, rank_scores, read_classes
from scaleflow.evaluation.outputs import analyse_output, read_vectors
from scaleflow.evaluation.predictions import Predictions
from scaleflow.interfaces import Outputs, name_leaves, name_metric

Array = np.ndarray[Any, Any]

#: Answers are equal if their range is smaller than this, relative to the largest.
SAME = 1e-6

#: A skill counts only if the model exceeds a constant answer by this much.
LEAST_SKILL = 0.1

#: Maximum number of labels, or values, that are measured one by one.
MAX_PARTS = 64


@dataclass(frozen=True)
class Skill:
    """A metric whose larger values are better.

    Attributes:
        value: the metric.
        constant: the metric of a constant answer.
        step: the maximum change by a single example.
    """

    value: float
    constant: float
    step: float = 0.0


def measure_skills(predictions: Predictions) -> dict[str, Skill]:
    """Returns the skills of each output, with names such as `balanced_accuracy` and `price/rank_correlation`."""
    of_outputs: dict[str, Skill] = {}
    for output, described in name_leaves(predictions.outputs).items():
        form = choose_form(described)
        if form in ("class", "best"):
            skills = measure_class_skills(predictions, output, described)
        elif form == "positions":
            skills = measure_position_skills(predictions, output, described)
        else:
            skills = measure_vector_skills(predictions, output, described)
        for name, skill in skills.items():
            if np.isfinite(skill.value):
                of_outputs[name_metric(output, name)] = skill
    return of_outputs


def measure_class_skills(predictions: Predictions, output: str, described: Outputs) -> dict[str, Skill]:
    """Returns the balanced accuracy and the mean AUC over the classes."""
    data = read_classes(predictions, output, described)
    intervals = predictions.make_intervals(data.rows, is_wanted=False)
    support = np.bincount(data.target, minlength=len(data.names))
    classes = np.flatnonzero(support)
    if len(classes) < 2:
        return {}
    estimates, _ = measure_classes(data, intervals)
    rarest = 1 / support[classes].min()
    balanced = estimates["balanced_accuracy"].value
    skills = {"balanced_accuracy": Skill(balanced, 1 / len(classes), rarest / len(classes))}
    if data.chances is not None:
        areas = [rank_scores(data.chances[:, n], data.target == n, intervals).auc.value for n in classes]
        skills["roc_auc"] = Skill(float(np.mean(areas)), 0.5, rarest / len(classes))
    return skills


def measure_vector_skills(predictions: Predictions, output: str, described: Outputs) -> dict[str, Skill]:
    """Returns balanced accuracy and AUC of each label, or the rank correlation of each value with its targets."""
    vectors = read_vectors(predictions, output, described)
    count = vectors.target.shape[1]
    names = described.names or tuple(map(str, range(count)))
    skills: dict[str, Skill] = {}
    for n, name in enumerate(names[:MAX_PARTS]):
        end = "" if count == 1 else f"/{name}"
        is_used = vectors.is_used[:, n]
        target = vectors.target[is_used, n]
        prediction = vectors.prediction[is_used, n]
        if vectors.chances is None:
            skills[f"rank_correlation{end}"] = Skill(correlate_ranks(target, prediction), 0.0)
            continue
        is_label = target > 0.5
        is_predicted = prediction > 0.5
        support = np.array([np.sum(~is_label), np.sum(is_label)], np.float64)
        if not support.all():
            continue
        correct = np.array([np.sum(~is_label & ~is_predicted), np.sum(is_label & is_predicted)], np.float64)
        step = 1 / support.min() / 2
        skills[f"balanced_accuracy{end}"] = Skill(float(np.mean(correct / support)), 0.5, step)
        area = rank_scores(vectors.chances[is_used, n], is_label, Intervals(len(target), is_wanted=False)).auc.value
        skills[f"roc_auc{end}"] = Skill(area, 0.5, step)
    return skills


def measure_position_skills(predictions: Predictions, output: str, described: Outputs) -> dict[str, Skill]:
    """Returns the mean recall of the classes over all positions, if positions are counted per class."""
    rows = [row for row in analyse_output(predictions, output, described).classes if row["support"] > 0]
    if len(rows) < 2:
        return {}
    recalls = [row["recall"].value for row in rows]
    rarest = 1 / min(row["support"] for row in rows)
    return {"balanced_accuracy": Skill(float(np.mean(recalls)), 1 / len(rows), rarest / len(rows))}


def correlate_ranks(target: Array, prediction: Array) -> float:
    """Returns Spearman's correlation; 0 if all predictions are equal, NaN if all targets are equal."""
    from scipy.stats import rankdata

    if len(target) < 2 or np.ptp(target) == 0:
        return float("nan")
    if is_constant(prediction):
        return 0.0
    return float(np.corrcoef(rankdata(target), rankdata(prediction))[0, 1])


def is_constant(values: Array) -> bool:
    """Returns whether all values [n] are equal, except for rounding."""
    return len(values) > 1 and float(np.ptp(values)) <= SAME * max(float(np.abs(values).max()), 1e-30)


def find_constant_parts(predictions: Predictions) -> list[str]:
    """Returns the outputs, labels and values with the same answer for all examples; "" is the only output."""
    constant = []
    for output, described in name_leaves(predictions.outputs).items():
        form = choose_form(described)
        if form == "positions":
            continue
        if form in ("class", "best"):
            data = read_classes(predictions, output, described)
            scores = data.confidence[:, None] if data.chances is None else data.chances
            same_class = len(data.predicted) > 1 and len(np.unique(data.predicted)) == 1
            if same_class and all(is_constant(column) for column in scores.T):
                constant.append(output)
            continue
        vectors = read_vectors(predictions, output, described)
        values = vectors.prediction if vectors.chances is None else vectors.chances
        names = described.names or tuple(map(str, range(values.shape[1])))
        is_same = [is_constant(values[vectors.is_used[:, n], n]) for n in range(values.shape[1])]
        if all(is_same):
            constant.append(output)
        elif len(is_same) > 1:
            constant += [name_metric(output, name) for name, same in zip(names, is_same, strict=True) if same]
    return constant


def find_useless_skills(before: Mapping[str, Skill], now: Mapping[str, Skill]) -> dict[str, tuple[float, float]]:
    """Returns the skills of which a model has less than half of another model's, in the form of `find_lost_skills`.

    The user may choose the threshold on which the balanced accuracy depends. So if there is an AUC, a lower balanced
    accuracy counts only if the model has no skill left, for instance if all examples get the same class.
    """
    lost = {}
    for name, skill in before.items():
        had = skill.value - skill.constant
        has = now[name].value - skill.constant if name in now else 0.0
        least = had / 2
        if "balanced_accuracy" in name and name.replace("balanced_accuracy", "roc_auc") in before:
            least = SAME
        if had > max(LEAST_SKILL, 4 * skill.step) and has < least:
            lost[name] = (skill.constant + has, skill.value)
    return lost


def find_lost_skills(
    before: Mapping[str, Skill], now: Mapping[str, Skill], allowed: float
) -> dict[str, tuple[float, float]]:
    """Returns the skills that fell by more than allowed, and by more than two examples can change them.

    Returns:
        The value now and the value before, by skill name.
    """
    lost = {}
    for name, skill in before.items():
        value = now[name].value if name in now else skill.constant
        if skill.value - value > max(allowed, 2 * skill.step):
            lost[name] = (value, skill.value)
    return lost
