"""A Ray cluster of this one machine: a head and other nodes, each with processes and an address of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from scaleflow.cluster.network import free_ports
from tests.cluster.engine import until

#: The process of each node, and the one that a head has beside it.
RAYLET, HEAD = "raylet", "gcs_server"


class Machines:
    """A cluster whose head has one core.

    Args:
        folder: takes what the nodes say.
        environment: of the nodes, and so of what they start.

    Attributes:
        address: the cluster's.
        token: what a command says to it.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._environment = {**environment, **self.token, "RAY_USAGE_STATS_ENABLED": "0"}
        self._nodes: list[subprocess.Popen[bytes]] = []
        # Ray's sockets are below it, and the path of a socket must be short.
        self._session = tempfile.mkdtemp(prefix="ray", dir="/tmp")
        (port,) = free_ports(1)
        self.address = f"127.0.0.2:{port}"  # not 127.0.0.1, which Ray takes for "whatever address there is"
        head = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._session}")
        self.head = self.start(*head, cores=1)

    def start(
        self, *words: str, cores: int, host: str = "127.0.0.2", before: str = "", **environment: str
    ) -> subprocess.Popen[bytes]:
        """Starts a node, and waits until the others know of it.

        Args:
            words: of `ray start`.
            cores: that it has to give away.
            host: its address.
            before: what a shell does before it, in namespaces of the node's own.
            environment: of the node, beside the cluster's; an empty value takes one away.
        """
        found = {**self._environment, **environment}
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", "--block", f"--node-ip-address={host}", f"--num-cpus={cores}", *words]
        command += ["--object-store-memory=80000000"]
        if before:
            command = ["unshare", "--mount", "sh", "-ec", f'{before}\nexec "$@"', "sh", *command]
        with (self._folder / f"node-{len(self._nodes)}.log").open("wb") as out:
            node = subprocess.Popen(
                command,
                env={key: value for key, value in found.items() if value},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self._folder,
            )
        self._nodes.append(node)
        log = self._folder / f"node-{len(self._nodes) - 1}.log"
        until(lambda: node.poll() is not None or "Ray runtime started" in log.read_text(), "Ray does not start", 60)
        assert node.poll() is None, log.read_text()
        return node

    def join(self, cores: int, host: str, before: str = "", **environment: str) -> subprocess.Popen[bytes]:
        """Adds a node."""
        return self.start(f"--address={self.address}", cores=cores, host=host, before=before, **environment)

    def lose(self, node: subprocess.Popen[bytes], name: str = RAYLET) -> None:
        """Ends a node's own process, or the one that makes it the head, as a fault of its machine would."""
        (found,) = self._find(node, name)
        os.kill(found.pid, signal.SIGKILL)

    @property
    def has_head(self) -> bool:
        return self.is_alive(self.head) and self.is_alive(self.head, HEAD)

    def is_alive(self, node: subprocess.Popen[bytes], name: str = RAYLET) -> bool:
        """Whether a node, or what makes it the head, has not been lost."""
        return node.poll() is None and any(p.status() != psutil.STATUS_ZOMBIE for p in self._find(node, name))

    def _find(self, node: subprocess.Popen[bytes], name: str) -> list[psutil.Process]:
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
def machines(folder: Path, environment: Mapping[str, str]) -> Iterator[Machines]:
    """A cluster as long as the block lasts."""
    made = Machines(folder, environment)
    try:
        yield made
    finally:
        made.end()
