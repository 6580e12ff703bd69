"""Reads TF_CONFIG, the environment variable that gives a process its task and the addresses of all tasks.

    {"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}

https://www.tensorflow.org/guide/distributed_training#TF_CONFIG
"""

from __future__ import annotations

import errno
import itertools
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces import TaskInfo

TF_CONFIG = "TF_CONFIG"
#: The roles, in the order in which processes are numbered.
ROLES = ("chief", "worker", "ps")
#: A process that only evaluates. It is not numbered.
EVALUATOR = "evaluator"

#: Hosts for which gRPC ignores http_proxy. https://grpc.github.io/grpc/core/md_doc_environment_variables.html
NO_PROXY = "no_grpc_proxy"

#: Errors that mean that a machine can't be reached.
AWAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)

#: The patience of `keep_alive` is divided into this many intervals.
PROBES = 5

EXAMPLE_WITH_SERVERS = (
    '{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"], "ps": ["host2:2222"]}, '
    '"task": {"type": "chief", "index": 0}}'
)
EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


def parse_tf_config(text: str | None) -> TaskInfo:
    """Returns this process's task and the addresses of all processes.

    Processes are numbered in the order chief, workers, parameter servers (`ps`). Without a `chief`, worker 0 is the
    chief. An `evaluator` is not numbered.

    Raises:
        ConfigError: if TF_CONFIG is missing or invalid.
    """
    if not text:
        raise ConfigError(
            f"cluster=tf_config: the environment variable TF_CONFIG is not set; set it, for example to {EXAMPLE}"
        )
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"TF_CONFIG={text[:60]}: is not valid JSON ({error}); expected for example {EXAMPLE}"
        ) from None
    cluster, task = split_sections(config)
    peers = {role: parse_addresses(cluster, role) for role in ROLES}
    if not peers["chief"] + peers["worker"]:
        raise ConfigError(f"TF_CONFIG: cluster names no worker; expected for example {EXAMPLE}")
    if peers["ps"] and not (peers["chief"] and peers["worker"]):
        raise ConfigError("TF_CONFIG: cluster names ps, which also needs a chief and at least one worker")
    if len(peers["chief"]) > 1:
        raise ConfigError(f"TF_CONFIG: cluster.chief={format_value(peers['chief'])}: expected one address")
    addresses = tuple(itertools.chain(*peers.values()))
    if task.get("type") == EVALUATOR:
        return TaskInfo(0, addresses, len(peers["ps"]), "here")
    return TaskInfo(
        task_index(cluster, task), addresses, len(peers["ps"]), "elsewhere" if EVALUATOR in cluster else None
    )


def without_evaluator(text: str) -> str:
    """Returns TF_CONFIG without the evaluator, which is not a member of the cluster that TensorFlow trains on."""
    config = json.loads(text)
    config["cluster"].pop(EVALUATOR, None)
    return json.dumps(config)


def split_sections(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the sections `cluster` and `task`, after checking the roles."""
    sections = config if isinstance(config, dict) else {}
    cluster, task = sections.get("cluster"), sections.get("task")
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise ConfigError(f"TF_CONFIG: expected the keys `cluster` and `task`, for example {EXAMPLE}")
    for role in cluster:
        if role not in (*ROLES, EVALUATOR):
            raise ConfigError(f"TF_CONFIG: there is no role {role}; use one of {', '.join((*ROLES, EVALUATOR))}")
    if len(parse_addresses(cluster, EVALUATOR)) > 1:
        raise ConfigError(f"TF_CONFIG: cluster.evaluator={format_value(cluster[EVALUATOR])}: expected one address")
    if task.get("type") == EVALUATOR and EVALUATOR not in cluster:
        raise ConfigError(
            "TF_CONFIG: task.type=evaluator: the chief must know the evaluator; add its address to cluster.evaluator"
        )
    return cluster, task


def parse_addresses(cluster: dict[str, Any], role: str) -> list[str]:
    addresses = cluster.get(role, [])
    if not isinstance(addresses, list) or not all(isinstance(a, str) and is_address(a) for a in addresses):
        raise ConfigError(f"TF_CONFIG: cluster.{role}={format_value(addresses)}: expected a list of HOST:PORT")
    return addresses


def is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isdigit() and 0 < int(port) < 65536


def task_index(cluster: dict[str, Any], task: dict[str, Any]) -> int:
    """Returns this process's number among all processes."""
    role, index = task.get("type"), task.get("index")
    if role not in cluster:
        raise ConfigError(f"TF_CONFIG: task.type={format_value(role)}: the cluster has only {', '.join(cluster)}")
    count = len(cluster[role])
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise ConfigError(
            f"TF_CONFIG: task.index={format_value(index)}: expected 0 to {count - 1}, one of cluster.{role}"
        )
    return index + sum(len(cluster.get(before, [])) for before in ROLES[: ROLES.index(role)])


def port_is_free(address: str) -> bool:
    """Tells whether this machine can listen on the port of an address."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", int(address.rpartition(":")[2])))
        except OSError:
            return False
    return True


def is_listening(address: str) -> bool:
    """Tells whether something listens at an address; waits at most 2 s."""
    try:
        open_connection(address).close()
    except OSError:
        return False
    return True


def wait_until_closed(address: str, patience: float) -> bool:
    """Waits until the process at an address ends or becomes unreachable.

    A process that ends closes its connections. A machine that is off or cut off sends nothing, so TCP keepalive probes
    detect it.

    Args:
        address: HOST:PORT where a process listens.
        patience: seconds without an answer after which the machine counts as unreachable.

    Returns:
        True if the process ended, False if it became unreachable.
    """
    while True:
        try:
            with open_connection(address) as connection:
                keep_alive(connection, patience)
                while connection.recv(4096):
                    pass
        except OSError as error:
            return not (isinstance(error, TimeoutError) or error.errno in AWAY)
        if not is_listening(address):  # a server also closes idle connections
            return True


def open_connection(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=2)


def keep_alive(connection: socket.socket, patience: float) -> None:
    """Enables TCP keepalive: reading fails after `patience` seconds without an answer from the other end."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = max(1, int(patience / PROBES))
    for name, value in (("TCP_KEEPIDLE", interval), ("TCP_KEEPINTVL", interval), ("TCP_KEEPCNT", PROBES - 1)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def no_proxy_for(environment: Mapping[str, str], peers: Sequence[str]) -> str:
    """Returns a value of `no_grpc_proxy` with which gRPC connects to peers directly, whatever http_proxy says."""
    previous = environment.get(NO_PROXY) or environment.get("no_proxy") or ""
    hosts = dict.fromkeys(peer.rpartition(":")[0] for peer in peers)
    return ",".join([*filter(None, [previous]), *hosts])


def format_value(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
