"""A launcher to each worker, as on several machines, joined by TF_CONFIG alone."""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
from pathlib import Path

import pytest

from scaleflow.cluster.network import free_ports
from scaleflow.interfaces.events import RunReady
from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.runs import EventReader
from tests.conftest import Command
from tests.launcher.test_supervisor import only_run, processes, wait_for
from tests.object_store import make_bucket
from tests.processes import CommandProcess

WORDS = ("cluster=tf_config", "hardware=cpu", "training.epochs=2", "evaluation=none")


class Hosts:
    """Machines, each with a folder and an environment of its own; all of them this one."""

    def __init__(self, folder: Path, count: int, *roles: str) -> None:
        self.peers = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.commands = [Command(folder / str(number)) for number in range(count)]
        self.roles = roles or ("worker",) * count
        for command in self.commands:
            command.folder.mkdir()

    def tf_config(self, number: int) -> str:
        cluster = {role: [p for p, r in zip(self.peers, self.roles, strict=True) if r == role] for role in self.roles}
        task = {"type": self.roles[number], "index": self.roles[:number].count(self.roles[number])}
        return json.dumps({"cluster": cluster, "task": task})

    def start(self, number: int, *words: str, **environment: str) -> CommandProcess:
        return self.commands[number].start(*WORDS, *words, TF_CONFIG=self.tf_config(number), **environment)


def ends(processes: list[CommandProcess]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each; none is left."""
    try:
        texts = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


@pytest.mark.slow
def test_auto_makes_one_run_of_several_machines(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)
    chief, other = ends([hosts.start(number, "checkpoint=none") for number in range(2)])
    assert (chief[0], other[0]) == (0, 0), chief[2] + other[2]
    run = only_run(hosts.commands[0].folder)
    assert run.info.status == "FINISHED"
    assert run.data.params["resolved.strategy"] == "multi_worker"
    assert run.data.params["resolved.replicas"] == "2"
    assert f"worker 1 of 2 processes; the chief, {hosts.peers[0]}, records the run" in other[1]
    assert not (hosts.commands[1].folder / "mlflow.db").exists()
    assert not list(hosts.commands[1].folder.glob("outputs/*/*/model"))


@pytest.mark.slow
def test_workers_with_different_configs_are_refused(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)
    for code, _, stderr in ends([hosts.start(number, f"seed={number}") for number in range(2)]):
        assert code == 2
        assert "not all started with the same config" in stderr


@pytest.mark.slow
def test_checkpoints_that_only_the_chief_would_see_are_refused(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)
    for code, _, stderr in ends([hosts.start(number) for number in range(2)]):
        assert code == 2
        assert re.search(r"checkpoint=default: the machines do not share .*/checkpoints, .*checkpoint.folder=", stderr)
    assert not (hosts.commands[0].folder / "outputs").exists()


@pytest.mark.slow
def test_a_peer_that_never_comes_is_named(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)
    ((code, _, stderr),) = ends([hosts.start(0, "cluster.start_seconds=6")])
    assert code == 2
    assert f"worker 1 ({hosts.peers[1]}) has not joined" in stderr
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_a_worker_that_waits_does_not_outlive_its_launcher(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)
    with hosts.start(0, **{SERVER_ENV: ""}) as launcher:
        reported = wait_for(lambda: list(hosts.commands[0].folder.glob("outputs/*/*/events.jsonl")))[0]
        wait_for(lambda: "waiting" in reported.read_text())
        (worker,) = processes(reported.parent)
        time.sleep(2)  # until it is in TensorFlow's hands
        launcher.kill()
        worker.wait(timeout=60)


def test_a_port_in_use_is_refused_at_once(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(hosts.peers[0].rpartition(":")[2])))
        taken.listen()
        ((code, _, stderr),) = ends([hosts.start(0)])
    assert code == 2
    assert f"{hosts.peers[0]}, the address of this process, is in use" in stderr


@pytest.mark.slow
def test_tf_config_of_a_single_worker_changes_nothing(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 1)
    ((code, stdout, stderr),) = ends([hosts.start(0, "strategy=auto", "tracking=none")])
    assert code == 0, stderr
    assert "digits-mlp-one_device-float32" in stdout


@pytest.mark.slow
def test_a_coordinator_its_worker_and_its_server_are_one_run(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 3, "chief", "worker", "ps")
    chief, worker, server = ends([hosts.start(number) for number in range(3)])
    assert (chief[0], worker[0], server[0]) == (0, 0, 0), chief[2] + worker[2] + server[2]
    run = only_run(hosts.commands[0].folder)
    assert run.info.status == "FINISHED"
    assert run.data.params["resolved.strategy"] == "parameter_server"
    assert f"worker 0 of 3 processes; the chief, {hosts.peers[0]}, records the run" in worker[1]
    assert f"server 0 serves the coordinator at {hosts.peers[0]}" in server[1]
    assert not any((command.folder / "mlflow.db").exists() for command in hosts.commands[1:])


@pytest.mark.slow
def test_a_server_that_the_coordinator_waits_for_in_vain_is_named(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 3, "chief", "worker", "ps")
    chief, worker = ends([hosts.start(number, "cluster.start_seconds=6") for number in (0, 1)])
    assert chief[0] == 2
    assert f"server 0 ({hosts.peers[2]}) has not joined" in chief[2]
    assert "Traceback" not in chief[2] + worker[2]


@pytest.mark.slow
def test_a_coordinator_that_a_worker_waits_for_in_vain_is_named(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 3, "chief", "worker", "ps")
    ((code, _, stderr),) = ends([hosts.start(1, "cluster.start_seconds=6")])
    assert code == 2
    assert f"coordinator ({hosts.peers[0]}), " in stderr
    assert f"server 0 ({hosts.peers[2]}) has not joined" in stderr
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_machines_without_a_common_path_go_on_from_an_object_store(
    tmp_path: Path, object_store: dict[str, str]
) -> None:
    make_bucket(object_store, "machines")
    words = ("strategy=multi_worker", "tracking=none", "checkpoint.folder=s3://machines/run", "checkpoint.export=best")
    for name in ("first", "later"):
        (tmp_path / name).mkdir()
    first = Hosts(tmp_path / "first", 2)
    for code, out, err in ends([first.start(n, *words, "hydra.run.dir=out", **object_store) for n in range(2)]):
        assert code == 0, out + err
    later = Hosts(tmp_path / "later", 2)
    for number in range(2):
        source = first.commands[0].folder / "out"
        shutil.copytree(source, later.commands[number].folder / "out", ignore=shutil.ignore_patterns("checkpoints"))
    more = ("resume=out", "training.max_steps=null", "training.epochs=3")
    ran = ends([later.start(n, *more, **object_store) for n in range(2)])
    assert [code for code, *_ in ran] == [0, 0], ran
    events = EventReader(later.commands[0].folder / "out" / "events.jsonl").read()
    resumed = [event.resumed for event in events if isinstance(event, RunReady)]
    assert resumed[0] is None
    assert (resumed[1] or 0) > 0
    assert (later.commands[0].folder / "out/checkpoints").is_dir()
    assert not list((later.commands[1].folder / "out").glob("*checkpoint*"))
