"""Counts and names the processes of a plan, and finds which of them answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from scaleflow.cluster.network import is_listening
from scaleflow.cluster.tasks import count_servers
from scaleflow.interfaces import Plan

#: How many processes are probed at the same time. Each probe takes a thread and a connection.
MAX_PROBES = 256


def count_processes(plan: Plan) -> Mapping[str, int]:
    """Returns the number of processes in each TF_CONFIG role, on all machines, in the order in which they are numbered.

    An evaluator is not counted.
    """
    if not plan.strategy.has_several_processes:
        return {"worker": 1}
    task = plan.task
    if plan.strategy.has_coordinator:
        if task:
            return {"chief": 1, "worker": len(task.peers) - 1 - task.servers, "ps": task.servers}
        return {"chief": 1, "worker": plan.cluster.workers or 2, "ps": count_servers(plan)}
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
    return count_workers(plan) if plan.strategy.is_synchronous else 1
