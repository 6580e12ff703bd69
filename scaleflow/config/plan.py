"""Parses a composed config into a `Plan`, and checks that its options work together.

The functions depend only on their arguments. `launcher/prepare.py` reads the environment (TF_CONFIG, TPUs, ports, the
store). The worker checks what needs TensorFlow or the code of a `_target_`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from scaleflow.cluster import count_synchronous_workers
from scaleflow.config.parse import (
    format_value,
    parse_section,
    parse_section_with_target,
    parse_value,
    unknown_key_error,
)
from scaleflow.config.rules import check_rules
from scaleflow.config.trust import check_targets
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Batching,
    Checkpoint,
    Cluster,
    Dataset,
    Debug,
    Hardware,
    Model,
    ObjectiveOptions,
    Optimizer,
    Plan,
    Precision,
    Profiler,
    Strategy,
    Sweep,
    Tracking,
    Training,
)


def parse_plan(config: Mapping[str, Any], choices: Mapping[str, str], search: Sequence[str] = ()) -> Plan:
    """Parses a config into typed sections. `check_plan` checks that they work together.

    Args:
        config: the config with interpolations resolved, as plain containers.
        choices: the option chosen in each config group.
        search: the folders in which modules of `_target_` are looked for.

    Raises:
        ConfigError: naming the key, the value and what would work.
    """
    sections = dict(config)
    plan = Plan(
        strategy=parse_section(Strategy, sections.pop("strategy", {}), "strategy"),
        hardware=parse_section(Hardware, sections.pop("hardware", {}), "hardware"),
        precision=parse_section(Precision, sections.pop("precision", {}), "precision"),
        dataset=parse_section_with_target(Dataset, sections.pop("dataset", {}), "dataset"),
        model=parse_section_with_target(Model, sections.pop("model", {}), "model"),
        optimizer=parse_section_with_target(Optimizer, sections.pop("optimizer", {}), "optimizer"),
        objective=parse_section(ObjectiveOptions, sections.pop("objective", {}), "objective"),
        training=parse_section(Training, sections.pop("training", {}), "training"),
        checkpoint=parse_section(Checkpoint, sections.pop("checkpoint", {}), "checkpoint"),
        profiler=parse_section(Profiler, sections.pop("profiler", {}), "profiler"),
        tracking=parse_section(Tracking, sections.pop("tracking", {}), "tracking"),
        cluster=parse_section(Cluster, sections.pop("cluster", {}), "cluster"),
        sweep=parse_section(Sweep, sections.pop("sweep", {}), "sweep"),
        debug=parse_section(Debug, sections.pop("debug", None) or {}, "debug"),
        seed=parse_value(sections.pop("seed", 0), int, "seed", {"at_least": 0, "at_most": 2**31 - 1}),
        choices=choices,
        config=config,
        search=search,
        resume=parse_value(sections.pop("resume", None), str | None, "resume", {}),
        trusted_modules=parse_value(sections.pop("trusted_modules", None), list[str] | None, "trusted_modules", {}),
    )
    for key in sections:
        raise unknown_key_error(key, [f.name for f in dataclasses.fields(Plan) if f.name not in NO_KEYS])
    if plan.trusted_modules is not None:
        check_targets(config, plan.trusted_modules)
    return apply_fast_debug(plan)


#: Fields of a plan that are not keys of the config.
NO_KEYS = ("choices", "config", "search", "evaluator", "chief", "task", "tf_config")

#: The arguments of a Keras optimizer that control a moving average of the weights.
AVERAGED_WEIGHTS = ("use_ema", "ema_momentum", "ema_overwrite_frequency")

#: Prefixes of the paths of Keras's own classes.
KERAS = ("keras.", "tensorflow.keras.")

#: The most numbers that a message suggests.
MOST_SHOWN = 4


def check_plan(plan: Plan, may_submit: bool = False) -> None:
    """Checks that the sections of a plan work together, as far as that is known without TensorFlow.

    Args:
        plan: the plan after `resolve_environment`.
        may_submit: whether `cluster.submit` is allowed: in the command of one new run.

    Raises:
        ConfigError: naming the key, the value and what would work.
    """
    check_rules(plan)
    check_averaged_weights(plan)
    check_micro_batches(plan)
    if plan.hardware.name == "cpu":
        local = plan.hardware.logical_devices if plan.strategy.name in ("auto", "mirrored") else 1
        make_batching(plan.training, local * count_synchronous_workers(plan), is_resumed=plan.resume is not None)
    if plan.cluster.submit is not None and not may_submit:
        raise ConfigError(
            f"cluster.submit={plan.cluster.submit}: is for the command of one run that begins, not for a sweep, resume "
            "or Python; leave it null"
        )


def apply_fast_debug(plan: Plan) -> Plan:
    """Limits training to one step if `debug.fast` is set."""
    if not plan.debug.fast:
        return plan
    return dataclasses.replace(
        plan, training=dataclasses.replace(plan.training, epochs=1, max_steps=1, steps_per_loop="auto")
    )


def check_averaged_weights(plan: Plan) -> None:
    """Rejects Keras's moving average of the weights, which would have no effect.

    In a user's own class only `use_ema` is rejected, since the other names may mean something else there. The worker
    checks the optimizer that the class made.
    """
    target = plan.optimizer.target
    keys = AVERAGED_WEIGHTS if target.path.startswith(KERAS) else AVERAGED_WEIGHTS[:1]
    for key in keys:
        value = target.arguments.get(key)
        if value is not None and value is not False:
            raise ConfigError(
                f"optimizer.{key}={format_value(value)}: Keras's moving average of the weights would be neither "
                "evaluated nor saved; leave it out, and use optimizer.ema=0.99"
            )


def check_micro_batches(plan: Plan) -> None:
    """Checks that a replica's batch is divisible by the micro-batches of a pipeline."""
    training, parts = plan.training, plan.strategy.micro_batches
    if plan.strategy.name == "pipeline" and make_batching(training, 1).batch_size % parts:
        raise ConfigError(uneven_batch_error(training, parts))


