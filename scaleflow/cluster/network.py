"""Checks ports and connections: whether a process answers, and when it has ended. An address is HOST:PORT."""

import contextlib
import errno
import socket
from collections.abc import Mapping, Sequence

#: The variable with the hosts that gRPC reaches without http_proxy.
#: https://grpc.github.io/grpc/core/md_doc_environment_variables.html
NO_PROXY = "no_grpc_proxy"

#: Errors of a machine that cannot be reached.
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)

#: The patience of `keep_alive` is divided into this many intervals.
KEEPALIVE_PROBES = 5

PROBE_SECONDS = 3.0


def is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isdigit() and 0 < int(port) < 65536


def free_ports(count: int) -> Sequence[int]:
    """Returns loopback ports that are free now. Another process can still take one before the worker binds it."""
    ports = []
    with contextlib.ExitStack() as until_all_are_bound:  # so that all ports differ
        for _ in range(count):
            sock = until_all_are_bound.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            ports.append(sock.getsockname()[1])
    return ports


def port_is_free(address: str) -> bool:
    """Returns whether this machine can listen on the port of an address."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", int(address.rpartition(":")[2])))
        except OSError:
            return False
    return True


def is_listening(address: str) -> bool:
    """Returns whether a process listens at an address. Waits at most 2 s."""
    try:
        open_connection(address).close()
    except OSError:
        return False
    return True


def wait_until_closed(address: str, patience: float) -> bool:
    """Waits until the process that listens at an address ends or becomes unreachable. Returns whether it ended.

    A process that ends closes its connections. A machine that is off or disconnected sends nothing. TCP keepalive
    probes detect this: after `patience` seconds without an answer the process counts as unreachable.
    """
    while True:
        try:
            with open_connection(address) as connection:
                keep_alive(connection, patience)
                while connection.recv(4096):
                    pass
        except OSError as error:
            return not (isinstance(error, TimeoutError) or error.errno in UNREACHABLE)
        if not is_listening(address):  # a server also closes idle connections
            return True


def open_connection(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=2)


def keep_alive(connection: socket.socket, patience: float) -> None:
    """Enables TCP keepalive: reading fails after `patience` seconds without an answer from the other end."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = max(1, int(patience / KEEPALIVE_PROBES))
    options = {"TCP_KEEPIDLE": interval, "TCP_KEEPINTVL": interval, "TCP_KEEPCNT": KEEPALIVE_PROBES - 1}
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def no_proxy_for(environment: Mapping[str, str], peers: Sequence[str]) -> str:
    """Returns a value of `no_grpc_proxy` that makes gRPC connect to the peers directly, without http_proxy."""
    previous = environment.get(NO_PROXY) or environment.get("no_proxy") or ""
    hosts = dict.fromkeys(peer.rpartition(":")[0] for peer in peers)
    names = list(hosts)
    if previous:
        names.insert(0, previous)
    return ",".join(names)


def explain_no_answer(address: str, default_port: int) -> str | None:
    """Tries to connect to HOST or HOST:PORT. Returns the reason if that fails, or None if a process listens there."""
    host, _, port = address.partition(":")
    try:
        number = int(port) if port.isdigit() else default_port
        socket.create_connection((host, number), timeout=PROBE_SECONDS).close()
    except (OSError, OverflowError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return None
