"""Reads facts about this machine and its environment, without TensorFlow, Hydra or MLflow."""

import contextlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from scaleflow.cluster.engines import list_engines
from scaleflow.cluster.gpus import query_nvidia_smi
from scaleflow.cluster.tf_config import TF_CONFIG, parse_tf_config
from scaleflow.cluster.tpu import VARIABLES as TPU_VARIABLES
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.runs.provenance.machine import count_cores

PACKAGES = ("scaleflow", "tensorflow", "keras", "mlflow", "hydra-core", "numpy")

#: Environment variables about the start and the resources of this process, by who sets them.
VARIABLES: Mapping[str, Sequence[str]] = {
    **{name: engine.variables for name, engine in list_engines().items() if engine.variables},
    "tpu": (*TPU_VARIABLES, "TPU_CONFIG", "TPU_LIBRARY_PATH", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE"),
    "tensorflow": (
        "CUDA_VISIBLE_DEVICES",
        "TF_FORCE_GPU_ALLOW_GROWTH",
        "TF_GPU_ALLOCATOR",
        "TF_NUM_INTRAOP_THREADS",
        "TF_NUM_INTEROP_THREADS",
        "OMP_NUM_THREADS",
        "XLA_FLAGS",
        "KERAS_BACKEND",
    ),
}

#: Variables that exist on every machine -> the variable that must be set for them to be reported.
REPORTED_WITH = {"HOSTNAME": "KUBERNETES_SERVICE_HOST"}

#: In cgroup v1, "no limit" is the largest multiple of the page size, which is above this.
UNLIMITED = 1 << 60


def read_versions() -> dict[str, str | None]:
    """Returns the versions of Python and of `PACKAGES`; None for a package that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version(), **dict.fromkeys(PACKAGES)}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def describe_system() -> str:
    """Returns the kernel, its release, the architecture, and the distribution if it has a name."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    return f"{system}, {name}" if name else system


def describe_cpu(root: Path = Path("/")) -> dict[str, Any]:
    """Returns the CPU's cores, how many this process may use, and whether it computes bfloat16 natively."""
    allowed = count_cores()
    limit = cpu_limit(root)
    info = read_kernel_file(root / "proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", info, re.M)
    return {
        "model": model[1] if model else platform.processor() or None,
        "cores": os.cpu_count(),
        "allowed": allowed,
        "limit": limit,
        "usable": min(float(allowed), limit) if limit is not None else float(allowed),
        "bfloat16": bool(re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", info)),
    }


def describe_memory(root: Path = Path("/")) -> dict[str, int | None]:
    """Returns the host's memory and this process's limit, in MiB."""
    memory = psutil.virtual_memory()
    limit = memory_limit(root)
    return {
        "total_mb": memory.total >> 20,
        "available_mb": memory.available >> 20,
        "limit_mb": None if limit is None else limit >> 20,
    }


def cpu_limit(root: Path) -> float | None:
    """Returns the smallest CPU quota of the process's control groups, in cores, or None without a quota."""
    quotas = []
    for folder in control_groups(root, "cpu"):
        quota, _, period = read_kernel_file(folder / "cpu.max").partition(" ")
        quota = quota or read_kernel_file(folder / "cpu.cfs_quota_us")
        period = period or read_kernel_file(folder / "cpu.cfs_period_us")
        if quota.strip().isdigit() and period.strip().isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(root: Path) -> int | None:
    """Returns the smallest memory limit of the process's control groups, in bytes, or None without a limit."""
    limits = []
    for folder in control_groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read_kernel_file(folder / name).strip()
            if text.isdigit() and int(text) < UNLIMITED:
                limits.append(int(text))
    return min(limits, default=None)


def control_groups(root: Path, controller: str) -> list[Path]:
    """Returns the folders of the process's control group and its parents: cgroup v2 (one tree), v1 (one per
    controller).
    """
    base = root / "sys/fs/cgroup"
    folders = {base, base / controller}
    for line in read_kernel_file(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers or controller in controllers.split(","):
            top = base / controller if controllers else base
            group = top / path.strip("/")
            folders.add(group)
            folders.update(parent for parent in group.parents if parent.is_relative_to(base))
    return sorted(folders)


def read_kernel_file(path: Path) -> str:
    """Returns the text of a kernel file, "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def list_gpus() -> list[dict[str, Any]]:
    """Returns the GPUs that nvidia-smi lists, with memory in MiB. Raises the errors of `query_nvidia_smi`."""
    rows = query_nvidia_smi("index", "name", "memory.total", "memory.free", "driver_version")
    keys = ("index", "name", "memory_mb", "free_mb", "driver")
    gpus = []
    for row in rows:
        gpu: dict[str, Any] = {}
        for key, cell in zip(keys, row, strict=False):
            gpu[key] = int(cell) if cell.isdigit() else cell
        gpus.append(gpu)
    return gpus


def read_environment() -> dict[str, dict[str, str]]:
    """Returns the `VARIABLES` that are set, with secrets masked."""
    environment: dict[str, dict[str, str]] = {}
    for who, names in VARIABLES.items():
        environment[who] = {}
        for name in names:
            is_reported = REPORTED_WITH.get(name, name) in os.environ
            if name in os.environ and is_reported:
                environment[who][name] = mask_secrets(os.environ[name], name)
    return environment


def describe_tf_config() -> dict[str, Any] | None:
    """Returns TF_CONFIG as a run would read it, or None if it is not set. Raises ConfigError if it is invalid."""
    text = os.environ.get(TF_CONFIG)
    if not text:
        return None
    task_info = parse_tf_config(text)
    task = json.loads(text)["task"]
    return {"role": task["type"], "index": task["index"], "worker": task_info.worker, "peers": list(task_info.peers)}
