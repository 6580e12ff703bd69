"""Divides the CPU cores and GPUs of a machine among jobs that run at the same time, with environment variables."""

from __future__ import annotations

import os

from scaleflow.cluster.gpus import CUDA_DEVICES, GROWTH, share, visible_gpus
from scaleflow.launcher.processes.worker_process import THREADS_ENV


def make_environments(count: int) -> list[dict[str, str]]:
    """Returns the variables to add to the environment of each of `count` concurrent jobs; none for a single job."""
    if count == 1:
        return [{}]
    gpus = visible_gpus()
    threads = dict.fromkeys(THREADS_ENV, str(max(1, count_cores() // count)))
    if not gpus:
        return [threads] * count
    # Without growth the first of the jobs that share a GPU would take all of its memory.
    growth = {GROWTH: "true"} if len(gpus) < count else {}
    return [{**threads, **growth, CUDA_DEVICES: ",".join(share(gpus, n, count))} for n in range(count)]


def count_cores() -> int:
    """Counts the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
