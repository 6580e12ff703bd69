"""Divides the GPUs of one machine among processes with CUDA_VISIBLE_DEVICES, without importing TensorFlow."""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Hardware

CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"

#: Marks a process whose CUDA_VISIBLE_DEVICES already reflects `hardware.devices`: it must not apply the indices again.
ASSIGNED = "SCALEFLOW_GPUS_ASSIGNED"

#: With this variable TensorFlow allocates GPU memory as needed, so several processes can share a GPU.
GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"

#: Time limit for nvidia-smi, in seconds.
QUERY_SECONDS = 10.0

MIB = 1 << 20


def gpu_environments(roles: Mapping[str, int], options: Hardware, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Returns the environment variables that select the GPUs of each process of a run on this machine.

    Synchronous workers get equal shares. In a parameter server run, each worker gets one GPU, and workers share GPUs if
    there are too few. The coordinator evaluates: it gets a GPU that no worker uses, or shares the last one. Servers get
    no GPU.

    Args:
        roles: number of processes in each TF_CONFIG role, in the order of their numbers.
        options: the config group `hardware`.
        gpus: this machine's GPUs, as CUDA_VISIBLE_DEVICES names them.

    Raises ConfigError if there are fewer GPUs than synchronous workers, or `hardware.devices` names a missing GPU.
    """
    count = sum(roles.values())
    if options.name == "cpu" and count > 1:
        return [environment_with([]) for _ in range(count)]
    if count == 1 or not gpus or options.name == "tpu":
        return [{} for _ in range(count)]
    chosen = choose_gpus(gpus, options.devices)
    if "chief" in roles:
        gpus_of_processes = divide_among_roles(chosen, workers=roles["worker"], servers=roles["ps"])
    else:
        gpus_of_processes = divide_among_workers(chosen, roles["worker"])

    users: Counter[str] = Counter()  # the number of processes that use each GPU
    for own_gpus in gpus_of_processes:
        users.update(own_gpus)
    environments = []
    for own_gpus in gpus_of_processes:
        is_shared = any(users[gpu] > 1 for gpu in own_gpus)
        environments.append(environment_with(own_gpus, is_shared))
    return environments


def divide_among_roles(gpus: Sequence[str], workers: int, servers: int) -> list[Sequence[str]]:
    """Returns the GPUs of the coordinator, of each worker and of each parameter server."""
    gpu_of_coordinator = gpus[workers] if len(gpus) > workers else gpus[-1]
    divided: list[Sequence[str]] = [[gpu_of_coordinator]]
    for index in range(workers):
        divided.append([gpus[index % len(gpus)]])
    for _ in range(servers):
        divided.append([])
    return divided


def divide_among_workers(gpus: Sequence[str], workers: int) -> list[Sequence[str]]:
    """Returns the GPUs of each synchronous worker. Raises ConfigError if there are fewer GPUs than workers."""
    if len(gpus) < workers:
        instead = "strategy=one_device" if len(gpus) == 1 else f"cluster.workers={len(gpus)}"
        raise ConfigError(
            f"cluster.workers={workers}: each worker needs its own GPU, and this machine has {len(gpus)}; use "
            f"{instead}, or hardware=cpu"
        )
    return [share(gpus, index, workers) for index in range(workers)]


def environment_with(gpus: Sequence[str], is_shared: bool = False) -> dict[str, str]:
    """Returns the environment variables of a process that sees only these GPUs.

    Args:
        is_shared: whether another process uses one of them.
    """
    environment = {CUDA_DEVICES: ",".join(gpus) or "-1", ASSIGNED: "1"}
    if is_shared:
        environment[GROWTH] = "true"
    return environment


def drop_assigned_devices(options: Hardware, environment: Mapping[str, str]) -> Hardware:
    """Returns the options to apply in this process: without `devices` if CUDA_VISIBLE_DEVICES already reflects them."""
    is_assigned = ASSIGNED in environment and options.name != "cpu"
    return replace(options, devices=None) if is_assigned else options


def choose_gpus(gpus: Sequence[str], indices: Sequence[int] | None) -> Sequence[str]:
    """Returns the GPUs with the indices `hardware.devices`, or all GPUs if it is null."""
    if indices is None:
        return gpus
    if max(indices) >= len(gpus):
        available = list(range(len(gpus)))
        raise ConfigError(f"hardware.devices={list(indices)}: this machine has the GPUs {available}; choose from these")
    return [gpus[index] for index in indices]


def share(gpus: Sequence[str], slot: int, count: int) -> Sequence[str]:
    """Returns the GPUs of process `slot` of `count`: an equal share, or one shared GPU if there are too few."""
    if len(gpus) < count:
        return [gpus[slot % len(gpus)]]
    size = len(gpus) // count
    return gpus[slot * size : (slot + 1) * size]


def visible_gpus(environment: Mapping[str, str] | None = None) -> list[str]:
    """Returns the visible NVIDIA GPUs as CUDA_VISIBLE_DEVICES names them. If it is not set, asks nvidia-smi.

    Variables in `environment` override this process's environment.
    """
    chosen = {**os.environ, **(environment or {})}.get(CUDA_DEVICES)
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    try:
        return [index for (index,) in query_nvidia_smi("index")]
    except (OSError, subprocess.SubprocessError):
        return []


def gpu_memory_bytes(kind: str, options: Hardware) -> float | None:
    """Returns the memory of the machine's smallest GPU in bytes, or `hardware.memory_limit_mb` if it is set.

    Returns None if `kind` is not GPU, or if nvidia-smi fails or lists no GPU.
    """
    if kind != "GPU":
        return None
    if options.memory_limit_mb is not None:
        return options.memory_limit_mb * MIB
    try:
        sizes = [float(megabytes) for (megabytes,) in query_nvidia_smi("memory.total")]
        return min(sizes) * MIB
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def query_nvidia_smi(*fields: str) -> list[list[str]]:
    """Returns the values of these fields, without units, for each GPU; [] if nvidia-smi is not installed.

    Raises OSError if nvidia-smi fails, for example with a broken driver, and `subprocess.TimeoutExpired` after
    `QUERY_SECONDS`.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return []
    process = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    if process.returncode:
        lines = (process.stdout + process.stderr).strip().splitlines()
        raise OSError(f"nvidia-smi: {lines[0] if lines else f'exit status {process.returncode}'}")
    rows = []
    for line in process.stdout.splitlines():
        if line.strip():
            rows.append([cell.strip() for cell in line.split(",")])
    return rows
