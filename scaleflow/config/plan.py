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
    engine_rules = (*make_key_rules(*list_engines().values()), *find_engine(plan.cluster).rules)
    report_unknown_keys()
    for feature, rule in list_placed_rules():
        if is_placed_rule_applicable(feature, rule, plan):
            yield rule
    yield from (rule for rule in (*find_version_rules(), *engine_rules) if is_applicable(rule, plan))


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
    engine_rules = [rule for engine in engines for rule in engine.rules]
    placed_rules = [rule for _, rule in list_placed_rules()]
    return (*placed_rules, *make_key_rules(*engines), *engine_rules)


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
    return [(name, rule) for _, name, rules in groups for rule in rules]


@functools.cache
def make_key_rules(*engines: ClusterEngine) -> Sequence[Rule]:
    """Returns the rules about keys of `cluster` that only some engines have."""
    assigning = [engine.name for engine in engines if engine.assigns_resources]
    submitting = [engine.name for engine in engines if engine.render_job]
    return (
        *(make_key_rule(engine) for engine in engines if engine.own_keys),
        Rule(
            "cluster",
            f"only {' and '.join(map(str.capitalize, assigning))} assign cores and GPUs to processes",
            f"use hardware.devices and hardware.intra_op_threads, or cluster={' or '.join(assigning)}",
            keys=("cluster.cpus", "cluster.gpus", "cluster"),
            only_if=lambda p: not find_engine(p.cluster).assigns_resources and bool(p.cluster.cpus or p.cluster.gpus),
        ),
        Rule(
            "cluster.submit!=null & cluster",
            f"scripts can be written only for {' and '.join(map(str.capitalize, submitting))}",
            f"use cluster={' or '.join(submitting)}, or leave it null",
            only_if=lambda p: find_engine(p.cluster).render_job is None,
        ),
    )


def make_key_rule(engine: ClusterEngine) -> Rule:
    """Returns the rule that refuses an engine's own keys with other engines."""
    keys = engine.own_keys
    shown, named = (keys, "") if len(keys) <= MAX_SHOWN_KEYS else ((), f"{', '.join(keys)}: ")
    return Rule(
        f"cluster!={engine.name}",
        f"{named}these keys are only for {engine.place}",
        f"use cluster={engine.name}, or remove them",
        keys=(*(f"cluster.{key}" for key in shown), "cluster"),
        only_if=lambda p: has_foreign_keys(p, engine),
    )


def has_foreign_keys(plan: Plan, engine: ClusterEngine) -> bool:
    """Whether the config sets keys that this engine has and the config's own engine lacks."""
    given = plan.config.get("cluster") or {}
    own = list_engines()[given.get("name", Cluster.name)].own_keys
    defaults = vars(engine.section())
    return any(key not in own and given.get(key, defaults[key]) != defaults[key] for key in engine.own_keys)


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
    parsed = parse_sections(config)
    sections = {key: value for key, value in config.items() if key not in parsed and key not in list_sections()}
    plan = Plan(
        **parsed,
        seed=parse_value(sections.pop("seed", 0), int, "seed", limits={"at_least": 0, "at_most": MAX_INT}),
        choices=choices,
        config=config,
        features=parse_feature_sections(config),
        search=search,
        resume=parse_value(sections.pop("resume", None), str | None, "resume"),
        resume_data=parse_value(sections.pop("resume_data", "same"), Literal["same", "changed"], "resume_data"),
        resume_code=parse_value(sections.pop("resume_code", "same"), Literal["same", "changed"], "resume_code"),
        trusted_modules=parse_value(sections.pop("trusted_modules", None), list[str] | None, "trusted_modules"),
    )
    for key in sections:
        known = [f.name for f in dataclasses.fields(Plan) if f.name not in DERIVED_FIELDS]
        known += [name for name in list_sections() if name not in known]
        if key in choices:
            raise ConfigError(
                f"{key}={choices[key]}: the keys of this file are below {key}; begin it with the line "
                "# @package _global_"
            )
        raise dotted_key_error(key, key) if "." in str(key) else unknown_key_error(key, known)
    if plan.trusted_modules is not None:
        check_trusted_targets(config, plan.trusted_modules)
    if plan.debug.fast:
        plan = set_values(plan, {"training.epochs": 1, "training.max_steps": 1, "training.steps_per_loop": "auto"})
    return apply_restore_best(plan)