def uneven_batch_error(training: Training, micro_batches: int) -> str:
    """Returns the message for a batch that is not divisible by the micro-batches; names the key of its size."""
    is_global = training.global_batch_size is not None
    parts = micro_batches * training.accumulate if is_global else micro_batches
    value = training.global_batch_size if training.global_batch_size is not None else training.batch_size
    largest_multiple = value // parts * parts
    suggestions = " or ".join(str(size) for size in (largest_multiple, largest_multiple + parts) if size)
    key = "global_batch_size" if is_global else "batch_size"
    factor = f" x training.accumulate={training.accumulate}" if is_global and training.accumulate > 1 else ""
    return (
        f"training.{key}={value}: does not divide by strategy.micro_batches={micro_batches}{factor}; "
        f"use training.{key}={suggestions}, or strategy.micro_batches=1"
    )


def make_batching(training: Training, replicas: int, is_resumed: bool = False) -> Batching:
    """Computes how each global batch is divided.

    Args:
        training: the options with the batch size.
        replicas: the number of replicas that share the batch.
        is_resumed: whether the run is resumed. It keeps its global batch, so the message suggests other numbers of
            replicas instead.

    Raises:
        ConfigError: if `global_batch_size` is not divisible by replicas x `accumulate`.
    """
    if training.global_batch_size is None:
        return Batching(training.batch_size, training.accumulate, replicas)
    parts = replicas * training.accumulate
    size, remainder = divmod(training.global_batch_size, parts)
    if (remainder or not size) and is_resumed:
        whole = training.global_batch_size // training.accumulate
        divisors = sorted(
            (count for count in range(1, whole + 1) if whole % count == 0), key=lambda c: abs(c - replicas)
        )
        raise ConfigError(
            f"training.global_batch_size={training.global_batch_size}: the run was begun with it, and it does not "
            f"divide by {replicas} replica(s) x training.accumulate={training.accumulate}; go on with "
            f"{', '.join(map(str, sorted(divisors[:MOST_SHOWN])))} replica(s)"
        )
    if remainder or not size:
        suggestions = sorted({max(1, size) * parts, (size + 1) * parts})
        raise ConfigError(
            f"training.global_batch_size={training.global_batch_size}: does not divide by {replicas} replica(s) x "
            f"training.accumulate={training.accumulate}; use {' or '.join(map(str, suggestions))}"
        )
    return Batching(size, training.accumulate, replicas)
