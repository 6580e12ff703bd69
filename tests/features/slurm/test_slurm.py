"""`cluster=slurm`: a task's variables, the batch script, and both with a real Slurm, of this machine and of hosts."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.features.slurm.engine import expand_node_list, make_task_config
from scaleflow.interfaces import Cluster, Plan
from scaleflow.launcher.launch import describe_part
from scaleflow.launcher.prepare import note_copies
from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.runs import RunSpec
from scaleflow.worker.tasks import TrainModel
from tests.cluster import engine, forked, hosts
from tests.conftest import Command
from tests.event_log import events_in
from tests.launcher.test_supervisor import only_run, slow_down, wait_for
from tests.processes import server

SMALL = ("hardware=cpu", "dataset=synthetic", "dataset.shape=[16]", "dataset.examples=2000", "evaluation=none")


def task(number: int, count: int = 3, **more: str) -> dict[str, str]:
    """The variables of one of a step's tasks, on two machines."""
    own = {"PROCID": str(number), "NODEID": str(int(number > 1)), "JOB_ID": "7", "STEP_ID": "0"}
    step = {"STEP_NUM_TASKS": str(count), "STEP_NODELIST": "a[08,11]", "STEP_TASKS_PER_NODE": "2,1"}
    return {f"SLURM_{key}": value for key, value in {**own, **step, **more}.items()}


def test_tasks_are_workers_at_addresses_that_all_of_them_find() -> None:
    told = [json.loads(make_task_config(task(number), 0)) for number in range(3)]
    assert {json.dumps(each["cluster"]) for each in told} == {'{"worker": ["a08:10707", "a08:10708", "a11:10707"]}'}
    assert [each["task"] for each in told] == [{"type": "worker", "index": n} for n in range(3)]


def test_the_first_task_is_the_coordinator_and_the_last_ones_are_servers() -> None:
    told = json.loads(make_task_config(task(2), 1))
    assert told["cluster"] == {"chief": ["a08:10707"], "worker": ["a08:10708"], "ps": ["a11:10707"]}
    assert told["task"] == {"type": "ps", "index": 0}
    with pytest.raises(ConfigError, match=r"SLURM_STEP_NUM_TASKS=3: .* cluster.servers=2 .* srun --ntasks=4"):
        make_task_config(task(0), 2)


def test_other_jobs_have_other_ports_and_reserved_ones_are_taken() -> None:
    assert "a08:10808" in make_task_config(task(0, JOB_ID="8"), 0)
    assert "a08:10718" in make_task_config(task(0, STEP_ID="1"), 0)
    assert '"a08:12000","a08:12001","a11:12000"' in make_task_config(task(0, STEP_RESV_PORTS="12000-12001"), 0)
    assert "a08:10707" in make_task_config(task(0, STEP_RESV_PORTS="12000"), 0)  # not enough of them


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("one", ["one"]),
        ("a,b", ["a", "b"]),
        ("gpu[1-3,07],x", ["gpu1", "gpu2", "gpu3", "gpu07", "x"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
    ],
)
def test_lists_of_machines(text: str, names: list[str]) -> None:
    assert expand_node_list(text) == names


def test_tasks_that_are_dealt_out_otherwise_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"DISTRIBUTION=cyclic.*use srun --distribution=block"):
        make_task_config(task(1, NODEID="1", DISTRIBUTION="cyclic"), 0)
    with pytest.raises(ConfigError, match=r"TASKS_PER_NODE=1, task 0 on machine 0.*use srun --distribution=block"):
        make_task_config(task(0, STEP_TASKS_PER_NODE="1"), 0)


def script(command: Command, *words: str, **environment: str) -> str:
    ended = command("cluster=slurm", "cluster.submit=print", *words, **environment)
    assert ended.returncode == 0, ended.stderr
    assert not (command.folder / "outputs").exists()
    return ended.stdout


def test_the_script_starts_a_task_on_each_machine_with_the_words_that_were_typed(command: Command) -> None:
    words = ("strategy=parameter_server", "cluster.workers=3", "tracking.tags={a: b}", "hydra.run.dir=/shared/my run")
    text = script(command, *words)
    assert "#SBATCH --nodes=5\n" in text
    assert "-m scaleflow cluster=slurm strategy=parameter_server 'tracking.tags={a: b}' \\\n" in text
    assert "run='/shared/my run'\n" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


