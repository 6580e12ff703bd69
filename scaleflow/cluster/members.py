"""Counts and names the processes of a plan, and finds which of them this machine runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from scaleflow.cluster import kubernetes, slurm
from scaleflow.cluster.network import is_listening
from scaleflow.cluster.tf_config import TF_CONFIG
from scaleflow.interfaces import Plan

#: Options of `cluster` for which this command itself starts all processes, here or on other machines.
STARTED_HERE = ("local", "ray")

#: How many processes are probed at the same time. Each probe takes a thread and a connection.
MAX_PROBES = 256


def read_tf_config(plan: Plan, environment: Mapping[str, str]) -> str | None:
    """Returns this process's TF_CONFIG: the environment variable, or one derived from its Slurm task or its pod.

    Raises ConfigError if this is not a Slurm task or a pod of an Indexed Job, although `cluster` says so.
    """
    servers = (plan.cluster.servers or 1) if plan.strategy.name == "parameter_server" else 0
    if plan.cluster.name == "slurm":
        return slurm.tf_config(environment, servers)
    if plan.cluster.name == "kubernetes":
        return kubernetes.tf_config(environment, servers, plan.cluster.port)
    return environment.get(TF_CONFIG)


def count_processes(plan: Plan) -> Mapping[str, int]:
    """Returns the number of processes in each TF_CONFIG role, on all machines, in the order in which they are numbered.

    An evaluator is not counted.
    """
    if plan.strategy.name not in ("multi_worker", "parameter_server"):
        return {"worker": 1}
    task = plan.task
    if plan.strategy.name == "parameter_server":
        if task:
            return {"chief": 1, "worker": len(task.peers) - 1 - task.servers, "ps": task.servers}
        return {"chief": 1, "worker": plan.cluster.workers or 2, "ps": plan.cluster.servers or 1}
    return {"worker": len(task.peers) if task else plan.cluster.workers or 2}


def process_names(plan: Plan) -> list[str]:
    """Returns the names that messages use for the processes, in the order in which they are numbered."""
    return [make_name(role, index) for role, count in count_processes(plan).items() for index in range(count)]


def process_name(plan: Plan, number: int) -> str:
    """Returns the name of one process, without making those of all."""
    for role, count in count_processes(plan).items():
        if number < count:
            return make_name(role, number)
        number -= count
    raise IndexError(f"the plan has no such process: {number} after the last")


def make_name(role: str, index: int) -> str:
    """Returns the name of a process by its TF_CONFIG role, and its number among those of this role."""
    return "coordinator" if role == "chief" else f"{'server' if role == 'ps' else role} {index}"


def find_unreachable(plan: Plan, peers: Sequence[str]) -> str:
    """Returns the names and addresses of the processes that do not answer, as text; empty if all answer."""
    with ThreadPoolExecutor(min(len(peers), MAX_PROBES)) as threads:  # one to an unreachable machine takes seconds
        probes = zip(process_names(plan), peers, threads.map(is_listening, peers), strict=True)
    return ", ".join(f"{name} ({peer})" for name, peer, has_answered in probes if not has_answered)


def count_workers(plan: Plan) -> int:
    """Returns the number of processes that train, on all machines."""
    return count_processes(plan)["worker"]


def count_synchronous_workers(plan: Plan) -> int:
    """Returns the number of processes that take each step together."""
    return count_workers(plan) if plan.strategy.name == "multi_worker" else 1
