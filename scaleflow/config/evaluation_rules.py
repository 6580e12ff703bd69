"""The rules about the evaluation of predictions."""

import math
import re
from collections.abc import Sequence

from scaleflow.interfaces import Plan, Rule
from scaleflow.interfaces.config import ThresholdGoal

#: Keys that the validation rows decide, and what to set instead.
ADVICE = {
    "evaluation.threshold": "give evaluation.threshold as a number",
    "evaluation.calibrate": "leave evaluation.calibrate null",
    "evaluation.interval": "leave evaluation.interval null",
    "evaluation.sets": "leave evaluation.sets null",
}

#: Configs without validation rows that can decide: the condition, the reason, and a fix.
OBSTACLES: Sequence[tuple[str, str, str]] = (
    (
        "dataset.validation in null|0",
        "there are no validation rows to decide by",
        "set dataset.validation=0.1, or ",
    ),
    (
        "dataset.fold!=null",
        "the rows of the fold would be both what decides and what is measured",
        "",
    ),
    (
        "strategy in parameter_server|tpu|pipeline",
        "this strategy keeps no outputs of the validation rows",
        "use another strategy, or ",
    ),
    ("debug.overfit", "debug.overfit has no validation rows of its own", ""),
)


def make_rule(key: str, obstacle: tuple[str, str, str]) -> Rule:
    """Returns the rule against a key that needs validation rows to decide, for one obstacle."""
    condition, reason, advice = obstacle
    return Rule(f"{key} & {condition}", reason, advice + ADVICE[key], only_if=lambda p: key in p.evaluation.learned)


def make_learning_rules() -> list[Rule]:
    """Returns the rules against all keys that need validation rows to decide."""
    rules = []
    for key in ADVICE:
        for obstacle in OBSTACLES:
            rules.append(make_rule(key, obstacle))
    return rules


#: Functions that a config may name as plain text. Someone else may have written the config, so the list is short.
SKLEARN_METRICS = re.compile(r"sklearn\.metrics\.[a-z]\w*_(score|loss|error|corrcoef)")


def has_unknown_metric(plan: Plan) -> bool:
    """Whether a metric is named as plain text and is none of scikit-learn."""
    for metric in plan.evaluation.metrics or ():
        if isinstance(metric, str) and not SKLEARN_METRICS.fullmatch(metric):
            return True
    return False


def has_two_costs(plan: Plan) -> bool:
    """Whether the error costs contradict the costs of the threshold."""
    goal = plan.evaluation.threshold
    miss_cost = plan.evaluation.miss_cost
    alarm_cost = plan.evaluation.alarm_cost
    if miss_cost == alarm_cost == 1.0:
        return False
    if not isinstance(goal, ThresholdGoal) or goal.cost is None or len(goal.cost) != 2:
        return False
    return not math.isclose(miss_cost / alarm_cost, goal.cost[0] / goal.cost[1])


EVALUATION_RULES: Sequence[Rule] = (
    Rule(
        "evaluation.metrics",
        "a name alone is that of a metric of scikit-learn, such as sklearn.metrics.cohen_kappa_score",
        "write a function of yours as {_target_: my_code.cost}",
        only_if=has_unknown_metric,
    ),
    Rule(
        "evaluation.threshold",
        "a threshold has one goal",
        "give one of {recall: 0.9}, {precision: 0.8} and {cost: [5, 1]}, of a miss and of a false alarm",
        only_if=lambda p: isinstance(p.evaluation.threshold, ThresholdGoal) and not p.evaluation.threshold.is_one,
    ),
    Rule(
        "evaluation.miss_cost & evaluation.threshold",
        "these are two costs of a miss, and a report has one",
        "leave evaluation.miss_cost and evaluation.alarm_cost out",
        only_if=has_two_costs,
    ),
    *make_learning_rules(),
)
