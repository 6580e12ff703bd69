"""From a composed config to a `Plan`: typed, checked, every refusal with its reason.

Nothing here imports TensorFlow, Keras or MLflow, so that a mistake is answered in about a second.
What needs devices, a `_target_` or the store is checked later, by the worker and the tracker.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from scaleflow.cluster import (
    TF_CONFIG,
    check_ray,
    count_synchronous_workers,
    explain_no_tpu,
    explain_unreachable,
    find_task,
    find_tpu,
    is_sure,
    parse_tf_config,
    port_is_free,
    read_tf_config,
)
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
    Optimizer,
    Plan,
    Precision,
    Profiler,
    Strategy,
    Sweep,
    Tracking,
    Training,
)
from scaleflow.tracking.tensorboard import check_tensorboard as check_tensorboard
from scaleflow.tracking.uri import resolve_store


def make_plan(
    config: Mapping[str, Any],
    choices: Mapping[str, str],
    search: Sequence[str] = (),
    look_outside: bool = True,
    may_submit: bool = False,
) -> Plan:
    """Checks a composed config as far as that needs no TensorFlow.

    Args:
        config: the config with interpolations resolved, as plain containers.
        choices: the option chosen in each config group.
        search: folders in which `_target_` modules are looked for.
        look_outside: look at the tracking store too; a worker leaves that to its launcher.
        may_submit: whether `cluster.submit` is followed: by the command of one run.

    Raises:
        ConfigError: naming the key, the value and what would work.
    """
    plan = read_plan(config, choices, search)
    check_combinations(plan)
    if plan.cluster.submit is not None and not may_submit:
        raise ConfigError(
            f"cluster.submit={plan.cluster.submit}: is for the command of one run that begins, not for a sweep, resume "
            "or Python; leave it null"
        )
    if not look_outside or plan.cluster.submit is not None:
        return plan
    if plan.evaluator is not None:
        check_evaluator(plan)
    check_tpu(plan)
    if plan.cluster.name == "ray":
        check_ray(plan.cluster)
    check_tensorboard(plan.tracking.tensorboard)
    task = find_task(plan)
    if task and not port_is_free(task.peers[task.worker]):
        raise ConfigError(
            f"TF_CONFIG: the port of {task.peers[task.worker]}, this process's, is in use; name a free one"
        )
    return dataclasses.replace(plan, tracking=resolve_store(plan.tracking))


def check_evaluator(plan: Plan) -> None:
    """An evaluator and the chief meet in the checkpoints' folder, and there has to be something to evaluate."""
    folder = plan.checkpoint.folder
    if folder is None or "://" in folder:
        raise ConfigError(
            "TF_CONFIG: with the role evaluator, checkpoint.folder has to name a folder that the chief and the "
            f"evaluator see, and it is {folder or 'null'}"
        )
    if not plan.dataset.validation:
        raise ConfigError("TF_CONFIG: the role evaluator has nothing to evaluate: dataset.validation is null")


