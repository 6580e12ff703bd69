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

from scaleflow.cluster import TF_CONFIG, find_tpu, is_sure, no_tpu, parse, port_is_free, unreachable
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
    Partitioner,
    Place,
    Plan,
    Precision,
    Strategy,
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
    plan = follow_tf_config(follow_tpu(plan))
    check_combinations(plan)
    if not look_outside:
        return plan
    check_tpu(plan)
    place = place_of(plan)
    if place and not port_is_free(place.peers[place.worker]):
        raise Refusal(f"TF_CONFIG: the port of {place.peers[place.worker]}, this process's, is in use; name a free one")
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
        batching(plan.training, local * in_step(plan))


def follow_tf_config(plan: Plan) -> Plan:
    """`strategy=auto` becomes multi_worker where TF_CONFIG names several workers, parameter_server where it names ps.

    Raises:
        Refusal: if TF_CONFIG is asked for, and is missing or wrong.
    """
    text = os.environ.get(TF_CONFIG)
    if plan.cluster.name == "local" and (plan.strategy.name != "auto" or not text):
        return plan
    place = parse(text)
    if plan.strategy.name == "auto" and len(place.peers) > 1:
        there = Cluster(name="tf_config", start_seconds=plan.cluster.start_seconds)
        strategy = Strategy(name="parameter_server" if place.servers else "multi_worker")
        return dataclasses.replace(plan, strategy=strategy, cluster=there)
    return plan


def follow_tpu(plan: Plan) -> Plan:
    """`strategy=auto` becomes tpu where there is one, and the plan of a TPU names its address.

    Raises:
        Refusal: if `hardware.tpu` or the environment names it in a way that makes no sense.
    """
    is_auto = plan.strategy.name == "auto"
    if not (is_auto or plan.strategy.name == "tpu") or plan.hardware.name in ("cpu", "gpu"):
        return plan
    if is_auto and plan.cluster.name == "tf_config":
        return plan
    is_wanted = not is_auto or plan.hardware.name == "tpu" or plan.hardware.tpu is not None
    place = find_tpu(plan.hardware.tpu)
    if not is_wanted and (place is None or not is_sure(place)):
        return plan
    hardware = dataclasses.replace(plan.hardware, name="tpu", tpu=place.address if place else None)
    return dataclasses.replace(plan, strategy=Strategy(name="tpu"), hardware=hardware)


def check_tpu(plan: Plan) -> None:
    """Refuses a TPU that is not there: TensorFlow would wait for it for ever."""
    if plan.strategy.name != "tpu":
        return
    hardware = plan.config.get("hardware") or {}
    place = find_tpu(hardware.get("tpu"))
    if place is None:
        key = "hardware" if plan.choices.get("hardware") == "tpu" else "strategy"
        raise Refusal(f"{key}=tpu: {no_tpu()}")
    reason = unreachable(place)
    if reason is not None:
        raise Refusal(f"{place}: {reason}")


def place_of(plan: Plan) -> Place | None:
    """This machine's place in a cluster of several machines, or None where all workers are on this one."""
    return parse(os.environ.get(TF_CONFIG)) if plan.cluster.name == "tf_config" else None


def roles(plan: Plan) -> Mapping[str, int]:
    """How many processes the plan has in each of TF_CONFIG's roles, on all machines, as they are numbered."""
    place = place_of(plan)
    if plan.strategy.name == "parameter_server":
        if place:
            return {"chief": 1, "worker": len(place.peers) - 1 - place.servers, "ps": place.servers}
        return {"chief": 1, "worker": plan.cluster.workers or 2, "ps": plan.cluster.servers or 1}
    if plan.strategy.name == "multi_worker":
        return {"worker": len(place.peers) if place else plan.cluster.workers or 2}
    return {"worker": 1}


def names(plan: Plan) -> list[str]:
    """What users know the processes by, as they are numbered."""
    words = {"chief": "coordinator", "worker": "worker", "ps": "server"}
    return [
        words[role] if role == "chief" else f"{words[role]} {index}"
        for role, count in roles(plan).items()
        for index in range(count)
    ]


def workers(plan: Plan) -> int:
    """How many processes train, on all machines."""
    return roles(plan)["worker"]


def in_step(plan: Plan) -> int:
    """How many processes take each step together."""
    return workers(plan) if plan.strategy.name == "multi_worker" else 1


def servers_named(plan: Plan) -> int:
    """The parameter servers in TF_CONFIG."""
    place = place_of(plan)
    return place.servers if place else 0


