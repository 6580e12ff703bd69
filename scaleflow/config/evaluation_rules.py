"""The rules about what a run makes of its predictions."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from scaleflow.interfaces import Plan, Rule
from scaleflow.interfaces.config import ThresholdGoal


def learns_and(condition: Callable[[Plan], Any]) -> Callable[[Plan], bool]:
    """Returns the condition for plans that let the validation rows decide what the model answers."""
    return lambda plan: bool(plan.evaluation.learned and condition(plan))


KEYS = ("evaluation.threshold", "evaluation.calibrate", "evaluation.interval")
ADVICE = "leave evaluation.calibrate and evaluation.interval null, and give evaluation.threshold as a number"

#: Functions that a name alone may be, in a config that somebody else may have written.
SKLEARN_METRICS = re.compile(r"sklearn\.metrics\.[a-z]\w*_(score|loss|error|corrcoef)")


def has_unknown_metric(plan: Plan) -> bool:
    names = [each for each in plan.evaluation.metrics or () if isinstance(each, str)]
    return not all(map(SKLEARN_METRICS.fullmatch, names))


EVALUATION_RULES: Sequence[Rule] = (
    Rule(
        ("evaluation.metrics",),
        has_unknown_metric,
        "a name alone is that of a metric of scikit-learn, such as sklearn.metrics.cohen_kappa_score",
        "write a function of yours as {_target_: my_code.cost}",
    ),
    Rule(
        ("evaluation.threshold",),
        lambda p: isinstance(p.evaluation.threshold, ThresholdGoal) and not p.evaluation.threshold.is_one,
        "a threshold has one goal",
        "give one of {recall: 0.9}, {precision: 0.8} and {cost: [5, 1]}, of a miss and of a false alarm",
    ),
    Rule(
        (*KEYS, "dataset.validation"),
        learns_and(lambda p: p.dataset.validation in (None, 0)),
        "there are no validation rows to decide by",
        f"set dataset.validation=0.1, or {ADVICE}",
    ),
    Rule(
        (*KEYS, "dataset.fold"),
        learns_and(lambda p: p.dataset.fold is not None),
        "the rows of the fold would be both what decides and what is measured",
        ADVICE,
    ),
    Rule(
        (*KEYS, "strategy"),
        learns_and(lambda p: p.strategy.name in ("parameter_server", "tpu", "pipeline")),
        "this strategy keeps no outputs of the validation rows",
        f"use another strategy, or {ADVICE}",
    ),
    Rule(
        (*KEYS, "debug.overfit"),
        learns_and(lambda p: p.debug.overfit),
        "debug.overfit has no validation rows of its own",
        ADVICE,
    ),
)
