"""Makes the TF_CONFIG of several processes on this machine, which use loopback addresses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence

from scaleflow.cluster.tasks import make_tf_configs
from scaleflow.cluster.tf_config import TF_CONFIG


def environments(roles: Mapping[str, int]) -> list[Mapping[str, str]]:
    """Returns each process's environment variables: TF_CONFIG, or none for a single process; see `make_tf_configs`."""
    count = sum(roles.values())
    if count == 1:
        return [{}]
    peers = [f"127.0.0.1:{port}" for port in free_ports(count)]
    return [{TF_CONFIG: text} for text in make_tf_configs(roles, peers)]


def free_ports(count: int) -> Sequence[int]:
    """Returns loopback ports that are free now. Another process can still take one before the worker binds it."""
    with contextlib.ExitStack() as until_all_are_bound:  # so that they differ
        sockets = [until_all_are_bound.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
