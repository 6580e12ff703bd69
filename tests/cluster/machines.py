"""A Ray cluster of this machine, or of hosts: a head and other nodes, each with processes and an address of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from scaleflow.cluster.network import free_ports
from scaleflow.launcher.processes.handover import SERVER_ENV
from tests.cluster.engine import until
from tests.cluster.hosts import Host

#: The process of each node, and the one that a head has beside it.
RAYLET, HEAD = "raylet", "gcs_server"


class Machines:
    """A cluster whose head has one core.

    Args:
        folder: takes what the nodes say.
        environment: of the nodes, and so of what they start.
        places: the hosts of the nodes, the head's first; none: all nodes are on this machine.

    Attributes:
        address: the cluster's.
        token: what a command says to it.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], places: Sequence[Host] = ()) -> None:
        self._folder = folder
        self._places = {place.address: place for place in places}
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._environment = {**environment, **self.token, "RAY_USAGE_STATS_ENABLED": "0"}
        self._nodes: list[subprocess.Popen[Any]] = []
        # Ray's sockets are below it, and the path of a socket must be short.
        self._session = tempfile.mkdtemp(prefix="ray", dir="/tmp")
        (port,) = free_ports(1)
        # Not 127.0.0.1, which Ray takes for "whatever address there is".
        self._first = next(iter(self._places), "127.0.0.2")
        self.address = f"{self._first}:{port}"
        head = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._session}")
        self.head = self.start(*head, cores=1)

    def start(
        self, *words: str, cores: int, host: str = "", before: str = "", **environment: str
    ) -> subprocess.Popen[Any]:
        """Starts a node, and waits until the others know of it.

        Args:
            words: of `ray start`.
            cores: that it has to give away.
            host: its address; the head's if it is empty.
            before: what a shell does before it, in namespaces of the node's own.
            environment: of the node, beside the cluster's; an empty value takes one away.
        """
        host = host or self._first
        place = self._places.get(host)
        own = {SERVER_ENV: place.server} if place else {}
        found = {**self._environment, **own, **environment}
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", "--block", f"--node-ip-address={host}", f"--num-cpus={cores}", *words]
        command += ["--object-store-memory=80000000"]
        if before:
            command = ["unshare", "--mount", "sh", "-ec", f'{before}\nexec "$@"', "sh", *command]
        with (self._folder / f"node-{len(self._nodes)}.log").open("wb") as out:
            theirs = {key: value for key, value in found.items() if value}
            node: subprocess.Popen[Any]
            if place:
                node = place.start(command, self._folder, theirs, stdout=out.fileno(), stderr=out.fileno())
            else:
                node = subprocess.Popen(
                    command, env=theirs, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self._folder
                )
        self._nodes.append(node)
        log = self._folder / f"node-{len(self._nodes) - 1}.log"
        until(lambda: node.poll() is not None or "Ray runtime started" in log.read_text(), "Ray does not start")
        assert node.poll() is None, log.read_text()
        return node

    def join(self, cores: int, host: str, before: str = "", **environment: str) -> subprocess.Popen[Any]:
        """Adds a node."""
        return self.start(f"--address={self.address}", cores=cores, host=host, before=before, **environment)

    def lose(self, node: subprocess.Popen[Any], name: str = RAYLET) -> None:
        """Ends a node's own process, or the one that makes it the head, as a fault of its machine would."""
        (found,) = self._find(node, name)
        os.kill(found.pid, signal.SIGKILL)

    @property
    def has_head(self) -> bool:
        return self.is_alive(self.head) and self.is_alive(self.head, HEAD)

    def is_alive(self, node: subprocess.Popen[Any], name: str = RAYLET) -> bool:
        """Whether a node, or what makes it the head, has not been lost."""
        return node.poll() is None and any(p.status() != psutil.STATUS_ZOMBIE for p in self._find(node, name))

    def _find(self, node: subprocess.Popen[Any], name: str) -> list[psutil.Process]:
        return [p for p in psutil.Process(node.pid).children(recursive=True) if p.name() == name]

    def end(self) -> None:
        for node in reversed(self._nodes):
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(node.pid).children(recursive=True)
                node.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    node.wait(10)
                for process in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            node.kill()
            node.wait()
        shutil.rmtree(self._session, ignore_errors=True)


@contextlib.contextmanager
def machines(folder: Path, environment: Mapping[str, str], places: Sequence[Host] = ()) -> Iterator[Machines]:
    """A cluster as long as the block lasts."""
    made = Machines(folder, environment, places)
    try:
        yield made
    finally:
        made.end()