# ---------------------------------------------------------------------------------------------
# With Slurm
# ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm() -> Iterator[Mapping[str, str]]:
    if reason := engine.lacking():
        pytest.skip(reason)
    with engine.cluster() as environment:
        yield environment


def ran(command: Command, slurm: Mapping[str, str], *words: str) -> str:
    environment = {**command.environment, **slurm}
    return subprocess.run(
        words, cwd=command.folder, env=environment, capture_output=True, text=True, timeout=300, check=True
    ).stdout


@pytest.mark.parametrize(
    ("variable", "what", "words"),
    [
        ("SLURM_STEP_NUM_TASKS", "srun", "cluster=slurm"),
        ("OMPI_COMM_WORLD_SIZE", "mpirun", "cluster=slurm, and start it with srun"),
    ],
)
def test_copies_of_a_command_that_joins_none_of_them_are_noted_or_refused(
    plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, what: str, words: str
) -> None:
    spec = RunSpec(plan(), tmp_path, 0.0, TrainModel())
    for count, lines in (("1", 0), ("", 0), ("2", 1)):
        monkeypatch.setenv(variable, count)
        assert len(describe_part(spec, False)) == lines
    (line,) = describe_part(spec, False)
    assert line == (
        f"note: {what} has started this command 2 times ({variable}), and each is a whole run; for one run add "
        f"strategy=multi_worker {words}"
    )
    assert describe_part(replace(spec, parent="sweep"), False) == [], "the sweep says it once"
    for strategy in ("multi_worker", "parameter_server"):
        with pytest.raises(ConfigError, match=f"strategy={strategy}: {what} has started .* add {words}$"):
            note_copies(plan(f"strategy={strategy}"))
    assert note_copies(replace(plan(), cluster=Cluster(name="slurm"))) is None


@pytest.mark.slow
def test_a_step_of_two_tasks_is_one_run_that_learns_as_two_local_workers_do(
    slurm: Mapping[str, str], tmp_path: Path
) -> None:
    here, there = Command(tmp_path / "here"), Command(tmp_path / "there")
    for command in (here, there):
        command.folder.mkdir()
    words = (*SMALL, "strategy=multi_worker", "training.epochs=2")
    task = (*forked.words(server()), "-m", "scaleflow", *words)
    said = ran(there, slurm, "srun", "-n2", *task, "cluster=slurm", "hydra.run.dir=run")
    assert "worker 1 of 2 processes" in said
    local = here(*words, "cluster.workers=2")
    assert local.returncode == 0, local.stderr
    found = [only_run(command.folder) for command in (here, there)]
    assert [run.info.status for run in found] == ["FINISHED"] * 2
    state = json.loads((there.folder / "run" / "record.json").read_text())  # the folder is both tasks'
    assert (state["run_id"], state["done"]) == (found[1].info.run_id, True)
    for key in ("train/loss", "val/loss", "test/loss"):
        assert found[0].data.metrics[key] == pytest.approx(found[1].data.metrics[key], rel=1e-6)


