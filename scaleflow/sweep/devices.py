"""How jobs that run at the same time share a machine: each has its threads, or its GPUs, by its environment."""

from __future__ import annotations

import os

from scaleflow.cluster import GPUS, share, visible_gpus
from scaleflow.launcher.worker_process import THREADS


def make_environments(count: int) -> list[dict[str, str]]:
    """What is added to the environment of each of `count` jobs at a time; nothing where there is one."""
    if count == 1:
        return [{}]
    gpus = visible_gpus()
    threads = max(1, count_cores() // count)
    return [
        {**dict.fromkeys(THREADS, str(threads)), **({GPUS: ",".join(share(gpus, slot, count))} if gpus else {})}
        for slot in range(count)
    ]


def count_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
