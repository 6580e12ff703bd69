"""A cluster engine is one module of scaleflow/cluster/ and one file of conf/cluster/: two are added here."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaleflow import cluster
from scaleflow.cluster.engines import find_engine, list_engines
from scaleflow.cluster.tasks import count_processes
from scaleflow.config.compose import ComposedConfig
from scaleflow.config.plan import list_rules
from scaleflow.config.policies import Policy
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.launcher.launch import make_host, render_submission
from scaleflow.launcher.prepare import make_plan
from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.launcher.processes.local_host import LocalHost
from tests.conftest import Command

COMMON_KEYS = """\
workers: null
servers: null
max_restarts: null
stall_seconds: null
start_seconds: 60
"""

#: An array job: something else starts one command for each process.
BATCH = """
from dataclasses import dataclass
from scaleflow.cluster.engines import ClusterEngine
from scaleflow.cluster.tasks import count_servers, make_tf_config
from scaleflow.interfaces import Cluster, Rule

@dataclass(frozen=True)
class BatchCluster(Cluster):
    name: str = "batch"
    queue: str | None = None

ENGINE = ClusterEngine(
    name="batch",
    section=BatchCluster,
    place="an array job",
    read_tf_config=lambda plan, environment: make_tf_config(
        int(environment["BATCH_INDEX"]), ["127.0.0.1:1", "127.0.0.1:2"], count_servers(plan)
    ),
    render_job=lambda plan, tasks, words, folder, _: f"submit {plan.cluster.queue} {tasks} {' '.join(words)}",
    rules=(
        Rule(
            "cluster.queue=null & cluster=batch & cluster.submit!=null",
            "a job needs a queue",
            "set cluster.queue",
            keys=("cluster.queue", "cluster"),
        ),
    ),
)
"""

#: The command starts all processes, with a host of the engine's own.
FLEET = """
from dataclasses import dataclass, field
from scaleflow.cluster.engines import ClusterEngine
from scaleflow.interfaces import Cluster

@dataclass(frozen=True)
class FleetCluster(Cluster):
    name: str = "fleet"
    ships: int = field(default=1, metadata={"at_least": 1})

def make_host(monitor):
    from scaleflow.launcher.processes.local_host import LocalHost

    class FleetHost(LocalHost):
        first_phase = "starting the fleet"

    print(f"{monitor.spec.plan.cluster.ships} ships")
    return FleetHost(None)