@pytest.mark.slow
def test_a_job_that_is_stopped_has_a_checkpoint_and_goes_on_when_it_is_queued_again(
    slurm: Mapping[str, str], command: Command
) -> None:
    pace = command.folder / "slow"
    steps = (
        "training.max_steps=200",
        "training.epochs=1000",
        "training.steps_per_loop=10",
        "checkpoint.every_steps=20",
    )
    text = script(command, *SMALL, "strategy=multi_worker", *steps, slow_down(pace, 1.0))
    text = text.replace("--nodes=2", "--nodes=1").replace("-node=1", "-node=2")
    python = f"{shlex.quote(sys.executable)} -m"
    assert text.count(python) == 1
    (command.folder / "job.sh").write_text(text.replace(python, f"{shlex.join(forked.words(server()))} -m"))
    job = ran(command, slurm, "sbatch", "--parsable", "job.sh").strip()
    run = command.folder / "outputs" / f"slurm-{job}"

    reported = run / "events.jsonl"

    def events() -> list[str]:
        return re.findall(r'"event": "(\w+)"', reported.read_text()) if reported.exists() else []

    def state() -> str:
        """Asked for twice a second at most, since each time is a process."""
        time.sleep(0.5)
        return ran(command, slurm, "squeue", "-h", "-a", "-j", job, "-o", "%T").strip()

    def log() -> str:
        return "".join(path.read_text() for path in command.folder.glob("scaleflow-*.log"))

    try:
        wait_for(lambda: "checkpoint" in events(), 300)
        ran(command, slurm, "scancel", "--signal=TERM", f"{job}.0")
        wait_for(lambda: state() == "PENDING", 120)  # the script has put it there, after the command's end
        assert only_run(command.folder).info.status == "KILLED", log()
        pace.unlink()
        # By itself it would wait for two minutes; at once, what it was allowed to run with before is still taken back.
        ran(command, slurm, "scontrol", "update", f"JobId={job}", "StartTime=now+5seconds")
        wait_for(lambda: state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), 300)
    finally:
        subprocess.run(["scancel", job], env={**command.environment, **slurm}, timeout=240, check=False)
    ended = only_run(command.folder)
    assert ended.info.status == "FINISHED", log()
    ready = [event for event in map(json.loads, reported.read_text().splitlines()) if event["event"] == "ready"]
    assert [event.get("resumed", 0) > 0 for event in ready] == [False, True]


@pytest.fixture
def four(tmp_path: Path) -> Iterator[tuple[Mapping[str, str], list[hosts.Host]]]:
    """A Slurm of four machines, which share their files. Commands are typed on the first."""
    if reason := engine.lacking() or hosts.lacking():
        pytest.skip(reason)
    with hosts.joined(4, tmp_path) as machines, engine.cluster(machines) as environment:
        yield environment, machines


@pytest.mark.slow
def test_a_job_whose_machine_dies_goes_on_on_the_others(
    four: tuple[Mapping[str, str], list[hosts.Host]], command: Command
) -> None:
    slurm, machines = four
    environment = {**command.environment, **slurm}
    environment.pop(SERVER_ENV)  # it forks workers on this machine, not on the hosts
    pace = command.folder / "slow"
    steps = (
        "training.max_steps=300",
        "training.epochs=1000",
        "training.steps_per_loop=10",
        "checkpoint.every_steps=20",
    )
    words = (*SMALL, "strategy=multi_worker", "cluster.workers=3", "training.global_batch_size=48")
    (command.folder / "job.sh").write_text(script(command, *words, *steps, slow_down(pace, 1.0)))

    def say(*typed: str) -> str:
        return engine.said(typed, environment, machines[0])

    job = say("sbatch", "--parsable", f"--chdir={command.folder}", str(command.folder / "job.sh"))
    run = command.folder / "outputs" / f"slurm-{job}"

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in events_in(run / "events.jsonl") if event["event"] == kind]

    def state() -> str:
        time.sleep(0.5)
        return say("squeue", "-h", "-a", "-j", job, "-o", "%T")

    def log() -> str:
        return "".join(path.read_text() for path in command.folder.glob("scaleflow-*.log"))

    try:
        wait_for(lambda: events("checkpoint") or state() not in ("PENDING", "CONFIGURING", "RUNNING"), 300)
        assert events("checkpoint"), log()
        names = expand_node_list(say("squeue", "-h", "-j", job, "-o", "%N"))
        assert len(names) == 3
        lost = next(host for host in machines if host.name == names[-1])
        lost.cut()
        for pid in lost.pids():
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: state() == "PENDING")
        assert only_run(command.folder).info.status in ("FAILED", "KILLED"), log()
        pace.unlink()
        say("scontrol", "update", f"JobId={job}", "StartTime=now+5seconds")
        wait_for(lambda: state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), 300)
        names = expand_node_list(say("squeue", "-h", "-t", "all", "-j", job, "-o", "%N"))
        assert (len(names), lost.name in names) == (3, False)
    finally:
        say("scancel", job)
    assert only_run(command.folder).info.status == "FINISHED", log()
    first, second = events("ready")
    assert second["resumed"] > 0
    assert [event["params"]["resolved.replicas"] for event in (first, second)] == ["3", "3"]