def read_plan(config: Mapping[str, Any], choices: Mapping[str, str], search: Sequence[str] = ()) -> Plan:
    """Every key read into its type; nothing is said yet of what works with what."""
    sections = dict(config)
    plan = Plan(
        strategy=parse_section(Strategy, sections.pop("strategy", {}), "strategy"),
        hardware=parse_section(Hardware, sections.pop("hardware", {}), "hardware"),
        precision=parse_section(Precision, sections.pop("precision", {}), "precision"),
        dataset=parse_section_with_target(Dataset, sections.pop("dataset", {}), "dataset"),
        model=parse_section_with_target(Model, sections.pop("model", {}), "model"),
        optimizer=parse_section_with_target(Optimizer, sections.pop("optimizer", {}), "optimizer"),
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
        raise unknown_key_error(key, [f.name for f in dataclasses.fields(Plan)])
    if plan.trusted_modules is not None:
        check_targets(config, plan.trusted_modules)
    return apply_fast_debug(apply_tf_config(apply_tpu(plan)))


#: The arguments of a Keras optimizer that are about a moving average of the weights.
AVERAGED_WEIGHTS = ("use_ema", "ema_momentum", "ema_overwrite_frequency")

#: How the path of a class of Keras's begins.
KERAS = ("keras.", "tensorflow.keras.")

#: Of numbers that would work, so many are named.
MOST_SHOWN = 4


# ---------------------------------------------------------------------------------------------
# What works with what
# ---------------------------------------------------------------------------------------------


def check_combinations(plan: Plan) -> None:
    """Refuses what cannot work together, as far as the config alone tells; warnings are the worker's affair."""
    check_rules(plan)
    check_averaged_weights(plan)
    check_micro_batches(plan)
    if plan.hardware.name == "cpu":
        local = plan.hardware.logical_devices if plan.strategy.name in ("auto", "mirrored") else 1
        make_batching(plan.training, local * count_synchronous_workers(plan), is_resumed=plan.resume is not None)


def apply_tf_config(plan: Plan) -> Plan:
    """`strategy=auto` becomes multi_worker where TF_CONFIG names several workers, parameter_server where it names ps.

    Raises:
        ConfigError: if TF_CONFIG, or a task of an engine, is asked for, and is missing or wrong.
    """
    if plan.cluster.submit is not None:
        several = plan.strategy.name == "auto" and plan.cluster.workers != 1
        return dataclasses.replace(plan, strategy=Strategy(name="multi_worker")) if several else plan
    if plan.cluster.name == "ray":
        several = plan.strategy.name == "auto" and (plan.cluster.workers or 1) > 1
        return dataclasses.replace(plan, strategy=Strategy(name="multi_worker")) if several else plan
    if plan.cluster.name == "local" and (plan.strategy.name != "auto" or not os.environ.get(TF_CONFIG)):
        return plan
    task = parse_tf_config(read_tf_config(plan))
    if task.evaluator == "here":
        alone = Cluster(start_seconds=plan.cluster.start_seconds)
        chief = task.peers[0] if len(task.peers) > 1 else None
        return dataclasses.replace(
            plan, strategy=Strategy(name="one_device"), cluster=alone, evaluator="here", chief=chief
        )
    plan = dataclasses.replace(plan, evaluator=task.evaluator)
    if plan.strategy.name == "auto" and len(task.peers) > 1:
        there = plan.cluster
        if there.name == "local":
            there = Cluster(name="tf_config", start_seconds=there.start_seconds)
        strategy = Strategy(name="parameter_server" if task.servers else "multi_worker")
        return dataclasses.replace(plan, strategy=strategy, cluster=there)
    return plan


def apply_tpu(plan: Plan) -> Plan:
    """`strategy=auto` becomes tpu where there is one, and the plan of a TPU names its address.

    Raises:
        ConfigError: if `hardware.tpu` or the environment names it in a way that makes no sense.
    """
    is_auto = plan.strategy.name == "auto"
    if not (is_auto or plan.strategy.name == "tpu") or plan.hardware.name in ("cpu", "gpu"):
        return plan
    if is_auto and plan.cluster.name != "local":
        return plan
    is_wanted = not is_auto or plan.hardware.name == "tpu" or plan.hardware.tpu is not None
    place = find_tpu(plan.hardware.tpu)
    if not is_wanted and (place is None or not is_sure(place)):
        return plan
    hardware = dataclasses.replace(plan.hardware, name="tpu", tpu=place.address if place else None)
    return dataclasses.replace(plan, strategy=Strategy(name="tpu"), hardware=hardware)


def apply_fast_debug(plan: Plan) -> Plan:
    """`debug=fast` is a run of one step."""
    if not plan.debug.fast:
        return plan
    return dataclasses.replace(
        plan, training=dataclasses.replace(plan.training, epochs=1, max_steps=1, steps_per_loop="auto")
    )


def check_tpu(plan: Plan) -> None:
    """Refuses a TPU that is not there: TensorFlow would wait for it for ever."""
    if plan.strategy.name != "tpu":
        return
    hardware = plan.config.get("hardware") or {}
    place = find_tpu(hardware.get("tpu"))
    if place is None:
        key = "hardware" if plan.choices.get("hardware") == "tpu" else "strategy"
        raise ConfigError(f"{key}=tpu: {explain_no_tpu()}")
    reason = explain_unreachable(place)
    if reason is not None:
        raise ConfigError(f"{place}: {reason}")


def check_averaged_weights(plan: Plan) -> None:
    """Refuses Keras's moving average of the weights, which would have no effect.

    A class of the user's own may give the other names another meaning; what it made is looked at by the worker.
    """
    target = plan.optimizer.target
    keys = AVERAGED_WEIGHTS if target.path.startswith(KERAS) else AVERAGED_WEIGHTS[:1]
    for key in keys:
        value = target.arguments.get(key)
        if value is not None and value is not False:
            raise ConfigError(
                f"optimizer.{key}={format_value(value)}: Keras's moving average of the weights would be neither "
                "evaluated nor "
                "saved; leave it out"
            )


def check_micro_batches(plan: Plan) -> None:
    """Refuses a replica's batch that does not divide into a pipeline's micro-batches."""
    training, parts = plan.training, plan.strategy.micro_batches
    if plan.strategy.name == "pipeline" and make_batching(training, 1).batch_size % parts:
        raise ConfigError(uneven_batch_error(training, parts))


def uneven_batch_error(training: Training, micro_batches: int) -> str:
    """The refusal of a batch that does not divide into micro-batches, in the key that gives its size."""
    is_global = training.global_batch_size is not None
    parts = micro_batches * training.accumulate if is_global else micro_batches
    value = training.global_batch_size if training.global_batch_size is not None else training.batch_size
    below = value // parts * parts
    near = " or ".join(str(size) for size in (below, below + parts) if size)
    key = "global_batch_size" if is_global else "batch_size"
    by = f" x training.accumulate={training.accumulate}" if is_global and training.accumulate > 1 else ""
    return (
        f"training.{key}={value}: does not divide by strategy.micro_batches={micro_batches}{by}; "
        f"use training.{key}={near}, or strategy.micro_batches=1"
    )


def make_batching(training: Training, replicas: int, is_resumed: bool = False) -> Batching:
    """How each global batch is divided.

    Args:
        training: with the size of the batch.
        replicas: that share it.
        is_resumed: whether it is the batch that a run was begun with, which stays what it was.

    Raises:
        ConfigError: if `global_batch_size` does not divide among the replicas and micro-batches.
    """
    if training.global_batch_size is None:
        return Batching(training.batch_size, training.accumulate, replicas)
    parts = replicas * training.accumulate
    size, rest = divmod(training.global_batch_size, parts)
    if (rest or not size) and is_resumed:
        whole = training.global_batch_size // training.accumulate
        fits = sorted((count for count in range(1, whole + 1) if whole % count == 0), key=lambda c: abs(c - replicas))
        raise ConfigError(
            f"training.global_batch_size={training.global_batch_size}: the run was begun with it, and it does not "
            f"divide by {replicas} replica(s) x training.accumulate={training.accumulate}; go on with "
            f"{', '.join(map(str, sorted(fits[:MOST_SHOWN])))} replica(s)"
        )
    if rest or not size:
        near = sorted({max(1, size) * parts, (size + 1) * parts})
        raise ConfigError(
            f"training.global_batch_size={training.global_batch_size}: does not divide by {replicas} replica(s) x "
            f"training.accumulate={training.accumulate}; use {' or '.join(map(str, near))}"
        )
    return Batching(size, training.accumulate, replicas)
