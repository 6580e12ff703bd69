"""Processes that an engine numbers, one to each task: which role each has, as TF_CONFIG that tells one of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from scaleflow.errors import ConfigError


def make_tf_configs(roles: Mapping[str, int], peers: Sequence[str]) -> list[str]:
    """The TF_CONFIG of each process.

    Args:
        roles: how many processes have each of TF_CONFIG's roles, in the order in which they are numbered.
        peers: HOST:PORT of each.
    """
    addresses = iter(peers)
    cluster = {role: [next(addresses) for _ in range(count)] for role, count in roles.items()}
    tasks = [{"type": role, "index": index} for role, count in roles.items() for index in range(count)]
    return [json.dumps({"cluster": cluster, "task": task}) for task in tasks]


def make_tf_config(own: int, peers: Sequence[str], servers: int) -> str:
    """The TF_CONFIG of one task.

    Args:
        own: its number.
        peers: HOST:PORT of each.
        servers: see `assign_roles`.
    """
    return make_tf_configs(Counter(assign_roles(len(peers), servers)), peers)[own]


def assign_roles(count: int, servers: int) -> Sequence[str]:
    """The role of each task, by TensorFlow's names.

    Args:
        count: how many there are.
        servers: so many parameter servers are the last ones, and the first is the coordinator; with 0 all are workers
            that go in step.
    """
    if not servers:
        return ["worker"] * count
    return ["chief", *["worker"] * (count - servers - 1), *["ps"] * servers]


def check_enough(told: str, count: int, servers: int, instead: str) -> None:
    """Refuses tasks that are too few for a coordinator and a worker beside the servers.

    Args:
        told: the variable that says how many there are.
        count: how many.
        servers: how many of them are servers; 0 where there is no coordinator.
        instead: what would work, with `{least}` for the least number of tasks.

    Raises:
        ConfigError: if they are.
    """
    least = servers + 2
    if servers and count < least:
        raise ConfigError(
            f"{told}={count}: strategy=parameter_server with cluster.servers={servers} takes a coordinator and a "
            f"worker beside them; {instead.format(least=least)}"
        )


#: Whether the folder `$run` holds a run that a shell script goes on with, instead of beginning one.
HAS_RUN = """grep -qs '"event": "ready"' "$run/events.jsonl\""""
