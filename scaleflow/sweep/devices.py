"""How jobs that run at the same time share a machine: each has its threads, or its GPUs, by its environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from scaleflow.launcher.process import THREADS

GPUS = "CUDA_VISIBLE_DEVICES"
ASK_SECONDS = 10.0


def portions(count: int) -> list[dict[str, str]]:
    """What is added to the environment of each of `count` jobs at a time; nothing where there is one."""
    if count == 1:
        return [{}]
    gpus = visible_gpus()
    threads = max(1, cores() // count)
    return [
        {**dict.fromkeys(THREADS, str(threads)), **({GPUS: ",".join(share(gpus, slot, count))} if gpus else {})}
        for slot in range(count)
    ]


def share(gpus: Sequence[str], slot: int, count: int) -> Sequence[str]:
    """The GPUs of one of `count` jobs: as many as the others', or one with others where there are fewer than jobs."""
    if len(gpus) < count:
        return [gpus[slot % len(gpus)]]
    each = len(gpus) // count
    return gpus[slot * each : (slot + 1) * each]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """NVIDIA's GPUs as CUDA_VISIBLE_DEVICES names them; asked of the driver's own program, without TensorFlow."""
    if (chosen := os.environ.get(GPUS)) is not None:
        return [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return told.stdout.split()
