"""What this machine is and what its environment says, told without TensorFlow, Hydra or MLflow."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scaleflow.cluster import TF_CONFIG, parse_tf_config
from scaleflow.cluster.tpu import VARIABLES as TPU_VARIABLES
from scaleflow.secret_masking import mask_secrets

PACKAGES = ("scaleflow", "tensorflow", "keras", "mlflow", "hydra-core", "numpy")

#: The variables that say who started this process and what it may use, by who sets them.
VARIABLES: Mapping[str, tuple[str, ...]] = {
    "slurm": (
        *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_PROCID"),
        *("SLURM_LOCALID", "SLURM_NODEID", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_MEM_PER_NODE"),
    ),
    "kubernetes": ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "HOSTNAME", "JOB_COMPLETION_INDEX"),
    "tpu": (*TPU_VARIABLES, "TPU_CONFIG", "TPU_LIBRARY_PATH", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE"),
    "tensorflow": (
        *("CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH", "TF_GPU_ALLOCATOR", "TF_NUM_INTRAOP_THREADS"),
        *("TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS", "XLA_FLAGS", "KERAS_BACKEND"),
    ),
}

#: Set on every machine, and so telling only beside what they belong to.
BESIDE = {"HOSTNAME": "KUBERNETES_SERVICE_HOST"}

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,name,memory.total,memory.free,driver_version")
NVIDIA_SECONDS = 10

#: A limit in old cgroups of which there is none: the largest count of whole pages.
UNLIMITED = 1 << 60


def read_versions() -> dict[str, str | None]:
    """Python's, and those of the packages that matter; null where one is not installed."""
    return {"python": platform.python_version(), **{name: read_version(name) for name in PACKAGES}}


def read_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_system() -> str:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    return f"{platform.system()} {platform.release()} {platform.machine()}" + (f", {name}" if name else "")


# ---------------------------------------------------------------------------------------------
# Cores and memory
# ---------------------------------------------------------------------------------------------


def describe_cpu(root: Path = Path("/")) -> dict[str, Any]:
    """The cores that there are and those that this process may use, and its way to bfloat16."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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
    """The host's memory and its limit for this process, in MiB."""
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read_kernel_file(root / "proc/meminfo"), re.M))
    limit = memory_limit(root)

    def mib(key: str) -> int | None:
        return int(info[key]) // 1024 if key in info else None

    return {
        "total_mb": mib("MemTotal"),
        "available_mb": mib("MemAvailable"),
        "limit_mb": None if limit is None else limit >> 20,
    }


def cpu_limit(root: Path) -> float | None:
    """The cores' worth of time that control groups leave, the smallest on the way up; None where they don't limit."""
    found = []
    for folder in control_groups(root, "cpu"):
        quota, _, period = read_kernel_file(folder / "cpu.max").partition(" ")
        quota = quota or read_kernel_file(folder / "cpu.cfs_quota_us")
        period = period or read_kernel_file(folder / "cpu.cfs_period_us")
        if quota.strip().isdigit() and period.strip().isdigit():
            found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_limit(root: Path) -> int | None:
    """The bytes that control groups leave; None where they don't limit."""
    texts = [
        read_kernel_file(folder / name).strip()
        for folder in control_groups(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    return min((int(text) for text in texts if text.isdigit() and int(text) < UNLIMITED), default=None)


def control_groups(root: Path, controller: str) -> list[Path]:
    """The folders of this process's control group and of those it is in, new (one tree) and old (one each)."""
    base = root / "sys/fs/cgroup"
    found = {base, base / controller}
    for line in read_kernel_file(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers or controller in controllers.split(","):
            top = base / controller if controllers else base
            own = top / path.strip("/")
            found |= {own, *(parent for parent in own.parents if parent.is_relative_to(base))}
    return sorted(found)


def read_kernel_file(path: Path) -> str:
    """A file of the kernel's, empty where there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def query_nvidia(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> list[dict[str, Any]]:
    """The GPUs as NVIDIA's driver tells of them; TensorFlow does not say how much memory one has.

    Raises:
        OSError: where its tool fails, which it does where the driver is broken.
    """
    if shutil.which(NVIDIA_SMI[0]) is None:
        return []
    words = [*NVIDIA_SMI, "--format=csv,noheader,nounits"]
    done = run(words, capture_output=True, text=True, timeout=NVIDIA_SECONDS, check=False)
    if done.returncode:
        raise OSError(f"nvidia-smi: {(done.stdout + done.stderr).strip().splitlines()[0]}")
    keys = ("index", "name", "memory_mb", "free_mb", "driver")
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [{key: int(cell) if cell.isdigit() else cell for key, cell in zip(keys, row, strict=False)} for row in rows]


# ---------------------------------------------------------------------------------------------
# The environment
# ---------------------------------------------------------------------------------------------


def read_variables() -> dict[str, dict[str, str]]:
    """What is set of the variables that matter, secrets masked."""
    return {
        who: {name: mask_secrets(os.environ[name], name) for name in names if is_telling(name)}
        for who, names in VARIABLES.items()
    }


def is_telling(name: str) -> bool:
    return name in os.environ and BESIDE.get(name, name) in os.environ


def describe_tf_config() -> dict[str, Any] | None:
    """TF_CONFIG as a run would read it; None where it is not set.

    Raises:
        ConfigError: what is wrong with it.
    """
    text = os.environ.get(TF_CONFIG)
    if not text:
        return None
    place = parse_tf_config(text)
    task = json.loads(text)["task"]
    return {"role": task["type"], "index": task["index"], "worker": place.worker, "peers": list(place.peers)}