def parse_sections(config: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """Parses all sections of a config, or only some by name. Raises the errors of `parse_plan`."""
    classes = {name: cls for name, cls in type_hints(Plan).items() if dataclasses.is_dataclass(cls)}
    parsed: dict[str, Any] = {}
    for name in classes if names is None else names:
        section = config.get(name, {})
        section = {} if section is None and name == "debug" else section  # `debug` has no default option
        cls, section = select_cluster_keys(section) if name == "cluster" else (classes[name], section)
        parsed[name] = parse_section(cast(Any, cls), section, name)
    return parsed


def set_values(plan: Plan, values: Mapping[str, Any]) -> Plan:
    """Returns a plan with other values for some keys, `GROUP.KEY`, or for whole groups.

    Values that the plan resolves, such as `auto`, are replaced only here. The function changes the config and parses
    the sections from it again, so the two never differ.
    """
    config = dict(plan.config)
    for key, value in values.items():
        group, _, name = key.partition(".")
        config[group] = {**(config.get(group) or {}), name: value} if name else value
    groups = {key.partition(".")[0] for key in values}
    core = {each.name for each in dataclasses.fields(Plan)}
    sections = parse_sections(config, groups & core)
    return replace(plan, config=config, features=parse_feature_sections(config), **sections)


def select_cluster_keys(section: Any) -> tuple[type[Cluster], Any]:
    """Returns the dataclass for the keys of the section's engine, and the section without keys of other engines.

    The rules refuse those keys, and name the engines that have them. Raises ConfigError for an unknown engine.
    """
    given = section if isinstance(section, Mapping) else {}
    engines = list_engines()
    names: Any = tuple(engines)
    own = engines[parse_value(given.get("name", Cluster.name), Literal[names], "cluster.name")]
    foreign = {key for engine in engines.values() for key in engine.own_keys if key not in own.own_keys}
    return own.section, {key: value for key, value in given.items() if key not in foreign} if given else section


#: Fields of a plan that are not keys of the config.
DERIVED_FIELDS = ("choices", "config", "features", "search", "task", "tf_config", "weights")

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
    if re.match(r"(tensorflow\.)?keras\.optimizers\.|scaleflow\.", target.path):
        for pattern, hint, limits in OPTIMIZER_ARGUMENTS:
            for name in filter(re.compile(pattern).fullmatch, target.arguments):
                parse_value(target.arguments[name], hint, f"optimizer.{name}", limits=limits)


def find_batch_multiple(plan: Plan) -> int:
    """Returns the number by which `training.batch_size` must be divisible."""
    is_pipeline = plan.strategy.is_pipeline
    # The global batch already contains these factors, so the batch size need not contain them.
    parts = count_synchronous_workers(plan) * plan.training.accumulate * (plan.strategy.replicas if is_pipeline else 1)
    shards = plan.dataset.shards // math.gcd(plan.dataset.shards, parts)
    return math.lcm(plan.strategy.micro_batches if is_pipeline else 1, shards)


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
    """Raises ConfigError if a batch is not divisible by the micro-batches of all replicas. Names the key of the batch
    size.

    If `is_resumed`, the run keeps its batch, so the message suggests another division of it.
    """
    is_global = training.global_batch_size is not None
    others = {"strategy.replicas": strategy.replicas, "training.accumulate": training.accumulate} if is_global else {}
    parts = math.prod((strategy.micro_batches, *others.values()))
    value = training.global_batch_size if training.global_batch_size is not None else training.batch_size
    assert isinstance(value, int)
    if value % parts == 0:
        return
    largest_multiple = value // parts * parts
    suggestions = " or ".join(str(size) for size in (largest_multiple, largest_multiple + parts) if size)
    key = "global_batch_size" if is_global else "batch_size"
    factors = "".join(f" x {name}={count}" for name, count in others.items() if count > 1)
    uneven = f"training.{key}={value}: is not divisible by strategy.micro_batches={strategy.micro_batches}{factors}"
    if is_resumed:
        even = "strategy.replicas and strategy.micro_batches" if is_global else "strategy.micro_batches"
        raise ConfigError(f"{uneven}; the run was started with this batch, so resume it with another {even}")
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
    if (remainder or not size) and is_resumed:
        whole = training.global_batch_size // training.accumulate
        divisors = sorted(
            (count for count in range(1, whole + 1) if whole % count == 0), key=lambda c: abs(c - replicas)
        )
        raise ConfigError(
            f"training.global_batch_size={training.global_batch_size}: the run was started with this value, which is "
            f"not divisible by {replicas} replica(s) x training.accumulate={training.accumulate}; resume it with "
            f"{', '.join(map(str, sorted(divisors[:MAX_SHOWN])))} replica(s)"
        )
    if remainder or not size:
        suggestions = sorted({max(1, size) * parts, (size + 1) * parts})
        raise ConfigError(
            f"training.global_batch_size={training.global_batch_size}: is not divisible by {replicas} replica(s) x "
            f"training.accumulate={training.accumulate}; use {' or '.join(map(str, suggestions))}"
        )
    return Batching(size, training.accumulate, replicas)
