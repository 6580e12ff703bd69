"""From a composed config to a `Plan`: typed, checked, every refusal with its reason.

Nothing here imports TensorFlow, Keras or MLflow, so that a mistake is answered in about a second.
What needs devices, a `_target_` or the store is checked later, by the worker and the tracker.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scaleflow.cluster import TF_CONFIG, parse, port_is_free
from scaleflow.errors import Refusal
from scaleflow.interfaces import (
    Batching,
    Cluster,
    Dataset,
    Debug,
    EarlyStopping,
    Hardware,
    Model,
    Optimizer,
    Place,
    Plan,
    Precision,
    Strategy,
    Target,
    Tracking,
    Training,
)
from scaleflow.sections import read, read_with_target, show, typed, unknown_key
from scaleflow.tracking.uri import resolve


def make_plan(
    config: Mapping[str, Any], choices: Mapping[str, str], search: Sequence[str] = (), look_outside: bool = True
) -> Plan:
    """Checks a composed config as far as that needs no TensorFlow.

    Args:
        config: the config with interpolations resolved, as plain containers.
        choices: the option chosen in each config group.
        search: folders in which `_target_` modules are looked for.
        look_outside: look at the tracking store too; a worker leaves that to its launcher.

    Raises:
        Refusal: naming the key, the value and what would work.
    """
    sections = dict(config)
    plan = Plan(
        strategy=read(Strategy, sections.pop("strategy", {}), "strategy"),
        hardware=read(Hardware, sections.pop("hardware", {}), "hardware"),
        precision=read(Precision, sections.pop("precision", {}), "precision"),
        dataset=read_with_target(Dataset, sections.pop("dataset", {}), "dataset"),
        model=read_with_target(Model, sections.pop("model", {}), "model"),
        optimizer=read_with_target(Optimizer, sections.pop("optimizer", {}), "optimizer"),
        training=read(Training, sections.pop("training", {}), "training"),
        tracking=read(Tracking, sections.pop("tracking", {}), "tracking"),
        cluster=read(Cluster, sections.pop("cluster", {}), "cluster"),
        debug=read(Debug, sections.pop("debug", None) or {}, "debug"),
        seed=typed(sections.pop("seed", 0), int, "seed", {"at_least": 0, "at_most": 2**31 - 1}),
        choices=choices,
        config=config,
        search=search,
    )
    for key in sections:
        raise unknown_key(key, [f.name for f in dataclasses.fields(Plan)])
    plan = follow_tf_config(plan)
    check_combinations(plan)
    if not look_outside:
        return plan
    place = place_of(plan)
    if place and not port_is_free(place.peers[place.worker]):
        raise Refusal(f"TF_CONFIG: the port of {place.peers[place.worker]}, this worker's, is in use; name a free one")
    return dataclasses.replace(plan, tracking=resolve(plan.tracking))


# ---------------------------------------------------------------------------------------------
# What works with what
# ---------------------------------------------------------------------------------------------


def check_combinations(plan: Plan) -> None:
    """Refuses what cannot work together, as far as the config alone tells."""
    for applies, reason in COMBINATIONS:
        if applies(plan):
            raise Refusal(reason(plan))
    if plan.hardware.name == "cpu":
        local = 1 if plan.strategy.name == "one_device" else plan.hardware.logical_devices
        batching(plan.training, local * workers(plan))


def follow_tf_config(plan: Plan) -> Plan:
    """`strategy=auto` becomes multi_worker where TF_CONFIG names several workers.

    Raises:
        Refusal: if TF_CONFIG is asked for, and is missing or wrong.
    """
    text = os.environ.get(TF_CONFIG)
    if plan.cluster.name == "local" and (plan.strategy.name != "auto" or not text):
        return plan
    place = parse(text)
    if plan.strategy.name == "auto" and len(place.peers) > 1:
        there = Cluster(name="tf_config", start_seconds=plan.cluster.start_seconds)
        return dataclasses.replace(plan, strategy=Strategy(name="multi_worker"), cluster=there)
    return plan


def place_of(plan: Plan) -> Place | None:
    """This machine's place in a cluster of several machines, or None where all workers are on this one."""
    return parse(os.environ.get(TF_CONFIG)) if plan.cluster.name == "tf_config" else None


def workers(plan: Plan) -> int:
    """How many worker processes the plan has, on all machines."""
    if plan.strategy.name != "multi_worker":
        return 1
    place = place_of(plan)
    return len(place.peers) if place else plan.cluster.workers or 2


def is_fit_mirrored(plan: Plan) -> bool:
    return plan.training.engine == "fit" and plan.strategy.name == "mirrored"