ENGINE = ClusterEngine(
    name="fleet",
    section=FleetCluster,
    place="a fleet",
    assigns_resources=True,
    remote_host="scaleflow.cluster.fleet:make_host",
)
"""


def write_engines(folder: Path) -> None:
    (folder / "modules").mkdir()
    (folder / "modules" / "batch.py").write_text(BATCH)
    (folder / "modules" / "fleet.py").write_text(FLEET)
    (folder / "conf" / "cluster").mkdir(parents=True)
    (folder / "conf" / "cluster" / "batch.yaml").write_text(f"name: batch\n{COMMON_KEYS}submit: null\nqueue: null\n")
    (folder / "conf" / "cluster" / "fleet.yaml").write_text(f"name: fleet\n{COMMON_KEYS}cpus: null\nships: 2\n")


@pytest.fixture
def planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compose: Callable[..., dict[str, Any]]
) -> Iterator[Callable[..., Plan]]:
    """Plans a command in which both engines can be chosen."""
    write_engines(tmp_path)
    monkeypatch.setattr(cluster, "__path__", [*cluster.__path__, str(tmp_path / "modules")])
    importlib.invalidate_caches()
    list_engines.cache_clear()

    def plan(*words: str) -> Plan:
        config = compose(f"hydra.searchpath=[file://{tmp_path}/conf]", *words)
        return make_plan(ComposedConfig(config), Policy(looks_outside=False, may_submit=True))

    yield plan
    for name in ("batch", "fleet"):
        del sys.modules[f"scaleflow.cluster.{name}"]
        delattr(cluster, name)
    list_engines.cache_clear()


def refusal(plan: Callable[..., Plan], *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(*words)
    return str(caught.value)


def test_an_engine_of_one_module_gives_tasks_jobs_and_refusals(
    planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_INDEX", "1")
    plan = planned("cluster=batch", "cluster.queue=night")
    assert plan.strategy.name == "multi_worker"
    assert plan.task is not None
    assert (plan.task.worker, plan.task.peers, count_processes(plan)) == (
        1,
        ("127.0.0.1:1", "127.0.0.1:2"),
        {"worker": 2},
    )
    assert isinstance(make_host(SimpleNamespace(spec=SimpleNamespace(plan=plan, server=None))), LocalHost)  # type: ignore[arg-type]

    submitted = planned("cluster=batch", "cluster.queue=night", "cluster.submit=print", "cluster.workers=3")
    words = ["cluster=batch", "cluster.submit=print", "cluster.workers=3"]
    assert render_submission(submitted, words) == "submit night 3 cluster=batch"

    for words, expected in [
        (["cluster=batch", "cluster.submit=print"], "cluster.queue=null with cluster=batch: a job needs a queue"),
        (["cluster=batch", "cluster.workers=2"], "cluster.workers=2 with cluster=batch: the system that starts"),
        (["cluster=batch", "strategy=pipeline"], "strategy=pipeline: all stages and replicas of a pipeline are on"),
        (["cluster=batch", "+cluster.cpus=2"], "only Fleet and Ray and Kubernetes assign cores and GPUs to processes"),
        (["cluster=batch", "+cluster.ships=2"], "cluster.ships=2 with cluster=batch: these keys are only for a fleet"),
        (["cluster=batch", "+cluster.image=a"], "image, .*: these keys are only for pods; use cluster=kubernetes"),
        (["cluster=batch", "cluster.queue=3"], "cluster.queue=3: expected text, or null"),
        (
            ["+cluster.queue=night"],
            "cluster.queue=night with cluster=local: .* only for an array job; use cluster=batch",
        ),
        (["cluster=ray", "+cluster.queue=night"], "cluster.queue=night with cluster=ray: these keys are only for an"),
        (
            ["+cluster.submit=print"],
            "only for Slurm and Batch and Kubernetes; use cluster=slurm or batch or kubernetes",
        ),
        (["cluster.name=ship"], "cluster.name=ship: expected one of local, .*batch"),
    ]:
        found = refusal(planned, *words)
        assert re.search(expected, found), found


def test_an_engine_brings_the_host_that_starts_its_processes(
    planned: Callable[..., Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned("cluster=fleet", "cluster.workers=2")
    assert (plan.strategy.name, find_engine(plan.cluster).is_started_elsewhere) == ("multi_worker", False)
    host = make_host(SimpleNamespace(spec=SimpleNamespace(plan=plan)))  # type: ignore[arg-type]
    assert (host.first_phase, capsys.readouterr().out) == ("starting the fleet", "2 ships\n")
    assert "cluster.ships=0: expected an integer, at least 1" in refusal(planned, "cluster=fleet", "cluster.ships=0")
    assert refusal(planned, "cluster=fleet", "strategy=tpu").startswith("cluster=fleet with strategy=tpu: ")


def test_the_rules_are_scaleflows_own_again_after_that() -> None:
    assert list(list_engines()) == ["local", "slurm", "tf_config", "ray", "kubernetes"]
    assert not [rule for rule in list_rules() if "an array job" in rule.reason]


@pytest.mark.slow
def test_a_run_on_an_added_engine(command: Command) -> None:
    write_engines(command.folder)
    path = f"import scaleflow.cluster\nscaleflow.cluster.__path__.append({str(command.folder / 'modules')!r})\n"
    (command.folder / "sitecustomize.py").write_text(path)
    environment = {"PYTHONPATH": str(command.folder), SERVER_ENV: ""}  # the session's server does not know the engine
    words = ("cluster=fleet", "cluster.ships=3", "training.max_steps=3", "tracking=none", "evaluation=none")
    ended = command.cold("-m", "scaleflow", "--config-dir", "conf", *words, **environment)
    assert ended.returncode == 0, ended.stderr
    assert "3 ships" in ended.stdout
    assert command.events()[-1]["status"] == "FINISHED"
