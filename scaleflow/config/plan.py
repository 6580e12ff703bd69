"""Parses a composed config into a `Plan`, and checks that its options work together.

The functions depend only on their arguments. `launcher/prepare.py` reads the environment (TF_CONFIG, TPUs, ports, the
store). The worker checks everything that needs TensorFlow or the code of a `_target_`.

Each combination that cannot work is one `Rule` in a module `..._rules.py`, or in the `rules` of a cluster engine if it
concerns only that engine. `conditions.py` explains how conditions are written. `tests/combinations.py` renders the
docs page from them. The launcher checks the rules with the config, in which `auto` means not known yet. The worker
checks them again with the actual devices, strategy and precision, before `ready`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Literal, cast

from scaleflow.cluster.engines import ClusterEngine, find_engine, list_engines
from scaleflow.cluster.tasks import count_synchronous_workers
from scaleflow.config.conditions import find_keys, find_value, is_applicable
from scaleflow.config.dataset_rules import DATASET_RULES
from scaleflow.config.debug_rules import DEBUG_RULES
from scaleflow.config.device_rules import DEVICE_RULES
from scaleflow.config.evaluation_rules import EVALUATION_RULES
from scaleflow.config.feature_sections import parse_feature_sections
from scaleflow.config.optimizer_rules import OPTIMIZER_RULES
from scaleflow.config.parse import MAX_INT, format_value, parse_section, parse_value, type_hints
from scaleflow.config.pipeline_rules import PIPELINE_RULES
from scaleflow.config.profiler_rules import PROFILER_RULES
from scaleflow.config.rule_keys import find_unknown_keys
from scaleflow.config.training_rules import TRAINING_RULES
from scaleflow.config.trust import check_trusted_targets
from scaleflow.config.unknown_keys import dotted_key_error, unknown_key_error
from scaleflow.errors import ConfigError
from scaleflow.files.object_store import is_store_address, split_address
from scaleflow.interfaces import BY_SIZE, Batching, Cluster, Plan, Rule, Strategy, Target, Training
from scaleflow.interfaces.features import (
    Feature,
    import_named,
    list_features,
    list_sections,
    report_problems,
    tell_problem,
)
from scaleflow.interfaces.versions import to_series

#: Each entry: the package, its first version that works, the key, the condition, and an alternative.
#: Older versions also train, but their losses or numbers of examples differ from one device, as tests show.
NEEDS: tuple[tuple[str, tuple[int, int], str, str, str], ...] = (
    ("keras", (3, 14), "strategy", "strategy=pipeline", "use strategy=mirrored"),
    ("keras", (3, 12), "training.engine", "training.engine=fit & strategy=mirrored", "use training.engine=loop"),
    ("keras", (3, 11), "hardware.remat", "hardware.remat!=false", "use hardware.remat=false"),
)


@functools.cache
def find_version_rules(find_version: Callable[[str], str] = version) -> tuple[Rule, ...]:
    """Returns the rules that apply to the installed versions."""
    rules = []
    for package, least, key, condition, instead in NEEDS:
        installed = find_version(package)
        if to_series(installed) < least:
            name = f"{package.capitalize()} {'.'.join(map(str, least))}"
            reason = f"this needs {name} or newer, and {installed} is installed"
            rules.append(Rule(condition, reason, f"{instead}, or install {name}", keys=(key,)))
    return tuple(rules)


#: The rules of the core, by their place in the order with features' rules (`Feature.rules_place`).
RULES: Mapping[int, Sequence[Rule]] = {
    10: DEVICE_RULES,
    20: OPTIMIZER_RULES,
    30: (*DEBUG_RULES, *PROFILER_RULES, *PIPELINE_RULES, *TRAINING_RULES, *DATASET_RULES),
    40: EVALUATION_RULES,
}

#: Maximum number of keys whose values a message about another engine's keys shows.
MAX_SHOWN_KEYS = 3


def explain_rule(rule: Rule, plan: Plan) -> str:
    """Returns the message for the user: keys, values, reason and a fix."""
    settings = " with ".join(f"{key}={format_value(find_value(plan, key))}" for key in find_keys(rule))
    return f"{settings}: {rule.reason}; {rule.instead}"


def find_applicable(plan: Plan) -> Iterator[Rule]:
    """Yields the rules that apply to a plan. Among the cluster engines' own rules it tries only the plan's engine."""
    report_unknown_keys()
    for feature, rule in list_placed_rules():
        if is_placed_rule_applicable(feature, rule, plan):
            yield rule
    key_rules = make_key_rules(*list_engines().values())
    for rule in (*find_version_rules(), *key_rules, *find_engine(plan.cluster).rules):
        if is_applicable(rule, plan):
            yield rule


@functools.cache
def report_unknown_keys() -> None:
    """Reports on standard error each key in rules of features that does not exist: such a rule never applies."""
    for feature in list_features().values():
        for rule in feature.rules:
            try:
                problems = find_unknown_keys(feature, rule)
            except Exception:  # a condition that cannot be read, which is reported when the rule is tried
                continue
            for problem in problems:
                tell_problem(feature.name, f"the rule {rule.when!r} never applies: {problem}")


def is_placed_rule_applicable(feature: str, rule: Rule, plan: Plan) -> bool:
    """Whether a rule of the core (`feature` is "") or of a feature applies to a plan.

    If a feature's rule cannot be evaluated or shown, it is skipped with a message.
    """
    if not feature:
        return is_applicable(rule, plan)
    applies = False
    with report_problems(feature, f"the rule {rule.when!r} is skipped"):
        if is_applicable(rule, plan):
            explain_rule(rule, plan)
            applies = True
    return applies


def list_rules() -> Sequence[Rule]:
    """Returns all rules, including those of the cluster engines."""
    engines = list_engines().values()
    rules = [rule for _, rule in list_placed_rules()]
    rules += make_key_rules(*engines)
    for engine in engines:
        rules += engine.rules
    return rules


def list_placed_rules() -> list[tuple[str, Rule]]:
    """Returns the rules of the core and of features in the order of their places.

    Each comes with the name of its feature; "" for a rule of the core.
    """
    groups: list[tuple[int, str, Sequence[Rule]]] = []
    for place, rules in RULES.items():
        groups.append((place, "", rules))
    for feature in list_features().values():
        groups.append((feature.rules_place, feature.name, feature.rules))
    groups.sort(key=lambda group: group[0])
    placed = []
    for _, name, rules in groups:
        for rule in rules:
            placed.append((name, rule))
    return placed


@functools.cache
def make_key_rules(*engines: ClusterEngine) -> Sequence[Rule]:
    """Returns the rules about keys of `cluster` that only some engines have."""
    rules = [make_key_rule(engine) for engine in engines if engine.own_keys]
    assigning = [engine.name for engine in engines if engine.assigns_resources]
    rules.append(
        Rule(
            "cluster",
            f"only {' and '.join(map(str.capitalize, assigning))} assign cores and GPUs to processes",
            f"use hardware.devices and hardware.intra_op_threads, or cluster={' or '.join(assigning)}",
            keys=("cluster.cpus", "cluster.gpus", "cluster"),
            only_if=lambda p: not find_engine(p.cluster).assigns_resources and bool(p.cluster.cpus or p.cluster.gpus),
        )
    )
    submitting = [engine.name for engine in engines if engine.render_job]
    rules.append(
        Rule(
            "cluster.submit!=null & cluster",
            f"scripts can be written only for {' and '.join(map(str.capitalize, submitting))}",
            f"use cluster={' or '.join(submitting)}, or leave it null",
            only_if=lambda p: find_engine(p.cluster).render_job is None,
        )
    )
    return rules


def make_key_rule(engine: ClusterEngine) -> Rule:
    """Returns the rule that refuses an engine's own keys with other engines."""
    keys = engine.own_keys
    reason = f"these keys are only for {engine.place}"
    shown = [f"cluster.{key}" for key in keys]
    if len(keys) > MAX_SHOWN_KEYS:  # the message has their names without their values
        reason = f"{', '.join(keys)}: {reason}"
        shown = []
    return Rule(
        f"cluster!={engine.name}",
        reason,
        f"use cluster={engine.name}, or remove them",
        keys=(*shown, "cluster"),
        only_if=lambda p: has_foreign_keys(p, engine),
    )


