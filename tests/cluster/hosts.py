"""Several hosts on this machine: network namespaces that a bridge joins, each with an address, a name and a hosts file.

What runs in one finds the others by name, and nothing else: no namespace leads to this machine's own network, in which
nothing changes. Files and process numbers are this machine's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.processes import ROOT, CommandProcess

PROGRAMS = ("ip", "tc", "unshare", "mount", "hostname")

#: Of one process: each joins hosts that have nothing to do with those of another.
CALLS = itertools.count()

#: Of no network that this machine is in: the namespaces know of no other.
NETWORK = "10.77.0"

#: Enters a host: its hosts file and its name are there for this process and its children alone.
ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


class Host:
    """One of several.

    Attributes:
        name: by which the others, and it itself, find it; up to its first dot its host name.
        address: to which that leads.
    """

    def __init__(self, number: int, name: str, prefix: str, files: Path) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number + 1}"
        self._switch, self._namespace = f"{prefix}-switch", f"{prefix}-{number}"
        self._number = number
        self._port = f"port{number}"
        self._files = files
        self._host_name = name.partition(".")[0]
        self._started: list[subprocess.Popen[str]] = []
        self._lasting: list[int] = []
        self._until_the_end = contextlib.ExitStack()

    def make(self) -> None:
        ip("netns", "add", self._namespace)
        ip("-n", self._switch, "link", "add", self._port, "type", "veth", "peer", "eth0", "netns", self._namespace)
        ip("-n", self._switch, "link", "set", self._port, "master", "switch", "up")
        ip("-n", self._namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", self._namespace, "link", "set", device, "up")

    def remove(self) -> None:
        """Ends what runs in it, and takes it away."""
        for process in self._started:
            process.kill()
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.communicate()
        self._until_the_end.close()
        subprocess.run(["ip", "netns", "delete", self._namespace], capture_output=True, check=False)

    def start(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str], **streams: int
    ) -> subprocess.Popen[str]:
        """Starts a command in it, whose process number is the one that is given.

        Args:
            words: the command.
            folder: in which it runs.
            environment: all of its environment.
            streams: `stdin`, `stdout` and `stderr`; pipes, and an empty input, where they are left out.
        """
        own = ["ip", "netns", "exec", self._namespace, "unshare", "--mount", "--uts", "sh", "-c", ENTER, "sh"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        process = subprocess.Popen(
            [*own, str(self._files / "hosts"), self._host_name, *words],
            cwd=folder,
            env={**environment},
            text=True,
            stdin=pipes["stdin"],
            stdout=pipes["stdout"],
            stderr=pipes["stderr"],
        )
        self._started.append(process)
        return process

    def ran(self, words: Sequence[str], seconds: float = 20) -> str:
        """What a command says in it."""
        return self.start(words, self._files, os.environ).communicate(timeout=seconds)[0].strip()

    @functools.cached_property
    def server(self) -> str:
        """The address of a server that forks workers in this host, for SCALEFLOW_SERVER, and `fork`'s commands."""
        address = str(Path(self._until_the_end.enter_context(tempfile.TemporaryDirectory(dir="/tmp")), "socket"))
        words = (self._namespace, str(self._files / "hosts"), self._host_name, address)
        holder = CommandProcess(("tests.cluster.host_server", *words), ROOT, os.environ)
        self._until_the_end.callback(holder.close)
        assert select.select([holder.stdout], [], [], 60)[0], "the host's server does not start"
        assert holder.stdout.readline(), holder.communicate()
        self._lasting = self.pids()
        return address

    def fork(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> CommandProcess:
        """Starts `python -m WORDS...` in it, forked from its server."""
        return CommandProcess(words, folder, environment, address=self.server)

    def pids(self) -> list[int]:
        """The processes that run in it."""
        said = subprocess.run(
            ["ip", "netns", "pids", self._namespace], capture_output=True, text=True, timeout=120, check=False
        )
        return [int(pid) for pid in said.stdout.split()]

    def cut(self) -> None:
        """Takes its cable out: what it sends goes nowhere, and nobody is told."""
        ip("-n", self._switch, "link", "set", self._port, "down")

    def join(self) -> None:
        """Puts the cable back."""
        ip("-n", self._switch, "link", "set", self._port, "up")

    @contextlib.contextmanager
    def slowed(self, delay: float, rate: float, loss: float = 0.0) -> Iterator[None]:
        """Makes its cable a slow one for as long as the block.

        Args:
            delay: seconds that a frame takes, each way.
            rate: bytes in a second, each way.
            loss: the part of the frames that is lost, each way.
        """
        slow = self._with_netem if has_netem() else self._with_cable
        with slow(delay, rate, loss):
            yield

    @contextlib.contextmanager
    def _with_netem(self, delay: float, rate: float, loss: float) -> Iterator[None]:
        ends = (self._switch, self._port), (self._namespace, "eth0")
        how = ("netem", "delay", f"{delay * 1000:g}ms", "rate", f"{rate * 8:.0f}bit", "loss", f"{loss:%}")
        with contextlib.ExitStack() as until_the_end:
            for namespace, device in ends:
                command = ("tc", "-n", namespace, "qdisc")
                run(*command, "add", "dev", device, "root", *how)
                until_the_end.callback(run, *command, "delete", "dev", device, "root")
            yield

    @contextlib.contextmanager
    def _with_cable(self, delay: float, rate: float, loss: float) -> Iterator[None]:
        near, far, bridge = (f"{end}{self._number}" for end in ("near", "far", "slow"))
        words = [sys.executable, "-m", "tests.cluster.network_link", near, far, *map(str, (delay, rate, loss))]
        with subprocess.Popen(
            ["ip", "netns", "exec", self._switch, *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as cable:
            assert cable.stdout is not None
            assert cable.stdout.readline(), "the slow cable does not come up"
            ip("-n", self._switch, "link", "add", "name", bridge, "type", "bridge")
            ip("-n", self._switch, "link", "set", bridge, "up")
            try:
                for device, master in ((self._port, bridge), (near, bridge), (far, "switch")):
                    ip("-n", self._switch, "link", "set", device, "master", master, "up")
                yield
            finally:
                ip("-n", self._switch, "link", "set", self._port, "master", "switch")
                ip("-n", self._switch, "link", "delete", bridge)
                cable.kill()

    def is_empty(self, seconds: float = 60) -> bool:
        """Whether nothing but its server runs in it, within some seconds."""
        deadline = time.monotonic() + seconds
        while set(self.pids()) - set(self._lasting):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


@contextlib.contextmanager
def joined(count: int, folder: Path, name: str = "host{}") -> Iterator[list[Host]]:
    """So many hosts, for as long as the block: then what still runs in them is ended.

    Args:
        count: how many.
        folder: of this call's own; takes the hosts file.
        name: of each, with its number for the braces.
    """
    prefix = f"sf-{os.getpid()}-{next(CALLS)}"
    hosts = [Host(number, name.format(number), prefix, folder) for number in range(count)]
    lines = [f"{host.address} {host.name}" for host in hosts]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    with contextlib.ExitStack() as until_the_end:
        until_the_end.callback(subprocess.run, ["ip", "netns", "delete", f"{prefix}-switch"], capture_output=True)
        ip("netns", "add", f"{prefix}-switch")
        ip("-n", f"{prefix}-switch", "link", "add", "name", "switch", "type", "bridge")
        ip("-n", f"{prefix}-switch", "link", "set", "switch", "up")
        for host in hosts:
            until_the_end.callback(host.remove)
            host.make()
        yield hosts


@functools.cache
def lacking() -> str:
    """Why there can be no hosts here; empty where there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"hosts are made by iproute2 and util-linux: no {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    try:
        with tempfile.TemporaryDirectory() as folder, joined(1, Path(folder)) as (host,):
            return "" if host.ran(["hostname"]) == host.name else "a host can not be entered"
    except subprocess.CalledProcessError as error:
        return f"there can be no network namespaces: {error.stderr.strip()}"


@functools.cache
def has_netem() -> bool:
    """Whether the kernel can delay what a device sends."""
    with tempfile.TemporaryDirectory() as folder, joined(1, Path(folder)) as (host,):
        words = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        return host.start(words, Path(folder), os.environ).wait(120) == 0


def ip(*words: str) -> None:
    run("ip", *words)


def run(*words: str) -> None:
    subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
