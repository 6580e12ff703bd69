"""`cluster=ray`: with a real Ray of two nodes on this machine, and what is refused without one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.runs import RunSpec
from scaleflow.worker.tasks import TrainModel
from tests.cluster.machines import HEAD, Machines, machines
from tests.conftest import Command
from tests.launcher.test_supervisor import LongRun, only_run, slow_down

SMALL = (
    *("hardware=cpu", "dataset=synthetic", "dataset.shape=[16]", "dataset.examples=2000", "evaluation=none"),
    "cluster=ray",
)
TWO = (*SMALL, "strategy=multi_worker", "cluster.workers=2")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with Shared(lambda: tmp_path_factory.mktemp("ray")) as made:
        yield made


@pytest.fixture
def head(shared: Shared) -> Machines:
    """A cluster with a head of one core, and perhaps with another node."""
    return shared.cluster()


@pytest.fixture
def cluster(shared: Shared) -> Machines:
    """A head, and one more node, of one core each."""
    return shared.cluster(nodes=2)


class Shared:
    """A cluster for all tests of this module. What a test has lost is there again for the next one that needs it.

    Those that lose something come after the others in this module, so that nothing is started again for them.

    Args:
        make_folder: a new folder for what a cluster's nodes say.
    """

    def __init__(self, make_folder: Callable[[], Path]) -> None:
        self._make_folder = make_folder
        self._machines: Machines | None = None
        self._until_the_end = contextlib.ExitStack()
        self.other: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, *error: object) -> None:
        self._until_the_end.close()

    def cluster(self, nodes: int = 1) -> Machines:
        if self._machines is None or not self._machines.has_head:
            self._until_the_end.close()
            folder = self._make_folder()
            self._machines = self._until_the_end.enter_context(machines(folder, Command(folder).environment))
            self.other = None
        if nodes > 1 and (self.other is None or not self._machines.is_alive(self.other)):
            self.other = self._machines.join(cores=1, host="127.0.0.3")
        return self._machines


def address(cluster: Machines) -> str:
    return f"cluster.address={cluster.address}"


class SlowRun(LongRun):
    """A run of months that computes next to nothing: it waits for a second after each ten steps."""

    def __init__(self, command: Command, cluster: Machines, *words: str) -> None:
        self._pace = command.folder / "slow"
        steps = ("training.epochs=1000000", "training.steps_per_loop=10", "checkpoint.every_steps=20")
        every = (*steps, "dataset.examples=20000", slow_down(self._pace, 1.0), address(cluster))
        super().__init__(command, *words, *every, only=True, **cluster.token)

    def speed_up(self) -> None:
        self._pace.unlink()


# ---------------------------------------------------------------------------------------------
# With Ray
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_on_two_nodes_are_one_run_that_learns_as_two_local_ones_do(cluster: Machines, tmp_path: Path) -> None:
    here, there = Command(tmp_path / "here"), Command(tmp_path / "there")
    for command in (here, there):
        command.folder.mkdir()
    remote = there(*TWO, address(cluster), "training.epochs=2", **cluster.token)
    assert remote.returncode == 0, remote.stderr
    local = here(*TWO, "cluster=local", "training.epochs=2")
    assert local.returncode == 0, local.stderr
    found = [only_run(command.folder) for command in (here, there)]
    assert [run.info.status for run in found] == ["FINISHED"] * 2
    assert found[1].data.params["resolved.replicas"] == "2"
    for key in ("train/loss", "val/loss", "test/loss"):
        assert found[0].data.metrics[key] == pytest.approx(found[1].data.metrics[key], rel=1e-6)
    assert (there.run_folder() / "worker-1.log").exists()
    assert list((there.run_folder() / "model").rglob("saved_model.pb"))


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_nothing_and_resume_goes_on(cluster: Machines, command: Command) -> None:
    run = SlowRun(command, cluster, *TWO).until("checkpoint")
    run.launcher.send_signal(signal.SIGINT)
    assert run.end() == 130, run.err.read_text()
    assert only_run(command.folder).info.status == "KILLED"
    run.speed_up()
    step = [event for event in command.events() if event["event"] == "checkpoint"][-1]["step"]
    ended = command(f"resume={command.run_folder()}", f"training.max_steps={step + 20}", **cluster.token)
    assert ended.returncode == 0, ended.stderr
    resumed = [event for event in command.events() if event["event"] == "ready"][-1]
    assert (resumed["resumed"], only_run(command.folder).info.status) == (step, "FINISHED")


@pytest.mark.slow
def test_a_cluster_of_this_machine_alone_ends_with_the_run(command: Command) -> None:
    """However few cores it has: a coordinator, its worker and its server have a place."""
    words = ("strategy=parameter_server", "cluster.workers=1", "training.epochs=1", "checkpoint=none")
    ended = command(*SMALL, *words)
    assert ended.returncode == 0, ended.stderr
    assert only_run(command.folder).info.status == "FINISHED"
    assert [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(command.folder)] == []


@pytest.mark.slow
def test_a_sweep_has_its_jobs_placed_over_the_cluster(cluster: Machines, command: Command) -> None:
    ended = command(
        *("-m", *SMALL[:-1], "hydra/launcher=ray", "+cluster.address=" + cluster.address, "training.epochs=1"),
        *("model.units=4,8,16", "strategy=one_device", "hydra.sweep.dir=swept", "checkpoint=none"),
        **cluster.token,
    )
    assert ended.returncode == 0, ended.stderr
    assert "3 of 3 FINISHED" in ended.stdout


# ---------------------------------------------------------------------------------------------
# Refused
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_more_than_the_cluster_has_is_refused(cluster: Machines, command: Command) -> None:
    ended = command(*TWO, address(cluster), "cluster.workers=3", "cluster.start_seconds=1", **cluster.token)
    assert ended.returncode == 2
    assert "3 process(es) with 1 CPU each do not fit: the cluster has 2 CPU on 2 machine(s)" in ended.stderr


@pytest.mark.slow
def test_a_machine_that_does_not_see_the_folders_is_refused(
    cluster: Machines, command: Command, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if os.geteuid() != 0:
        pytest.skip("a folder of its own is given to a node by root")
    away = cluster.join(cores=2, host="127.0.0.4", before=f"mount -t tmpfs none {command.folder}", **{SERVER_ENV: ""})
    shared = tmp_path_factory.mktemp("shared") / "run"
    words = (*SMALL, address(cluster), "strategy=one_device", "cluster.cpus=2")
    try:
        run = command(*words, "hydra.run.dir=run", **cluster.token)
        saved = command(*words, f"hydra.run.dir={shared}", f"checkpoint.folder={command.folder}/saved", **cluster.token)
    finally:
        cluster.lose(away)
        away.wait(30)
    host = re.escape(socket.gethostname())
    assert (run.returncode, saved.returncode) == (2, 2)
    assert re.search(rf"{host} does not see the run's folder, \S+/run; use hydra.run.dir=PATH", run.stderr), run.stderr
    assert re.search(rf"checkpoint=default: \S+/saved is not on a path that {host} shares", saved.stderr), saved.stderr
    assert not (command.folder / "run").exists()


def test_ray_that_is_not_installed_is_named_with_its_extra(command: Command) -> None:
    (command.folder / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'ray' else find(name, *a)\n"
    )
    ended = command("cluster=ray", PYTHONPATH=str(command.folder))
    assert (ended.returncode, "pip install 'scaleflow[ray]'" in ended.stderr) == (2, True)


# ---------------------------------------------------------------------------------------------
# With a Ray that loses something
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_on_the_nodes_that_are_left(shared: Shared, cluster: Machines, command: Command) -> None:
    run = SlowRun(command, cluster, *TWO, "cluster.min_workers=1", "training.max_steps=200").until("checkpoint")
    assert shared.other is not None
    cluster.lose(shared.other)
    run.until("restart").speed_up()
    assert run.end() == 0, run.err.read_text()
    (restart,) = (event for event in command.events() if event["event"] == "restart")
    assert re.search(r"worker \d was lost with its Ray actor on", restart["reason"])
    first, second = (event for event in command.events() if event["event"] == "ready")
    assert [e["params"]["resolved.replicas"] for e in (first, second)] == ["2", "1"]
    assert [e["params"]["resolved.global_batch_size"] for e in (first, second)] == ["64", "64"]
    assert second["resumed"] > 0
    found = only_run(command.folder)
    assert (found.info.status, found.data.metrics["test/loss"] > 0) == ("FINISHED", True)


@pytest.mark.slow
def test_a_cluster_that_loses_its_head_ends_the_run_as_failed(head: Machines, command: Command) -> None:
    """Before Ray ends the process, which it does after a minute without a word."""
    run = SlowRun(command, head, *SMALL, "strategy=one_device").until("checkpoint")
    head.lose(head.head, HEAD)
    assert run.end() == 1, run.err.read_text()
    last = command.events()[-1]
    assert last["status"] == "FAILED"
    assert last["error"].startswith("the head of the Ray cluster was lost: worker 0 was lost with its Ray actor on")
    assert only_run(command.folder).info.status == "FAILED"


# ---------------------------------------------------------------------------------------------
# Its parts
# ---------------------------------------------------------------------------------------------


def begun(workers: int, replicas: int, size: int) -> dict[str, str]:
    resolved = {"workers": workers, "replicas": replicas, "global_batch_size": size, "cache": "memory"}
    return {f"resolved.{key}": str(value) for key, value in resolved.items()}


class Actor:
    """Each of its calls is only a name."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: name)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], Actor]:
    """Has Ray answer each call of an actor by an error."""

    def fail(error: Exception) -> Actor:
        def get(asked: object, timeout: float = 0) -> None:
            raise error

        monkeypatch.setattr("ray.get", get)
        monkeypatch.setattr("ray.wait", lambda asked, num_returns=1, timeout=0: (asked, []))
        monkeypatch.setattr("scaleflow.features.ray.engine.is_head_reachable", lambda: True)
        return Actor()

    return fail


