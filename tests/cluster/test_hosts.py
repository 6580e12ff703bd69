"""A launcher on each of several hosts, which are network namespaces: joined by TF_CONFIG, cut off, slowed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scaleflow.launcher.processes.handover import SERVER_ENV
from tests.cluster import hosts
from tests.cluster.test_several_launchers import ends
from tests.conftest import Command, clean_environment
from tests.event_log import events_in
from tests.launcher.test_supervisor import only_run, wait_for
from tests.processes import CommandProcess

LISTEN = "import socket, sys; s = socket.create_server(('', 2222)); print(flush=True); sys.stdin.read()"
CONNECT = """
import socket, sys, time
began = time.monotonic()
try:
    connection = socket.create_connection((sys.argv[1], 2222), timeout=float(sys.argv[2]))
    print(connection.getpeername()[0], time.monotonic() - began)
except OSError as error:
    print(type(error).__name__, 0)
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[hosts.Host]]:
    if reason := hosts.lacking():
        pytest.skip(reason)
    with hosts.joined(3, tmp_path_factory.mktemp("hosts")) as joined:
        yield joined


def connects(here: hosts.Host, there: hosts.Host, patience: float = 60) -> tuple[str, float]:
    """Where the name leads, or why it leads nowhere, and seconds until it does."""
    who, seconds = here.ran([sys.executable, "-c", CONNECT, there.name, str(patience)]).split()
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
        assert connects(here, there, patience=1)[0] in ("TimeoutError", "OSError")
        there.join()
        assert connects(here, there)[0] == there.address
        with there.slowed(delay=0.1, rate=1e6):
            assert connects(here, there)[1] >= 0.2
        wait_for(lambda: connects(here, there)[1] < 0.2)
        assert listens.pid in there.pids()
    assert listens.returncode is not None
    assert not there.pids()


WAIT = """
import sys
from scaleflow.cluster.network import wait_until_closed
print(wait_until_closed("host1:2222", float(sys.argv[1])))
"""


@pytest.mark.parametrize(("how", "patience"), [("ends", 60), ("is cut off", 5)])
def test_a_process_that_ends_is_told_from_one_that_is_cut_off_for_long(tmp_path: Path, how: str, patience: int) -> None:
    if reason := hosts.lacking():
        pytest.skip(reason)
    with hosts.joined(2, tmp_path) as (here, there):
        listens = there.start([sys.executable, "-c", LISTEN], tmp_path, os.environ, stdin=subprocess.PIPE)
        assert listens.stdout is not None
        listens.stdout.readline()
        waits = here.start([sys.executable, "-c", WAIT, str(patience)], Path.cwd(), os.environ)
        wait_for(lambda: ":08AE 01004D0A:" in there.ran(["cat", "/proc/net/tcp"]))  # 10.77.0.1, at port 2222
        there.cut()
        time.sleep(2)
        if how == "ends":
            there.join()
            assert waits.poll() is None
            listens.kill()
        assert waits.communicate(timeout=240) == (f"{how == 'ends'}\n", "")


# ---------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------

PORT = 2222
CPU = ("hardware=cpu", "hardware.intra_op_threads=1")

#: 50 steps of the same global batches on any number of workers.
SAME = (
    *("training.global_batch_size=48", "training.max_steps=50", "training.steps_per_loop=1", "checkpoint=none"),
    *("evaluation=none", *CPU),
)


#: Through which machines of many a site reach the outside, and each other not: nothing answers there.
PROXIES = dict.fromkeys(("http_proxy", "https_proxy"), f"http://{hosts.NETWORK}.254:3128")


class OnHost(Command):
    """`python -m scaleflow ...` on one of the hosts, in a folder of its own."""

    def __init__(self, host: hosts.Host, folder: Path) -> None:
        self.host, self.folder = host, folder
        self.environment = {**clean_environment(), SERVER_ENV: host.server, **PROXIES}
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, *words: str, output: tuple[int, int] | None = None, **environment: str) -> CommandProcess:
        return self.host.fork((*self.module.split(), *words), self.folder, {**self.environment, **environment})