#: (does it apply, the refusal in words), in the order in which they are looked at.
COMBINATIONS: Sequence[tuple[Callable[[Plan], bool], Callable[[Plan], str]]] = (
    (
        lambda p: p.hardware.memory_limit_mb is not None and p.hardware.name == "cpu",
        lambda p: (
            f"hardware.memory_limit_mb={p.hardware.memory_limit_mb}: only a GPU takes a memory limit; "
            "use hardware=gpu, or leave it null"
        ),
    ),
    (
        lambda p: p.hardware.memory_growth and p.hardware.memory_limit_mb is not None,
        lambda p: (
            f"hardware.memory_growth=true with hardware.memory_limit_mb={p.hardware.memory_limit_mb}: "
            "a limited device can't grow; leave one of the two"
        ),
    ),
    (
        lambda p: p.hardware.name == "gpu" and p.hardware.logical_devices > 1 and p.hardware.memory_limit_mb is None,
        lambda p: (
            f"hardware.logical_devices={p.hardware.logical_devices} with hardware=gpu: dividing a GPU needs "
            "hardware.memory_limit_mb, the memory of each logical device"
        ),
    ),
    (
        lambda p: p.hardware.devices is not None and not p.hardware.devices,
        lambda p: "hardware.devices=[]: expected at least one index, or null for every device",
    ),
    (
        lambda p: (
            p.hardware.devices is not None
            and (min(p.hardware.devices) < 0 or len(set(p.hardware.devices)) < len(p.hardware.devices))
        ),
        lambda p: f"hardware.devices={p.hardware.devices}: expected different indices from 0",
    ),
    (
        lambda p: p.cluster.workers not in (None, 1) and p.strategy.name != "multi_worker",
        lambda p: (
            f"cluster.workers={p.cluster.workers} with strategy={p.strategy.name}: has one process; "
            "use strategy=multi_worker, or leave cluster.workers null"
        ),
    ),
    (
        lambda p: p.cluster.name == "tf_config" and p.strategy.name in ("one_device", "mirrored"),
        lambda p: (
            f"cluster=tf_config with strategy={p.strategy.name}: stays on one machine; use "
            "strategy=multi_worker, or cluster=local"
        ),
    ),
    (
        lambda p: p.cluster.name == "tf_config" and p.cluster.workers is not None,
        lambda p: (
            f"cluster.workers={p.cluster.workers} with cluster=tf_config: TF_CONFIG names the workers; leave it null"
        ),
    ),
    (
        lambda p: p.debug.inline and workers(p) > 1,
        lambda p: (
            f"debug=inline with {workers(p)} workers: they need a process each; use strategy=one_device or "
            "mirrored, or cluster.workers=1"
        ),
    ),
    (
        lambda p: p.strategy.communication == "nccl" and p.hardware.name == "cpu",
        lambda p: "strategy.communication=nccl with hardware=cpu: NCCL connects GPUs; use ring, or auto",
    ),
    (
        lambda p: p.training.engine == "fit" and p.strategy.name not in ("auto", "one_device", "mirrored"),
        lambda p: (
            f"training.engine=fit with strategy={p.strategy.name}: Keras 3's fit fails there, it knows one device and "
            "mirrored; use training.engine=loop"
        ),
    ),
    (
        lambda p: p.training.engine == "fit" and p.training.step is not None,
        lambda p: (
            f"training.engine=fit with training.step._target_={typing.cast(Target, p.training.step).path}: Keras's fit "
            "takes its own step; use training.engine=loop"
        ),
    ),
    (
        lambda p: p.training.engine == "fit" and p.training.accumulate > 1,
        lambda p: (
            f"training.engine=fit with training.accumulate={p.training.accumulate}: Keras's own accumulation fails "
            "under a strategy; use training.engine=loop"
        ),
    ),
    (
        lambda p: p.training.engine == "fit" and p.training.clip_norm is not None,
        lambda p: (
            f"training.engine=fit with training.clip_norm={p.training.clip_norm}: Keras clips each replica's gradient, "
            "before they are summed; use training.engine=loop"
        ),
    ),
    (
        lambda p: is_fit_mirrored(p) and p.precision.name == "mixed_float16",
        lambda p: (
            "training.engine=fit with precision=mixed_float16 and strategy=mirrored: Keras looks for an overflow in "
            "the first replica's gradients alone; use training.engine=loop"
        ),
    ),
    (
        lambda p: is_fit_mirrored(p) and p.training.steps_per_loop not in ("auto", 1),
        lambda p: (
            f"training.steps_per_loop={p.training.steps_per_loop} with training.engine=fit and strategy=mirrored: "
            "Keras's steps_per_execution fails there; use auto, or training.engine=loop"
        ),
    ),
    (
        lambda p: p.optimizer.schedule == "step" and p.optimizer.step_every is None,
        lambda p: (
            "optimizer.schedule=step: give optimizer.step_every, the updates after which the rate is "
            "multiplied by optimizer.step_factor"
        ),
    ),
    (
        lambda p: isinstance(p.dataset.validation, float) and not 0 <= p.dataset.validation < 1,
        lambda p: (
            f"dataset.validation={p.dataset.validation}: expected a fraction from 0 to less than 1, "
            "the name of a split, or null"
        ),
    ),
    (
        lambda p: (
            p.training.early_stopping is not None
            and p.training.early_stopping.monitor.startswith("val/")
            and not p.dataset.validation
        ),
        lambda p: (
            f"training.early_stopping.monitor={typing.cast(EarlyStopping, p.training.early_stopping).monitor} "
            f"with dataset.validation={show(p.dataset.validation)}: there is nothing to validate on; "
            "set dataset.validation=0.1, or monitor train/loss"
        ),
    ),
)


def batching(training: Training, replicas: int) -> Batching:
    """How each global batch is divided.

    Raises:
        Refusal: if `global_batch_size` does not divide among the replicas and micro-batches.
    """
    if training.global_batch_size is None:
        return Batching(training.batch_size, training.accumulate, replicas)
    parts = replicas * training.accumulate
    size, rest = divmod(training.global_batch_size, parts)
    if rest or not size:
        near = sorted({max(1, size) * parts, (size + 1) * parts})
        raise Refusal(
            f"training.global_batch_size={training.global_batch_size}: does not divide by {replicas} replica(s) x "
            f"training.accumulate={training.accumulate}; use {' or '.join(map(str, near))}"
        )
    return Batching(size, training.accumulate, replicas)