def error_of_constructor() -> Exception:
    from ray.exceptions import ActorDiedError

    error = ActorDiedError()
    error._actor_init_failed = True
    error.error_msg = "The actor died because of an error raised in its creation task\nOSError: no space left"
    error.args = (error.error_msg,)
    return error


def error_of_call() -> Exception:
    from ray.exceptions import RayTaskError

    return RayTaskError("start", "Traceback ...\nOSError: no space left", OSError("no space left"))


@pytest.mark.parametrize("error", [error_of_constructor, error_of_call])
def test_error_of_an_actor_is_told(
    error: Callable[[], Exception], failing: Callable[[Exception], Actor], plan: Any, tmp_path: Path
) -> None:
    from scaleflow.features.ray.host import ActorUnanswered, RayProcess, call_actors

    actor = failing(error())
    with pytest.raises(ConfigError, match="a machine cannot run its process: OSError: no space left") as refused:
        call_actors([actor], "locate", None)
    assert not isinstance(refused.value, ActorUnanswered)  # no other try
    spec = RunSpec(plan("tracking=none"), tmp_path, 0.0, TrainModel())
    process = RayProcess(spec, actor, {}, "node-1")
    process.await_start()
    assert process.describe_exit() == "was lost with its Ray actor on node-1: OSError: no space left"


