"""Two hosts with a bad link between them, late and lossy or cut for a while: each engine trains over it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scaleflow.launcher.processes.handover import SERVER_ENV
from tests.cluster import engine, hosts, machines
from tests.cluster.test_hosts import CPU, Launchers, OnHost, of
from tests.conftest import Command, clean_environment
from tests.event_log import events_in
from tests.launcher.test_supervisor import only_run, slow_down, wait_for
from tests.processes import CommandProcess

#: Starts a run with the words that are typed; gives what ends it: it returns the exit codes and what was said.
Start = Callable[..., Callable[[], tuple[list[int], str]]]

SMALL = (
    "dataset=synthetic",
    "dataset.shape=[16]",
    "dataset.examples=2000",
    "strategy=multi_worker",
    "evaluation=none",
    *CPU,
)
SAME = (
    *SMALL,
    "training.global_batch_size=48",
    "training.max_steps=20",
    "training.steps_per_loop=1",
    "checkpoint=none",
)

#: The link of a far machine: seconds that a frame takes each way, bytes in a second, and the part that is lost.
FAR = (0.05, 1e7, 0.01)

#: Seconds for which a link is cut.
CUT = 20


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[hosts.Host]]:
    """New ones for each engine: what is left of the daemons of one ends with its hosts."""
    if reason := hosts.lacking():
        pytest.skip(reason)
    with hosts.joined(2, tmp_path) as joined:
        yield joined


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Those of two workers of one machine."""
    command = Command(tmp_path_factory.mktemp("local"))
    ended = command(*SAME, "tracking=none")
    assert ended.returncode == 0, ended.stderr
    return of(command.events(), "train/loss")


@pytest.fixture(params=["tf_config", "slurm", "ray"])
def start(request: pytest.FixtureRequest, two: list[hosts.Host], tmp_path: Path) -> Iterator[Start]:
    """Starts a run of a worker on each of the hosts, whose folder is `run` in the test's."""
    with contextlib.ExitStack() as until_the_end:
        yield {"tf_config": with_tf_config, "slurm": with_slurm, "ray": with_ray}[request.param](
            two, tmp_path, until_the_end
        )


def with_tf_config(two: Sequence[hosts.Host], folder: Path, _: contextlib.ExitStack) -> Start:
    launchers = Launchers(two, folder)

    def start(*words: str) -> Callable[[], tuple[list[int], str]]:
        launchers.start(*words)

        def end() -> tuple[list[int], str]:
            found = launchers.ends()
            return [code for code, _, _ in found], "\n".join(stderr for _, _, stderr in found)

        return end

    return start


def with_slurm(two: Sequence[hosts.Host], folder: Path, until_the_end: contextlib.ExitStack) -> Start:
    if reason := engine.lacking():
        pytest.skip(reason)
    slurm = until_the_end.enter_context(engine.cluster(two))
    (folder / two[0].name).mkdir()

    def start(*words: str) -> Callable[[], tuple[list[int], str]]:
        typed = ["srun", "-N2", sys.executable, "-m", "scaleflow", "cluster=slurm", *words]
        environment = {**clean_environment(), **slurm}
        environment.pop(SERVER_ENV, None)  # it forks workers on this machine, not on the hosts
        process = two[0].start(typed, folder / two[0].name, environment)
        return partial(end_process, process)

    return start


def with_ray(two: Sequence[hosts.Host], folder: Path, until_the_end: contextlib.ExitStack) -> Start:
    command = OnHost(two[0], folder / two[0].name)
    cluster = until_the_end.enter_context(machines.machines(folder, command.environment, two))
    cluster.join(cores=1, host=two[1].address)

    def start(*words: str) -> Callable[[], tuple[list[int], str]]:
        typed = ("cluster=ray", f"cluster.address={cluster.address}", "cluster.workers=2", *words)
        process = command.start(*typed, **cluster.token)
        return partial(end_process, process)

    return start


def end_process(process: subprocess.Popen[str] | CommandProcess) -> tuple[list[int], str]:
    _, stderr = process.communicate(timeout=240)
    return [process.wait()], stderr


def events(run: Path) -> list[dict[str, Any]]:
    return events_in(run / "events.jsonl")


@pytest.mark.slow
def test_a_link_that_is_late_and_loses_frames_changes_no_loss(
    two: list[hosts.Host], start: Start, losses: list[float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with two[1].slowed(*FAR):
        codes, said = start(*SAME, f"hydra.run.dir={run}")()
    assert set(codes) == {0}, said
    assert of(events(run), "train/loss") == pytest.approx(losses, abs=1e-5)


@pytest.mark.slow
def test_a_link_that_is_cut_for_a_while_ends_no_run_that_may_restart(
    two: list[hosts.Host], start: Start, tmp_path: Path
) -> None:
    run, pace = tmp_path / "run", tmp_path / "slow"
    steps = (
        "training.max_steps=300",
        "training.epochs=1000",
        "training.steps_per_loop=10",
        "checkpoint.every_steps=20",
    )
    words = (*SMALL, *steps, "cluster.max_restarts=3", f"checkpoint.folder={tmp_path / 'saved'}", slow_down(pace, 1.0))
    end = start(*words, f"hydra.run.dir={run}")
    wait_for(lambda: any(event["event"] == "checkpoint" for event in events(run)))
    two[1].cut()
    try:
        time.sleep(CUT)
    finally:
        two[1].join()
    pace.unlink()
    codes, said = end()
    assert set(codes) == {0}, said
    assert only_run(tmp_path / two[0].name).info.status == "FINISHED"
    assert any(event["event"] == "restart" for event in events(run))
    assert max(event["step"] for event in events(run) if "step" in event) == 300