class Launchers:
    """A launcher on each host, joined by TF_CONFIG with the hosts' names.

    Args:
        folder: takes the folder of each host's commands.
        roles: what TF_CONFIG says that they are; workers, where it is left out.
    """

    def __init__(self, among: Sequence[hosts.Host], folder: Path, *roles: str) -> None:
        self.hosts, self.roles = among, roles or ("worker",) * len(among)
        self.commands = [OnHost(host, folder / host.name) for host in among]
        self.started: list[CommandProcess] = []

    def tf_config(self, number: int) -> str:
        peers = [f"{host.name}:{PORT}" for host in self.hosts]
        cluster = {role: [p for p, r in zip(peers, self.roles, strict=True) if r == role] for role in self.roles}
        task = {"type": self.roles[number], "index": self.roles[:number].count(self.roles[number])}
        return json.dumps({"cluster": cluster, "task": task})

    def start(self, *words: str) -> Launchers:
        self.started = [
            command.start("cluster=tf_config", *words, TF_CONFIG=self.tf_config(number))
            for number, command in enumerate(self.commands)
        ]
        return self

    def ends(self) -> list[tuple[int, str, str]]:
        """(exit code, stdout, stderr) of each; nothing but the hosts' servers is left behind them."""
        found = ends(self.started)
        assert all(host.is_empty() for host in self.hosts)
        return found

    def finish(self) -> list[tuple[int, str, str]]:
        found = self.ends()
        assert [code for code, _, _ in found] == [0] * len(found), [stderr for _, _, stderr in found]
        return found


def events(folder: Path, name: str = "events") -> list[dict[str, Any]]:
    return events_in(folder / f"{name}.jsonl")


def of(found: list[dict[str, Any]], metric: str) -> list[float]:
    """All values of a metric, in order."""
    return [event["values"][metric] for event in found if metric in event.get("values", {})]


