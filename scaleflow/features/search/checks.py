"""Checks from the config alone whether a trial can find its setting."""

from __future__ import annotations

from scaleflow.cluster.engines import find_engine
from scaleflow.config.conditions import find_value
from scaleflow.config.plan import find_batch_multiple, set_values
from scaleflow.errors import ConfigError
from scaleflow.features.search.trial_kinds import AUTO, BatchSearch, RateTest, Trial
from scaleflow.features.search.trial_rules import FIRST_BATCH_SIZE, choose_first_size
from scaleflow.interfaces import Plan, name_command


def is_searched(plan: Plan, key: str) -> bool:
    """Returns whether a key is `auto`, so that its value is searched before the run."""
    return bool(find_value(plan, key) == AUTO)


def fill_in_settings(plan: Plan) -> Plan:
    """Returns a plan with numbers instead of `auto`, for checking the rest of the config.

    Raises ConfigError if a trial cannot find the setting.
    """
    if is_searched(plan, BatchSearch.key):  # all sizes tried are multiples or divisors of this one
        size = choose_first_size(find_batch_multiple(plan), FIRST_BATCH_SIZE)
        plan = set_values(plan, {BatchSearch.key: size})
    if is_searched(plan, RateTest.key):
        check_trial(leave_schedule_out(plan), RateTest(), f"{RateTest.key}={AUTO}")
        plan = set_values(plan, {RateTest.key: RateTest().low})
    return plan


def leave_schedule_out(plan: Plan) -> Plan:
    """Returns a plan with the constant low learning rate of a rate test's first step."""
    values = {
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.plateau": None,
        "optimizer.learning_rate": RateTest().low,
    }
    return set_values(plan, values)


def check_trial(plan: Plan, trial: Trial, what: str) -> None:
    """Checks that a trial can find its setting for a plan.

    Args:
        what: the word or command that requires the trial, for messages.

    Raises ConfigError with the key, the value and a fix.
    """
    if plan.strategy.has_coordinator:
        raise make_refusal(
            f"strategy={plan.strategy.name}", what, "its workers do not take steps together; use another strategy"
        )
    if not find_engine(plan.cluster).is_local:
        raise make_refusal(f"cluster={plan.cluster.name}", what, "a trial runs on this machine; use cluster=local")
    if plan.profiler.windows:
        raise make_refusal(f"profiler={plan.profiler.name}", what, "a trial is not traced; use profiler=none")
    if plan.debug.fast:
        raise make_refusal("debug.fast=true", what, "a trial needs more than one step; leave it false")
    if isinstance(trial, RateTest):
        check_rate_test(plan, what)


def check_rate_test(plan: Plan, what: str) -> None:
    """Checks that a learning-rate test works for a plan. Raises ConfigError as `check_trial` does."""
    optimizer = plan.optimizer
    training = plan.training
    if is_searched(plan, BatchSearch.key):
        find_size = f"{name_command('find')} {BatchSearch.name}"
        raise make_refusal(
            f"{BatchSearch.key}={AUTO}", what, f"the rate depends on the batch size; find that first, with {find_size}"
        )
    if optimizer.schedule != "constant":
        raise make_refusal(
            f"optimizer.schedule={optimizer.schedule}",
            what,
            "the test has a schedule of its own; use optimizer.schedule=constant here",
        )
    if optimizer.warmup_steps > 0:
        raise make_refusal(
            f"optimizer.warmup_steps={optimizer.warmup_steps}",
            what,
            "the test has a schedule of its own; use optimizer.warmup_steps=0 here",
        )
    if training.engine == "fit":
        raise make_refusal(
            "training.engine=fit", what, "Keras's fit does not change the rate at each step; use training.engine=loop"
        )
    if training.callbacks:
        raise make_refusal(
            "training.callbacks", what, "callbacks may change the rate, too; use training.callbacks=null here"
        )


def make_refusal(setting: str, what: str, why: str) -> ConfigError:
    return ConfigError(f"{setting} with {what}: {why}")
