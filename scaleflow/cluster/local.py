"""Several workers on this machine: addresses on loopback, written into TF_CONFIG."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence

from scaleflow.cluster.tf_config import TF_CONFIG


def environments(count: int) -> list[Mapping[str, str]]:
    """For each of several workers the TF_CONFIG that tells it of the others; for a single one nothing."""
    if count == 1:
        return [{}]
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    tasks = [{"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}} for i in range(count)]
    return [{TF_CONFIG: json.dumps(task)} for task in tasks]


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
