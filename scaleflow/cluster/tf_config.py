"""TF_CONFIG, the environment variable that tells a process which of several workers it is.

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
#: One that only evaluates, beside them.
EVALUATOR = "evaluator"

#: For which hosts gRPC does not heed http_proxy. https://grpc.github.io/grpc/core/md_doc_environment_variables.html
NO_PROXY = "no_grpc_proxy"

#: What is said of a machine from which nothing is heard.
AWAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)

#: So many times a silent machine is asked whether it is there.
PROBES = 5

EXAMPLE_WITH_SERVERS = (
    '{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"], "ps": ["host2:2222"]}, '
    '"task": {"type": "chief", "index": 0}}'
)
EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


def parse_tf_config(text: str | None) -> TaskInfo:
    """Which process this is, and where all of them are.

    A `chief` is number 0, and the workers are counted behind it, then the parameter servers (`ps`);
    without one, worker 0 is the chief. An `evaluator` is not counted.

    Raises:
        ConfigError: if it is missing or says something that makes no sense.
    """
    if not text:
        raise ConfigError(f"cluster=tf_config: the environment variable TF_CONFIG is not set; it reads like {EXAMPLE}")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"TF_CONFIG={text[:60]}: is no JSON ({error}); it reads like {EXAMPLE}") from None
    cluster, task = split_sections(config)
    peers = {role: parse_addresses(cluster, role) for role in ROLES}
    if not peers["chief"] + peers["worker"]:
        raise ConfigError(f"TF_CONFIG: cluster names no worker; it reads like {EXAMPLE}")
    if peers["ps"] and not (peers["chief"] and peers["worker"]):
        raise ConfigError("TF_CONFIG: cluster names ps, which takes a chief and at least one worker beside them")
    if len(peers["chief"]) > 1:
        raise ConfigError(f"TF_CONFIG: cluster.chief={format_value(peers['chief'])}: expected one")
    everybody = tuple(itertools.chain(*peers.values()))
    if task.get("type") == EVALUATOR:
        return TaskInfo(0, everybody, len(peers["ps"]), "here")
    return TaskInfo(
        task_index(cluster, task), everybody, len(peers["ps"]), "elsewhere" if EVALUATOR in cluster else None
    )


def without_evaluator(text: str) -> str:
    """TF_CONFIG as TensorFlow is to read it in a process that trains: the evaluator is no member of its cluster."""
    config = json.loads(text)
    config["cluster"].pop(EVALUATOR, None)
    return json.dumps(config)


def split_sections(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """`cluster` and `task`."""
    found = config if isinstance(config, dict) else {}
    cluster, task = found.get("cluster"), found.get("task")
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise ConfigError(f"TF_CONFIG: expected `cluster` and `task`; it reads like {EXAMPLE}")
    for role in cluster:
        if role not in (*ROLES, EVALUATOR):
            raise ConfigError(f"TF_CONFIG: there is no role {role}; there is {', '.join((*ROLES, EVALUATOR))}")
    if len(parse_addresses(cluster, EVALUATOR)) > 1:
        raise ConfigError(f"TF_CONFIG: cluster.evaluator={format_value(cluster[EVALUATOR])}: expected one")
    if task.get("type") == EVALUATOR and EVALUATOR not in cluster:
        raise ConfigError(
            "TF_CONFIG: task.type=evaluator: the chief has to know of it; name its address in cluster.evaluator"
        )
    return cluster, task


def parse_addresses(cluster: dict[str, Any], role: str) -> list[str]:
    found = cluster.get(role, [])
    if not isinstance(found, list) or not all(isinstance(a, str) and is_address(a) for a in found):
        raise ConfigError(f"TF_CONFIG: cluster.{role}={format_value(found)}: expected a list of HOST:PORT")
    return found


def is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isdigit() and 0 < int(port) < 65536


def task_index(cluster: dict[str, Any], task: dict[str, Any]) -> int:
    """This process's number among all."""
    role, index = task.get("type"), task.get("index")
    if role not in cluster:
        raise ConfigError(f"TF_CONFIG: task.type={format_value(role)}: the cluster has {', '.join(cluster)}")
    count = len(cluster[role])
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise ConfigError(
            f"TF_CONFIG: task.index={format_value(index)}: expected 0 to {count - 1}, one of cluster.{role}"
        )
    return index + sum(len(cluster.get(before, [])) for before in ROLES[: ROLES.index(role)])


def port_is_free(address: str) -> bool:
    """Whether this machine can listen on an address's port."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", int(address.rpartition(":")[2])))
        except OSError:
            return False
    return True


def is_listening(address: str) -> bool:
    """Whether something listens at an address."""
    try:
        open_connection(address).close()
    except OSError:
        return False
    return True


def wait_until_closed(address: str, patience: float) -> bool:
    """Waits as long as something listens at an address.

    The end of a process closes its connections; of a machine that is away, or cut off, nothing is heard.

    Args:
        address: that answers.
        patience: for so many seconds nothing may be heard.

    Returns:
        Whether the process there has ended, rather than become unreachable.
    """
    while True:
        try:
            with open_connection(address) as connection:
                keep_alive(connection, patience)
                while connection.recv(4096):
                    pass
        except OSError as error:
            return not (isinstance(error, TimeoutError) or error.errno in AWAY)
        if not is_listening(address):  # a server also closes a connection over which nothing is asked
            return True


def open_connection(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=2)


def keep_alive(connection: socket.socket, patience: float) -> None:
    """Has the system ask the other end whether it is there, and reading fail when it has not said so."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, int(patience / PROBES))
    for name, value in (("TCP_KEEPIDLE", pause), ("TCP_KEEPINTVL", pause), ("TCP_KEEPCNT", PROBES - 1)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def no_proxy_for(environment: Mapping[str, str], peers: Sequence[str]) -> str:
    """`no_grpc_proxy` for the processes of a cluster: what goes to peers goes to them, whatever http_proxy says."""
    kept = environment.get(NO_PROXY) or environment.get("no_proxy") or ""
    hosts = dict.fromkeys(peer.rpartition(":")[0] for peer in peers)
    return ",".join([*filter(None, [kept]), *hosts])


def format_value(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
