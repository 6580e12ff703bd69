"""Defines which options work together, as data.

Each combination that cannot work is one `Rule` in `device_rules.py` or `training_rules.py`, or in the `rules` of a
cluster engine if it is only about that engine. `tests/combinations.py` renders the docs page from them.

The launcher checks the rules with the config, in which `auto` means not known yet. The worker checks them again with
the actual devices, strategy and precision, before `ready`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, cast

from scaleflow.cluster.engines import ClusterEngine, find_engine, list_engines
from scaleflow.config.device_rules import DEVICE_RULES
from scaleflow.config.parse import format_value
from scaleflow.config.training_rules import TRAINING_RULES
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Cluster, Plan, Rule
from scaleflow.interfaces.versions import to_series


def is_replicated_fit(plan: Plan) -> bool:
    return plan.training.engine == "fit" and plan.strategy.name == "mirrored"


#: For each: the package and the first version that can, the key, whether a plan needs it, and what works instead.
#: Older versions train, too, but with other losses or other numbers of examples than one device, which tests show.
NEEDS: tuple[tuple[str, tuple[int, int], str, Callable[[Plan], bool], str], ...] = (
    ("keras", (3, 14), "strategy", lambda plan: plan.strategy.name == "pipeline", "use strategy=mirrored"),
    ("keras", (3, 12), "training.engine", is_replicated_fit, "use training.engine=loop"),
    ("keras", (3, 11), "hardware.remat", lambda plan: plan.hardware.remat is not False, "use hardware.remat=false"),
)


@functools.cache
def find_version_rules(find_version: Callable[[str], str] = version) -> tuple[Rule, ...]:
    """Returns the rules that hold with the versions that are installed."""
    rules = []
    for package, least, key, is_needed, instead in NEEDS:
        installed = find_version(package)
        if to_series(installed) < least:
            name = f"{package.capitalize()} {'.'.join(map(str, least))}"
            reason = f"this needs {name} or newer, and {installed} is installed"
            rules.append(Rule((key,), is_needed, reason, f"{instead}, or install {name}"))
    return tuple(rules)


RULES = (*DEVICE_RULES, *TRAINING_RULES)

#: The most keys that a message about keys of another engine shows with their values.
MAX_SHOWN_KEYS = 3


def explain_rule(rule: Rule, plan: Plan) -> str:
    """Returns the text for the user: keys, values, reason, and what would work."""
    settings = " with ".join(f"{key}={format_value(value_of(plan, key))}" for key in rule.keys)
    return f"{settings}: {rule.reason}; {rule.instead}"


def value_of(plan: Plan, key: str) -> object:
    """Returns the value of a dotted key in a plan. The value of a config group is its option."""
    value: object = plan
    for part in key.split("."):
        name = part
        if part == "_target_":  # of a section that names a class, or of the target itself
            value, name = getattr(value, "target", value), "path"
        is_known = value is not plan.cluster or hasattr(value, name)
        value = getattr(value, name) if is_known else plan.config["cluster"].get(name)  # only another engine has it
    return getattr(value, "name", value)


def resolve_choices(plan: Plan, strategy: str, hardware: str, precision: str) -> Plan:
    """Returns a plan with the strategy, hardware and precision that `auto` and `mixed` have become."""
    return replace(
        plan,
        strategy=replace(plan.strategy, name=cast(Any, strategy)),
        hardware=replace(plan.hardware, name=cast(Any, hardware)),
        precision=replace(plan.precision, name=cast(Any, precision)),
    )


def find_applicable(plan: Plan) -> Iterator[Rule]:
    """Yields the rules that apply to a plan. Of the rules of cluster engines, only those of its own engine can."""
    engine_rules = (*make_key_rules(*list_engines().values()), *find_engine(plan.cluster).rules)
    rules = (*RULES, *find_version_rules(), *engine_rules)
    return (rule for rule in rules if rule.applies(plan))


def list_rules() -> Sequence[Rule]:
    """Returns all rules, those of the cluster engines too."""
    engines = list_engines().values()
    return (*RULES, *make_key_rules(*engines), *(rule for engine in engines for rule in engine.rules))


@functools.cache
def make_key_rules(*engines: ClusterEngine) -> Sequence[Rule]:
    """Returns the rules about keys of `cluster` that only some engines have."""
    assigning = [engine.name for engine in engines if engine.assigns_resources]
    submitting = [engine.name for engine in engines if engine.render_job]
    return (
        *(make_key_rule(engine) for engine in engines if engine.own_keys),
        Rule(
            ("cluster.cpus", "cluster.gpus", "cluster"),
            lambda p: not find_engine(p.cluster).assigns_resources and bool(p.cluster.cpus or p.cluster.gpus),
            f"only {' and '.join(map(str.capitalize, assigning))} assign cores and GPUs to processes",
            f"use hardware.devices and hardware.intra_op_threads, or cluster={' or '.join(assigning)}",
        ),
        Rule(
            ("cluster.submit", "cluster"),
            lambda p: p.cluster.submit is not None and find_engine(p.cluster).render_job is None,
            f"scripts can be written only for {' and '.join(map(str.capitalize, submitting))}",
            f"use cluster={' or '.join(submitting)}, or leave it null",
        ),
    )


def make_key_rule(engine: ClusterEngine) -> Rule:
    """Returns the rule that refuses an engine's own keys for other engines."""
    keys = engine.own_keys
    shown, named = (keys, "") if len(keys) <= MAX_SHOWN_KEYS else ((), f"{', '.join(keys)}: ")
    return Rule(
        (*(f"cluster.{key}" for key in shown), "cluster"),
        lambda p: has_foreign_keys(p, engine),
        f"{named}these keys are only for {engine.place}",
        f"use cluster={engine.name}, or remove them",
    )


def has_foreign_keys(plan: Plan, engine: ClusterEngine) -> bool:
    """Whether the config has keys that this engine has, and the config's own engine has not."""
    given = plan.config.get("cluster") or {}
    own, defaults = list_engines()[given.get("name", Cluster.name)].own_keys, vars(engine.section())
    return any(key not in own and given.get(key, defaults[key]) != defaults[key] for key in engine.own_keys)


def check_rules(plan: Plan) -> list[str]:
    """Returns the messages of the warnings that apply. Raises ConfigError with the message of the first rule that
    refuses.
    """
    rules = list(find_applicable(plan))
    for rule in rules:
        if rule.verdict == "refused":
            raise ConfigError(explain_rule(rule, plan))
    return [explain_rule(rule, plan) for rule in rules]