def test_one_thread_waits_for_the_ends_of_all_processes(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answers twice that it runs; the last is never heard of, until the head is gone."""
    from scaleflow.features.ray.host import RayProcess, wait_for_exits

    answers: dict[str, list[Any]] = {"a": [None, None, 0], "b": [3], "c": [OSError("lost")], "d": []}
    calls: list[str] = []
    has_head = True

    def wait(asked: list[str], num_returns: int = 1, timeout: float = 0) -> tuple[list[str], list[str]]:
        nonlocal has_head
        ready = [name for name in asked if answers[name]]
        has_head = bool(ready)
        return ready[:num_returns], []

    def get(name: str, timeout: float = 0) -> Any:
        if isinstance(answer := answers[name].pop(0), Exception):
            raise answer
        return answer

    def make_actor(name: str) -> Any:
        start = SimpleNamespace(remote=lambda *arguments: None)

        def ask() -> str:
            calls.append(name)
            return name

        return SimpleNamespace(start=start, wait=SimpleNamespace(remote=ask))

    monkeypatch.setattr("ray.wait", wait)
    monkeypatch.setattr("ray.get", get)
    monkeypatch.setattr("scaleflow.features.ray.engine.is_head_reachable", lambda: has_head)
    spec = RunSpec(plan("tracking=none"), tmp_path, 0.0, TrainModel())
    processes = [RayProcess(spec, make_actor(name), {}, "node-1") for name in answers]
    wait_for_exits(processes)
    assert [process.returncode for process in processes] == [0, 3, 1, 1]
    assert [process.has_server for process in processes] == [True, True, False, False]
    assert sorted(calls) == ["a", "a", "a", "b", "c", "d"]


def test_a_machine_that_is_gone_has_no_words_of_its_own(failing: Callable[[Exception], Actor]) -> None:
    from ray.exceptions import ActorDiedError

    from scaleflow.features.ray.host import ActorUnanswered, call_actors

    with pytest.raises(ActorUnanswered, match="do not answer"):
        call_actors([failing(ActorDiedError())], "locate", None)


@pytest.mark.parametrize(("there", "least", "goes_on"), [(3, 1, 2), (3, 3, 0), (2, 2, 2), (1, 1, 1)])
def test_the_workers_that_are_left_divide_the_same_global_batch(
    plan: Any, there: int, least: int, goes_on: int
) -> None:
    from scaleflow.features.ray.host import resize_plan

    four: Plan = plan("strategy=multi_worker", "cluster=ray", "cluster.workers=4", "hardware=cpu")
    ready = begun(4, 4, 64)
    if not goes_on:
        with pytest.raises(
            ConfigError, match=r"the global batch of 64 is divisible among 1, 2, 4; use cluster.min_workers=1"
        ):
            resize_plan(four, there, least, ready)
        return
    fewer = resize_plan(four, there, least, ready)
    assert (fewer.cluster.workers, fewer.training.global_batch_size) == (goes_on, 64)


def test_measurements_have_the_name_of_their_machine() -> None:
    from scaleflow.launcher.recording.system_metrics import name_by_host

    job: RunSpec = SimpleNamespace(name="worker 1")  # type: ignore[assignment]
    values = {"system/cpu_utilization_percentage": 1.0, "system/worker-1/threads": 2.0, "system/gpu_0_power": 3.0}
    assert name_by_host(values, job, "node7") == {
        "system/node7/cpu_utilization_percentage": 1.0,
        "system/worker-1/threads": 2.0,
        "system/node7/gpu_0_power": 3.0,
    }