def has_foreign_keys(plan: Plan, engine: ClusterEngine) -> bool:
    """Whether the config sets keys that this engine has and the config's own engine lacks."""
    section = plan.config.get("cluster") or {}
    used_engine = list_engines()[section.get("name", Cluster.name)]
    defaults = vars(engine.section())
    for key in engine.own_keys:
        is_foreign = key not in used_engine.own_keys
        if is_foreign and section.get(key, defaults[key]) != defaults[key]:
            return True
    return False


def check_rules(plan: Plan) -> list[str]:
    """Checks all rules, and returns the messages of the warnings that apply.

    Raises ConfigError with the message of the first rule that refuses the plan.
    """
    rules = list(find_applicable(plan))
    for rule in rules:
        if rule.verdict == "refused":
            raise ConfigError(explain_rule(rule, plan))
    return [explain_rule(rule, plan) for rule in rules]


def parse_plan(config: Mapping[str, Any], choices: Mapping[str, str], search: Sequence[str] = ()) -> Plan:
    """Parses a config into typed sections. `check_plan` checks that they work together.

    Args:
        config: the config with interpolations resolved, as plain containers.
        search: folders to search for the modules of `_target_`.

    Raises ConfigError, which names the key, the value and a fix.
    """
    sections = parse_sections(config)
    plan = Plan(
        **sections,
        seed=parse_value(config.get("seed", 0), int, "seed", limits={"at_least": 0, "at_most": MAX_INT}),
        choices=choices,
        config=config,
        features=parse_feature_sections(config),
        search=search,
        resume=parse_value(config.get("resume"), str | None, "resume"),
        resume_data=parse_value(config.get("resume_data", "same"), Literal["same", "changed"], "resume_data"),
        resume_code=parse_value(config.get("resume_code", "same"), Literal["same", "changed"], "resume_code"),
        trusted_modules=parse_value(config.get("trusted_modules"), list[str] | None, "trusted_modules"),
    )
    check_top_keys(config, choices)
    if plan.trusted_modules is not None:
        check_trusted_targets(config, plan.trusted_modules)
    if plan.debug.fast:
        plan = set_values(plan, {"training.epochs": 1, "training.max_steps": 1, "training.steps_per_loop": "auto"})
    return apply_restore_best(plan)


