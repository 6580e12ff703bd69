"""Assigns roles to numbered processes and writes their TF_CONFIG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from scaleflow.cluster.network import free_ports
from scaleflow.cluster.tf_config import TF_CONFIG
from scaleflow.errors import ConfigError


def environments(roles: Mapping[str, int]) -> list[Mapping[str, str]]:
    """Returns the environment variables of each process on this machine: TF_CONFIG, unless there is only one."""
    count = sum(roles.values())
    if count == 1:
        return [{}]
    peers = [f"127.0.0.1:{port}" for port in free_ports(count)]
    return [{TF_CONFIG: text} for text in make_tf_configs(roles, peers)]


def make_tf_configs(roles: Mapping[str, int], peers: Sequence[str]) -> list[str]:
    """Returns the TF_CONFIG of each process.

    `roles` has the number of processes in each TF_CONFIG role, in the order in which they are numbered; `peers` has the
    HOST:PORT of each process.
    """
    addresses = iter(peers)
    cluster = {role: [next(addresses) for _ in range(count)] for role, count in roles.items()}
    tasks = [{"type": role, "index": index} for role, count in roles.items() for index in range(count)]
    return [json.dumps({"cluster": cluster, "task": task}) for task in tasks]


def make_tf_config(task: int, peers: Sequence[str], servers: int) -> str:
    """Returns the TF_CONFIG of one task; `peers` has the HOST:PORT of each.

    The last `servers` tasks are parameter servers, and the first task is their coordinator. With 0 all tasks are
    synchronous workers.
    """
    count = len(peers)
    roles = {"chief": 1, "worker": count - servers - 1, "ps": servers} if servers else {"worker": count}
    return make_tf_configs(roles, peers)[task]


def check_enough(variable: str, count: int, servers: int, instead: str) -> None:
    """Checks that there are enough tasks for a coordinator, the servers and at least one worker.

    Args:
        variable: the variable that gives the number of tasks, for the message.
        count: number of tasks.
        servers: number of parameter servers; 0 means that there is no coordinator, and any count is valid.
        instead: advice for the message; `{least}` stands for the smallest valid number of tasks.
    """
    least = servers + 2
    if servers and count < least:
        raise ConfigError(
            f"{variable}={count}: strategy=parameter_server with cluster.servers={servers} also needs a coordinator "
            f"and a worker; {instead.format(least=least)}"
        )


#: Shell test: the folder `$run` holds a run that can be resumed.
HAS_RUN = """grep -qs '"event": "ready"' "$run/events.jsonl\""""
