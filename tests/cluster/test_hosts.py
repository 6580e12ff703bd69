"""A launcher on each of several hosts, which are network namespaces: joined by TF_CONFIG, cut off, slowed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import hosts

LISTEN = "import socket, sys; s = socket.create_server(('', 2222)); print(flush=True); sys.stdin.read()"
CONNECT = """
import socket, sys, time
began = time.monotonic()
try:
    print(socket.create_connection((sys.argv[1], 2222), timeout=1).getpeername()[0], time.monotonic() - began)
except OSError as error:
    print(type(error).__name__, 0)
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[hosts.Host]]:
    if reason := hosts.lacking():
        pytest.skip(reason)
    with hosts.joined(3, tmp_path_factory.mktemp("hosts")) as joined:
        yield joined


def connects(here: hosts.Host, there: hosts.Host) -> tuple[str, float]:
    """Where the name leads, or why it leads nowhere, and seconds until it does."""
    who, seconds = here.ran([sys.executable, "-c", CONNECT, there.name]).split()
    return who, float(seconds)


def test_hosts_find_each_other_by_name_unless_one_is_cut_off(three: list[hosts.Host], tmp_path: Path) -> None:
    with hosts.joined(2, tmp_path) as (here, there):  # as others at the same time
        words = [sys.executable, "-c", LISTEN]
        listens = there.start(words, tmp_path, os.environ, stdin=subprocess.PIPE)
        assert listens.stdout is not None
        listens.stdout.readline()
        assert (here.ran(["hostname"]), there.ran(["hostname"])) == ("host0", "host1")
        assert connects(here, there)[0] == there.address
        assert connects(three[0], three[1])[0] == "ConnectionRefusedError"
        there.cut()
        assert connects(here, there)[0] in ("TimeoutError", "OSError")
        there.join()
        assert connects(here, there)[0] == there.address
        with there.slowed(delay=0.1, rate=1e6):
            assert 0.2 <= connects(here, there)[1] < 0.9
        assert connects(here, there)[1] < 0.2
        assert listens.pid in there.pids()
    assert listens.returncode is not None
    assert not there.pids()
