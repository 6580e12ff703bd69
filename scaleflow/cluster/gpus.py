"""How processes on one machine share its GPUs: each sees its own, by CUDA_VISIBLE_DEVICES. No TensorFlow here."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Hardware

GPUS = "CUDA_VISIBLE_DEVICES"

#: Set for a process whose CUDA_VISIBLE_DEVICES follows from `hardware.devices`, which it must not apply again.
ASSIGNED = "SCALEFLOW_GPUS_ASSIGNED"

#: TensorFlow then takes a GPU's memory as it needs it, so that several processes can use one GPU.
GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"

ASK_SECONDS = 10.0


def gpu_environments(roles: Mapping[str, int], options: Hardware, gpus: Sequence[str]) -> list[dict[str, str]]:
    """For each process of a run on this machine, the environment that shows it its own GPUs.

    Synchronous workers get equal shares. A worker of a parameter server run computes on one GPU. The coordinator, which
    evaluates, gets a GPU that the workers leave over, or shares one with a worker. A server gets none.

    Args:
        roles: how many processes have each of TF_CONFIG's roles, in the order in which they are numbered.
        options: the run's.
        gpus: those of this machine, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        ConfigError: if there are fewer GPUs than workers.
    """
    count = sum(roles.values())
    if options.name == "cpu" and count > 1:
        return [environment_with([]) for _ in range(count)]
    if count == 1 or not gpus or options.name == "tpu":
        return [{} for _ in range(count)]
    chosen = choose_gpus(gpus, options.devices)
    workers = roles["worker"]
    if "chief" in roles:
        each = [[chosen[index % len(chosen)]] for index in range(workers)]
        shares = [chosen[workers:][:1] or chosen[-1:], *each, *([] for _ in range(roles["ps"]))]
    elif len(chosen) < workers:
        raise ConfigError(
            f"cluster.workers={workers}: each worker needs a GPU of its own, and this machine has {len(chosen)} for "
            f"them; use {enough(len(chosen))}, or hardware=cpu"
        )
    else:
        shares = [share(chosen, index, workers) for index in range(workers)]
    users = Counter(gpu for own in shares for gpu in own)
    return [environment_with(own, is_shared=any(users[gpu] > 1 for gpu in own)) for own in shares]


def enough(gpus: int) -> str:
    return "strategy=one_device" if gpus == 1 else f"cluster.workers={gpus}"


def environment_with(gpus: Sequence[str], is_shared: bool = False) -> dict[str, str]:
    """The environment of a process with these GPUs alone."""
    return {GPUS: ",".join(gpus) or "-1", ASSIGNED: "1", **({GROWTH: "true"} if is_shared else {})}


def assigned_hardware(options: Hardware, environment: Mapping[str, str]) -> Hardware:
    """The options as this process has to apply them: without indices that its CUDA_VISIBLE_DEVICES follows from."""
    is_assigned = ASSIGNED in environment and options.name != "cpu"
    return replace(options, devices=None) if is_assigned else options


def choose_gpus(gpus: Sequence[str], indices: Sequence[int] | None) -> Sequence[str]:
    """The GPUs that `hardware.devices` names; all of them if it is null."""
    if indices is None:
        return gpus
    if max(indices) >= len(gpus):
        there = list(range(len(gpus)))
        raise ConfigError(f"hardware.devices={list(indices)}: this machine has the GPUs {there}; use some of these")
    return [gpus[index] for index in indices]


def share(gpus: Sequence[str], slot: int, count: int) -> Sequence[str]:
    """The GPUs of one of `count` users: as many as the others', or one with others if there are fewer than users."""
    if len(gpus) < count:
        return [gpus[slot % len(gpus)]]
    each = len(gpus) // count
    return gpus[slot * each : (slot + 1) * each]


def visible_gpus(environment: Mapping[str, str] | None = None) -> list[str]:
    """NVIDIA's GPUs as CUDA_VISIBLE_DEVICES names them; read from nvidia-smi, without TensorFlow.

    Args:
        environment: added to this process's.
    """
    if (chosen := {**os.environ, **(environment or {})}.get(GPUS)) is not None:
        return [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()
