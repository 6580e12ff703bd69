"""Which processes a plan has, and which of them this machine is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from scaleflow.cluster import kubernetes, slurm
from scaleflow.cluster.tf_config import TF_CONFIG, is_listening, parse_tf_config
from scaleflow.interfaces import Plan, TaskInfo

#: Of the options those whose processes this command starts itself, wherever they are.
STARTED_HERE = ("local", "ray")


def find_task(plan: Plan) -> TaskInfo | None:
    """This machine's place in a cluster of several machines, or None where all workers are on this one."""
    is_elsewhere = plan.cluster.name not in STARTED_HERE and plan.cluster.submit is None
    return parse_tf_config(read_tf_config(plan)) if is_elsewhere else None


def read_tf_config(plan: Plan) -> str | None:
    """The TF_CONFIG of this process: what is set, or what follows from its task of Slurm's, or its pod.

    Raises:
        ConfigError: if there is no such task, or this is no such pod.
    """
    servers = (plan.cluster.servers or 1) if plan.strategy.name == "parameter_server" else 0
    if plan.cluster.name == "slurm":
        return slurm.tf_config(os.environ, servers)
    if plan.cluster.name == "kubernetes":
        return kubernetes.tf_config(os.environ, servers, plan.cluster.port)
    return os.environ.get(TF_CONFIG)


def count_processes(plan: Plan) -> Mapping[str, int]:
    """How many processes the plan has in each of TF_CONFIG's roles, on all machines, as they are numbered."""
    if plan.strategy.name not in ("multi_worker", "parameter_server"):
        return {"worker": 1}
    task = find_task(plan)
    if plan.strategy.name == "parameter_server":
        if task:
            return {"chief": 1, "worker": len(task.peers) - 1 - task.servers, "ps": task.servers}
        return {"chief": 1, "worker": plan.cluster.workers or 2, "ps": plan.cluster.servers or 1}
    return {"worker": len(task.peers) if task else plan.cluster.workers or 2}


def process_names(plan: Plan) -> list[str]:
    """What users know the processes by, as they are numbered."""
    words = {"chief": "coordinator", "worker": "worker", "ps": "server"}
    return [
        words[role] if role == "chief" else f"{words[role]} {index}"
        for role, count in count_processes(plan).items()
        for index in range(count)
    ]


def find_unreachable(plan: Plan, peers: Sequence[str]) -> str:
    """The processes at whose addresses nothing answers, by their names; empty where all do."""
    with ThreadPoolExecutor(len(peers)) as threads:  # each takes seconds where a machine is away
        found = zip(process_names(plan), peers, threads.map(is_listening, peers), strict=True)
    return ", ".join(f"{name} ({peer})" for name, peer, has_answered in found if not has_answered)


def count_workers(plan: Plan) -> int:
    """How many processes train, on all machines."""
    return count_processes(plan)["worker"]


def count_synchronous_workers(plan: Plan) -> int:
    """How many processes take each step together."""
    return count_workers(plan) if plan.strategy.name == "multi_worker" else 1