SEVERAL_PROCESSES = ("multi_worker", "parameter_server")

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
        lambda p: p.strategy.name == "tpu" and p.hardware.name in ("cpu", "gpu"),
        lambda p: (
            f"strategy=tpu with hardware={p.hardware.name}: its replicas are the cores of a TPU; use hardware=tpu, or "
            "strategy=mirrored"
        ),
    ),
    (
        lambda p: p.hardware.name == "tpu" and p.strategy.name != "tpu",
        lambda p: (
            f"hardware=tpu with strategy={p.strategy.name}: only strategy=tpu uses a TPU; use it, or hardware=auto"
        ),
    ),
    (
        lambda p: p.hardware.tpu is not None and p.strategy.name != "tpu",
        lambda p: (
            f"hardware.tpu={p.hardware.tpu} with strategy={p.strategy.name} and hardware={p.hardware.name}: uses no "
            "TPU; use strategy=tpu hardware=tpu, or leave hardware.tpu null"
        ),
    ),
    (
        lambda p: p.hardware.name == "tpu" and p.hardware.logical_devices > 1,
        lambda p: (
            f"hardware.logical_devices={p.hardware.logical_devices} with a TPU: its cores are not divided; leave it "
            "1, or use hardware=cpu"
        ),
    ),
    (
        lambda p: p.hardware.name == "tpu" and p.hardware.devices is not None,
        lambda p: (
            f"hardware.devices={p.hardware.devices} with a TPU: all of its cores are used; leave it null, or use "
            "hardware=gpu"
        ),
    ),
    (
        lambda p: p.hardware.name == "tpu" and (p.hardware.memory_growth or p.hardware.memory_limit_mb is not None),
        lambda p: (
            f"hardware.memory_growth={show(p.hardware.memory_growth)} hardware.memory_limit_mb="
            f"{show(p.hardware.memory_limit_mb)} with a TPU: they are for GPUs; leave them false and null"
        ),
    ),
    (
        lambda p: p.hardware.name == "tpu" and p.precision.name == "mixed_float16",
        lambda p: (
            "precision=mixed_float16 on a TPU: its units multiply bfloat16; use precision=mixed_bfloat16, or mixed, "
            "which means that there"
        ),
    ),
    (
        lambda p: p.cluster.workers not in (None, 1) and p.strategy.name not in SEVERAL_PROCESSES,
        lambda p: (
            f"cluster.workers={p.cluster.workers} with strategy={p.strategy.name}: has one process; "
            "use strategy=multi_worker or parameter_server, or leave cluster.workers null"
        ),
    ),
    (
        lambda p: p.cluster.servers is not None and p.strategy.name != "parameter_server",
        lambda p: (
            f"cluster.servers={p.cluster.servers} with strategy={p.strategy.name}: has no parameter servers; "
            "use strategy=parameter_server, or leave cluster.servers null"
        ),
    ),
    (
        lambda p: p.cluster.max_restarts is not None and p.strategy.name != "parameter_server",
        lambda p: (
            f"cluster.max_restarts={p.cluster.max_restarts} with strategy={p.strategy.name}: not available yet; "
            "leave it null"
        ),
    ),
    (
        lambda p: p.cluster.name == "tf_config" and p.strategy.name not in ("auto", *SEVERAL_PROCESSES),
        lambda p: (
            f"cluster=tf_config with strategy={p.strategy.name}: stays on one machine; use "
            "strategy=multi_worker or parameter_server, or cluster=local"
        ),
    ),
    (
        lambda p: p.cluster.name == "tf_config" and p.strategy.name == "multi_worker" and servers_named(p) > 0,
        lambda p: "strategy=multi_worker with ps in TF_CONFIG: has no parameter servers; use strategy=parameter_server",
    ),
    (
        lambda p: p.cluster.name == "tf_config" and p.strategy.name == "parameter_server" and not servers_named(p),
        lambda p: (
            "strategy=parameter_server: TF_CONFIG names no ps; give it a chief, worker and ps, or use "
            "strategy=multi_worker"
        ),
    ),
    (
        lambda p: p.strategy.name == "parameter_server" and p.hardware.logical_devices > 1,
        lambda p: (
            f"hardware.logical_devices={p.hardware.logical_devices} with strategy=parameter_server: each worker is one "
            "replica on one device; use more cluster.workers"
        ),
    ),
    (
        lambda p: p.cluster.name == "tf_config" and p.strategy.name == "tpu",
        lambda p: "cluster=tf_config with strategy=tpu: hardware.tpu names the TPU's hosts; use cluster=local",
    ),
    (
        lambda p: p.cluster.name == "tf_config" and p.cluster.workers is not None,
        lambda p: (
            f"cluster.workers={p.cluster.workers} with cluster=tf_config: TF_CONFIG names the workers; leave it null"
        ),
    ),
    (
        lambda p: p.debug.inline and len(names(p)) > 1,
        lambda p: (
            f"debug=inline with {len(names(p))} processes: it has one only; use strategy=one_device or "
            "mirrored, or cluster.workers=1"
        ),
    ),
    (
        lambda p: p.strategy.communication != "auto" and p.strategy.name != "multi_worker",
        lambda p: (
            f"strategy.communication={p.strategy.communication} with strategy={p.strategy.name}: is between workers; "
            "use strategy=multi_worker, or auto"
        ),
    ),
    (
        lambda p: p.strategy.partitioner != Partitioner() and p.strategy.name != "parameter_server",
        lambda p: (
            f"strategy.partitioner with strategy={p.strategy.name}: divides variables among servers; "
            "use strategy=parameter_server, or leave max_shards null"
        ),
    ),
    (
        lambda p: p.strategy.communication == "nccl" and p.hardware.name == "cpu",
        lambda p: "strategy.communication=nccl with hardware=cpu: NCCL connects GPUs; use ring, or auto",
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
