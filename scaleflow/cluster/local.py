"""Several processes on this machine: addresses on loopback, written into TF_CONFIG."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from scaleflow.cluster.tasks import make_tf_configs
from scaleflow.cluster.tf_config import TF_CONFIG


def environments(roles: Mapping[str, int]) -> list[Mapping[str, str]]:
    """For each of several processes the TF_CONFIG that tells it of the others; for a single one nothing.

    Args:
        roles: how many processes have each of TF_CONFIG's roles, in the order in which they are numbered.
    """
    count = sum(roles.values())
    if count == 1:
        return [{}]
    peers = [f"127.0.0.1:{port}" for port in free_ports(count)]
    return [{TF_CONFIG: text} for text in make_tf_configs(roles, peers)]


def free_ports(count: int) -> Sequence[int]:
    """Ports on loopback that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()