@pytest.fixture(scope="module")
def on_one_machine(three: list[hosts.Host], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two workers of one machine report: `cluster=local`."""
    command = OnHost(three[0], tmp_path_factory.mktemp("local"))
    ((code, _, stderr),) = ends([command.start("strategy=multi_worker", "tracking=none", *SAME)])
    assert code == 0, stderr
    return command.events()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_workers_on_hosts_give_the_losses_of_those_on_one_machine(
    three: list[hosts.Host], on_one_machine: list[dict[str, Any]], tmp_path: Path, count: int
) -> None:
    launchers = Launchers(three[:count], tmp_path)
    said = launchers.start("strategy=multi_worker", "tracking=none", *SAME).finish()
    assert f"worker 1 of {count} processes; the chief, host0:{PORT}, records the run" in said[1][1]
    losses = of(launchers.commands[0].events(), "train/loss")
    assert len(losses) >= 50
    assert losses == pytest.approx(of(on_one_machine, "train/loss"), abs=1e-5)


@pytest.mark.slow
def test_a_coordinator_a_worker_and_a_server_on_hosts_take_the_steps_they_are_told(
    three: list[hosts.Host], tmp_path: Path
) -> None:
    launchers = Launchers(three, tmp_path, "chief", "worker", "ps")
    said = launchers.start("strategy=parameter_server", "training.max_steps=100", *CPU).finish()
    assert f"server 0 serves the coordinator at host0:{PORT}" in said[2][1]
    run = only_run(launchers.commands[0].folder)
    assert run.info.status == "FINISHED"
    assert launchers.commands[0].events()[-2]["step"] == 100


#: Minutes of it.
LONG = (
    "dataset=synthetic",
    "dataset.shape=[16]",
    "dataset.examples=20000",
    "training.epochs=1000",
    *CPU,
    "evaluation=none",
)


#: Shorter than what TensorFlow's heartbeats take to notice (10 to 20 s).
STALL = 6

UNTIL_ALL_HAVE_ENDED = 120


def cut_off(launchers: Launchers, away: int, run: Path) -> list[tuple[int, str, str]]:
    """Cuts a host off after a checkpoint; gives how all end."""

    def has_checkpoint() -> bool:
        assert not any(process.poll() for process in launchers.started), launchers.ends()
        return (run / "events.jsonl").exists() and any(e["event"] == "checkpoint" for e in events(run))

    wait_for(has_checkpoint)
    host = launchers.hosts[away]
    host.cut()
    began = time.monotonic()
    try:
        found = launchers.ends()
    finally:
        host.join()
    assert time.monotonic() - began < UNTIL_ALL_HAVE_ENDED
    return found


@pytest.mark.slow
def test_a_host_that_is_cut_off_ends_all_and_they_go_on_when_it_is_back(
    three: list[hosts.Host], tmp_path: Path
) -> None:
    launchers, run = Launchers(three, tmp_path), tmp_path / "run"  # on a disk that all hosts see
    words = ("strategy=multi_worker", "checkpoint.every_steps=20", f"cluster.stall_seconds={STALL}")
    found = cut_off(launchers.start(*LONG, *words, f"hydra.run.dir={run}"), 0, run)
    for number, (code, _, stderr) in enumerate(found):
        missed = "worker 1 (host1" if number == 0 else "worker 0 (host0"
        assert code == 1
        assert re.search(rf"no answer from .*{re.escape(missed)}", stderr), stderr
        assert "Traceback" not in stderr
    ended = only_run(launchers.commands[0].folder)
    assert ended.info.status == "FAILED"
    assert "no answer from" in ended.data.tags["scaleflow.error"]
    step = max(event["step"] for event in events(run) if event["event"] == "checkpoint")
    launchers.start(f"resume={run}", f"training.max_steps={step + 50}").finish()
    assert only_run(launchers.commands[0].folder).info.status == "FINISHED"


@pytest.mark.slow
def test_a_worker_that_is_cut_off_from_its_coordinator_does_not_take_the_run_for_finished(
    three: list[hosts.Host], tmp_path: Path
) -> None:
    launchers, run = Launchers(three, tmp_path, "chief", "worker", "ps"), tmp_path / "run"
    words = ("strategy=parameter_server", "checkpoint.every_steps=20", f"cluster.stall_seconds={STALL}")
    chief, worker, server = cut_off(launchers.start(*LONG, *words, f"hydra.run.dir={run}"), 1, run)
    assert (chief[0], worker[0], server[0]) == (1, 1, 0)
    assert f"no progress for cluster.stall_seconds={STALL}, at step" in chief[2]
    # On a busy machine the coordinator itself may be late.
    assert re.search(rf"no answer from (coordinator [^,]*, )?worker 0 \(host1:{PORT}\)", chief[2])
    assert f"no answer from the coordinator (host0:{PORT}) for {STALL} s" in worker[2]
    assert "the coordinator has ended; how the run ended is in its record" in server[1]
    assert only_run(launchers.commands[0].folder).info.status == "FAILED"


@pytest.mark.slow
def test_a_slow_network_changes_the_pace_and_nothing_else(
    three: list[hosts.Host], on_one_machine: list[dict[str, Any]], tmp_path: Path
) -> None:
    launchers = Launchers(three[:2], tmp_path)
    run = tmp_path / "run"
    with three[1].slowed(delay=0.025, rate=1e6):
        launchers.start(f"hydra.run.dir={run}", "strategy=multi_worker", *SAME).finish()
    found = events(run)
    assert of(found, "train/loss") == pytest.approx(of(on_one_machine, "train/loss"), abs=1e-5)
    here, there = (of(each, "perf/examples_per_second")[-1] for each in (on_one_machine, found))
    assert 0 < there < 48 / 0.05  # a step needs an answer from the other host
    assert there < here / 2
    for host, name in enumerate(("events", "events-worker-1")):
        assert of(events(run, name), f"system/host{host}/network_transmit_megabytes")[-1] > 0
        assert of(events(run, name), f"system/worker-{host}/threads")