def check_top_keys(config: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Raises ConfigError for the first key of the whole config that neither the core nor a feature has."""
    known = [field.name for field in dataclasses.fields(Plan) if field.name not in DERIVED_FIELDS]
    for name in list_sections():
        if name not in known:
            known.append(name)
    for key in config:
        if key in known:
            continue
        if key in choices:
            raise ConfigError(
                f"{key}={choices[key]}: the keys of this file are below {key}; begin it with the line "
                "# @package _global_"
            )
        if "." in str(key):
            raise dotted_key_error(key, key)
        raise unknown_key_error(key, known)


def parse_sections(config: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """Parses all sections of a config, or only some by name. Raises the errors of `parse_plan`."""
    classes = {name: cls for name, cls in type_hints(Plan).items() if dataclasses.is_dataclass(cls)}
    parsed: dict[str, Any] = {}
    for name in classes if names is None else names:
        cls = classes[name]
        section = config.get(name, {})
        if name == "debug" and section is None:  # `debug` has no default option
            section = {}
        if name == "cluster":
            cls, section = select_cluster_keys(section)
        parsed[name] = parse_section(cast(Any, cls), section, name)
    return parsed


def set_values(plan: Plan, values: Mapping[str, Any]) -> Plan:
    """Returns a plan with other values for some keys, `GROUP.KEY`, or for whole groups.

    Values that the plan resolves, such as `auto`, are replaced only here. The function changes the config and parses
    the sections from it again, so the two never differ.
    """
    config = dict(plan.config)
    groups = set()
    for key, value in values.items():
        group, _, name = key.partition(".")
        groups.add(group)
        if name:
            config[group] = {**(config.get(group) or {}), name: value}
        else:
            config[group] = value
    core_groups = {field.name for field in dataclasses.fields(Plan)}
    sections = parse_sections(config, groups & core_groups)
    return replace(plan, config=config, features=parse_feature_sections(config), **sections)


def select_cluster_keys(section: Any) -> tuple[type[Cluster], Any]:
    """Returns the dataclass for the keys of the section's engine, and the section without keys of other engines.

    The rules refuse those keys, and name the engines that have them. Raises ConfigError for an unknown engine.
    """
    values = section if isinstance(section, Mapping) else {}
    engines = list_engines()
    names: Any = tuple(engines)
    used_engine = engines[parse_value(values.get("name", Cluster.name), Literal[names], "cluster.name")]
    if not values:
        return used_engine.section, section
    foreign: set[str] = set()
    for engine in engines.values():
        foreign.update(engine.own_keys)
    foreign -= set(used_engine.own_keys)
    return used_engine.section, {key: value for key, value in values.items() if key not in foreign}


#: Fields of a plan that are not keys of the config.
DERIVED_FIELDS = ("choices", "config", "features", "search", "task", "tf_config", "weights", "answers")

#: Arguments of a Keras optimizer that control a moving average of the weights.
AVERAGED_WEIGHTS = ("use_ema", "ema_momentum", "ema_overwrite_frequency")

#: Types and limits of arguments of Keras's optimizers, by a pattern of their names. Keras itself checks few of them.
OPTIMIZER_ARGUMENTS: tuple[tuple[str, Any, Mapping[str, Any]], ...] = (
    (r"(adam_)?beta_[12]|rho", float, {"at_least": 0.0, "below": 1.0}),
    (r"momentum", float, {"at_least": 0.0, "at_most": 1.0}),
    (r"epsilon(_[12])?|initial_accumulator_value|l[12]_.*strength", float, {"at_least": 0.0}),
    (r"(adam_)?weight_decay", float | None, {"at_least": 0.0}),
    (r"amsgrad|nesterov|centered|relative_step|exclude_embeddings", bool, {}),
    (r"ns_steps", int, {"at_least": 1}),
    (r"clip_threshold|adam_lr_ratio", float, {"above": 0.0}),
)

#: Maximum number of suggestions in a message.
MAX_SHOWN = 4


def check_plan(plan: Plan, may_submit: bool = False) -> None:
    """Checks that the sections of a plan work together, except for checks that need TensorFlow.

    `may_submit` allows `cluster.submit`: only the command of one new run may use it. Raises ConfigError, which names
    the key, the value and a fix.
    """
    check_rules(plan)
    for feature in list_features().values():
        if feature.fill_in and feature.is_used_by(plan):
            plan = fill_in_values(plan, feature)
    check_averaged_weights(plan)
    check_optimizer_arguments(plan.optimizer.target)
    check_checkpoint_address(plan.checkpoint.folder)
    # A batch size that depends on the number of examples is not known yet: the worker rounds it for the replicas.
    is_known = plan.training.global_batch_size is not None or plan.training.batch_size != BY_SIZE
    if plan.strategy.is_pipeline and is_known:
        check_micro_batches(plan.training, plan.strategy, is_resumed=plan.resume is not None)
    if plan.hardware.name == "cpu" and is_known:
        local = plan.hardware.logical_devices if plan.strategy.name in ("auto", "mirrored") else 1
        make_batching(plan.training, local * count_synchronous_workers(plan), is_resumed=plan.resume is not None)
    if plan.cluster.submit is not None and not may_submit:
        raise ConfigError(
            f"cluster.submit={plan.cluster.submit}: works only in a command that starts one new run, not with a "
            "sweep, resume or the Python API; leave it null"
        )


def fill_in_values(plan: Plan, feature: Feature) -> Plan:
    """Returns a plan with values instead of a feature's placeholders. Raises ConfigError if there are no values."""
    with report_problems(feature.name, "it cannot check the config", may_refuse=True):
        filled = import_named(feature.fill_in)(plan)
        if not isinstance(filled, Plan):
            raise TypeError(f"{feature.fill_in} returns no Plan")
        plan = filled
    return plan  # noqa: RET504 (the block may fail)


def check_optimizer_arguments(target: Target) -> None:
    """Raises ConfigError if an argument of a Keras optimizer has a wrong type or is out of range."""
    if not re.match(r"(tensorflow\.)?keras\.optimizers\.|scaleflow\.", target.path):
        return
    for pattern, hint, limits in OPTIMIZER_ARGUMENTS:
        for name, value in target.arguments.items():
            if re.fullmatch(pattern, name):
                parse_value(value, hint, f"optimizer.{name}", limits=limits)


def find_batch_multiple(plan: Plan) -> int:
    """Returns the number by which `training.batch_size` must be divisible."""
    replicas = 1
    micro_batches = 1
    if plan.strategy.is_pipeline:
        replicas = plan.strategy.replicas
        micro_batches = plan.strategy.micro_batches
    # The global batch already contains these factors, so the batch size need not contain them.
    parts = count_synchronous_workers(plan) * plan.training.accumulate * replicas
    shards = plan.dataset.shards // math.gcd(plan.dataset.shards, parts)
    return math.lcm(micro_batches, shards)


def apply_restore_best(plan: Plan) -> Plan:
    """Returns a plan that exports the best checkpoint, if `training.early_stopping` has restore_best."""
    stopping = plan.training.early_stopping
    checkpoint = plan.checkpoint
    if stopping is None or not stopping.restore_best or checkpoint.best is not None:
        return plan
    best = {"monitor": stopping.monitor, "mode": stopping.mode}
    return set_values(plan, {"checkpoint.best": best, "checkpoint.export": "best"})


def check_averaged_weights(plan: Plan) -> None:
    """Rejects Keras's moving average of the weights, which would have no effect.

    For a user's own class it rejects only `use_ema`, since the other names may have another meaning there. The worker
    checks the optimizer that the class made.
    """
    target = plan.optimizer.target
    keys = AVERAGED_WEIGHTS if target.path.startswith(("keras.", "tensorflow.keras.")) else AVERAGED_WEIGHTS[:1]
    for key in keys:
        value = target.arguments.get(key)
        if value is not None and value is not False:
            raise ConfigError(
                f"optimizer.{key}={format_value(value)}: Keras's moving average of the weights would be neither "
                "evaluated nor saved; leave it out, and use optimizer.ema=0.99"
            )


def check_checkpoint_address(folder: str | None) -> None:
    """Raises ConfigError if `checkpoint.folder` is an invalid address in an object store."""
    if folder is None or not is_store_address(folder):
        return
    key = "checkpoint.folder"
    scheme, path = split_address(key, folder)
    bucket = path.partition("/")[0]
    if "@" in bucket or "?" in path:
        raise ConfigError(
            f"{key}: expected {scheme}://BUCKET/PATH; set the account and the credentials in the environment"
        )
    if not bucket:
        raise ConfigError(f"{key}={folder}: expected the name of a bucket: {scheme}://BUCKET/PATH")


def check_micro_batches(training: Training, strategy: Strategy, is_resumed: bool) -> None:
    """Raises ConfigError if a batch is not divisible by the micro-batches of all replicas.

    If `is_resumed`, the run keeps its batch, so the message suggests another division of it.
    """
    if training.global_batch_size is None:
        key = "batch_size"
        size = training.batch_size
        factors = {}
        changeable = "strategy.micro_batches"
    else:
        key = "global_batch_size"
        size = training.global_batch_size
        factors = {"strategy.replicas": strategy.replicas, "training.accumulate": training.accumulate}
        changeable = "strategy.replicas and strategy.micro_batches"
    assert isinstance(size, int)
    parts = strategy.micro_batches * math.prod(factors.values())
    if size % parts == 0:
        return
    divisor = f"strategy.micro_batches={strategy.micro_batches}"
    for name, count in factors.items():
        if count > 1:
            divisor += f" x {name}={count}"
    uneven = f"training.{key}={size}: is not divisible by {divisor}"
    if is_resumed:
        raise ConfigError(f"{uneven}; the run was started with this batch, so resume it with another {changeable}")
    lower = size // parts * parts
    suggestions = f"{lower} or {lower + parts}" if lower else str(parts)
    raise ConfigError(f"{uneven}; use training.{key}={suggestions}, or strategy.micro_batches=1")


def make_batching(training: Training, replicas: int, is_resumed: bool = False) -> Batching:
    """Computes how each global batch is divided among `replicas`.

    If `is_resumed`, the run keeps its global batch, so the message suggests other numbers of replicas. Raises
    ConfigError if `global_batch_size` is not divisible by replicas x `accumulate`.
    """
    if training.global_batch_size is None:
        if training.batch_size == BY_SIZE:
            return Batching(1, training.accumulate, replicas)  # a stand-in until the examples are counted
        size = training.batch_size
        if not isinstance(size, int):
            raise ConfigError(
                f"training.batch_size={size}: this command needs a number, such as training.batch_size=32"
            )
        return Batching(size, training.accumulate, replicas)
    parts = replicas * training.accumulate
    size, remainder = divmod(training.global_batch_size, parts)
    is_divisible = size > 0 and remainder == 0
    if is_divisible:
        return Batching(size, training.accumulate, replicas)
    setting = f"training.global_batch_size={training.global_batch_size}"
    divisor = f"{replicas} replica(s) x training.accumulate={training.accumulate}"
    if is_resumed:
        suggestions = suggest_replicas(training.global_batch_size // training.accumulate, replicas)
        raise ConfigError(
            f"{setting}: the run was started with this value, which is not divisible by {divisor}; resume it with "
            f"{', '.join(map(str, suggestions))} replica(s)"
        )
    suggestions = sorted({max(1, size) * parts, (size + 1) * parts})
    raise ConfigError(f"{setting}: is not divisible by {divisor}; use {' or '.join(map(str, suggestions))}")


def suggest_replicas(batch_size: int, replicas: int) -> list[int]:
    """Returns numbers of replicas that divide a batch: those next to `replicas`, in ascending order."""
    divisors = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
    divisors.sort(key=lambda count: abs(count - replicas))
    return sorted(divisors[:MAX_SHOWN])
