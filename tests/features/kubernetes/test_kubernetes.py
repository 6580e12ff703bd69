"""`cluster=kubernetes`: what a pod's variables say, the manifest, and its command on hosts named as pods would be."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions

from scaleflow.errors import ConfigError
from scaleflow.features.kubernetes.engine import (
    GROUP,
    LEAST_VERSION,
    KubernetesCluster,
    escape_expansion,
    make_pod_config,
    manifest,
)
from scaleflow.launcher.processes.handover import SERVER_ENV
from tests.cluster import forked, hosts
from tests.cluster.test_several_launchers import ends
from tests.conftest import Command, clean_environment
from tests.event_log import events_in
from tests.launcher.test_supervisor import only_run, slow_down, wait_for
from tests.processes import ROOT

IMAGE = "registry.example.com/team/train:1.0"
PRINT = ("cluster=kubernetes", "cluster.submit=print", f"cluster.image={IMAGE}")


def pods(**keys: Any) -> KubernetesCluster:
    return KubernetesCluster(**{"image": IMAGE, "job": "train", **keys})


def documents(
    cluster: KubernetesCluster, count: int = 2, words: Sequence[str] = (), folder: str | None = None
) -> list[Any]:
    return list(yaml.safe_load_all(manifest(cluster, count, words, folder, 120)))


# ---------------------------------------------------------------------------------------------
# In a pod
# ---------------------------------------------------------------------------------------------


def variables(index: int, count: int = 3, **more: str) -> dict[str, str]:
    """Those of a pod."""
    return {"JOB_COMPLETION_INDEX": str(index), "SCALEFLOW_PODS": str(count), "SCALEFLOW_JOB": "train", **more}


def test_pods_are_workers_at_host_names_that_follow_from_the_job() -> None:
    told = [json.loads(make_pod_config(variables(index), 0, 2222)) for index in range(3)]
    for each in told:
        assert each["cluster"] == {"worker": ["train-0.train:2222", "train-1.train:2222", "train-2.train:2222"]}
    assert [each["task"] for each in told] == [{"type": "worker", "index": index} for index in range(3)]


def test_the_first_pod_is_the_coordinator_and_the_last_ones_are_servers() -> None:
    told = json.loads(make_pod_config(variables(2), 1, 80))
    hosts_of = {role: [f"train-{index}.train:80"] for index, role in enumerate(("chief", "worker", "ps"))}
    assert told["cluster"] == hosts_of
    assert told["task"] == {"type": "ps", "index": 0}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (
            {"JOB_COMPLETION_INDEX": ""},
            "JOB_COMPLETION_INDEX is not set, .* use cluster.submit=print to write the manifest",
        ),
        ({"JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX=3: expected 0 to 2, since SCALEFLOW_PODS=3"),
        ({"SCALEFLOW_PODS": "all"}, "SCALEFLOW_PODS=all: expected a number"),
        ({}, "SCALEFLOW_PODS=3: .* cluster.servers=2 .* use a Job of 4 pods or more"),
    ],
)
def test_a_pod_that_makes_no_sense_is_refused(told: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make_pod_config({**variables(0), **told}, 2, 2222)


# ---------------------------------------------------------------------------------------------
# The manifest
# ---------------------------------------------------------------------------------------------

EVERYTHING = pods(
    namespace="training",
    cpus=8,
    memory="16Gi",
    gpus=2,
    env_from=["mlflow", "bucket.key"],
    volume="runs",
    path="/mnt/runs",
    port=3333,
    retries=0,
)


@pytest.mark.parametrize("version", [LEAST_VERSION, *all_versions()[-3:]])
@pytest.mark.parametrize("cluster", [pods(), EVERYTHING], ids=["least", "everything"])
def test_the_manifest_is_valid_by_the_published_schema(cluster: KubernetesCluster, version: str) -> None:
    found = documents(cluster)
    assert [each["kind"] for each in found] == ["Service", "Job"]
    for each in found:
        assert kubernetes_validate.validate(each, version, strict=True) == re.match(r"\d+\.\d+", version)[0]  # type: ignore[index]
    found[1]["spec"]["podFailurePolicy"]["rules"][0]["action"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found[1], version, strict=True)


def test_manifest_holds_the_config() -> None:
    service, job = documents(EVERYTHING, 4)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for each in (service, job):
        assert (each["metadata"]["name"], each["metadata"]["namespace"]) == ("train", "training")
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (4, 4, "Indexed")
    assert job["spec"]["backoffLimitPerIndex"] == job["spec"]["maxFailedIndexes"] == 0
    assert pod["terminationGracePeriodSeconds"] == 120
    assert container["image"] == IMAGE
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "16Gi"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": "2"},
    }
    assert [each["secretRef"]["name"] for each in container["envFrom"]] == ["mlflow", "bucket.key"]
    assert container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"] == 3333
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/mnt/runs", "/dev/shm"]
    assert pod["securityContext"]["fsGroup"] == GROUP


def test_a_refusal_fails_the_job_and_a_preemption_does_not_count() -> None:
    rules = documents(pods())[1]["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert by_code == {143: "Ignore", 2: "FailJob"}  # what has failed, 1, counts
    (condition,) = [rule for rule in rules if "onPodConditions" in rule]
    assert condition["action"] == "Ignore"
    assert condition["onPodConditions"][0]["type"] == "DisruptionTarget"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"job": "Run 1"}, "cluster.job=Run 1: .* a letter first and no - at the end, such as run-1"),
        ({"job": "1"}, "such as train"),
        ({"job": "a" * 62}, "at most 61 .* such as a{61}$"),
        ({"image": "REGISTRY/IMAGE"}, "cluster.image=REGISTRY/IMAGE: expected an image, such as registry.example.com"),
        ({"namespace": "My"}, "cluster.namespace=My: expected a name"),
        ({"volume": "my_runs"}, "cluster.volume=my_runs: expected a name"),
        ({"env_from": ["mlflow", "-"]}, "cluster.env_from=-: expected a name"),
        ({"memory": "16GB"}, "cluster.memory=16GB: expected bytes, such as 16Gi"),
        ({"path": "runs"}, "cluster.path=runs: expected a folder in the pods"),
        ({"path": "/"}, "cluster.path=/: expected a folder in the pods"),
    ],
)
def test_keys_that_kubernetes_would_not_take_are_refused(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        documents(pods(**keys))


def test_host_names_are_as_long_as_they_may_be() -> None:
    documents(pods(job="a" * 61), 10)
    with pytest.raises(ConfigError, match="at most 60"):
        documents(pods(job="a" * 61), 11)


def test_the_runs_folder_is_on_the_volume() -> None:
    assert "run=/scaleflow/train\n" in manifest(pods(volume="runs"), 2, [], None, 120)
    assert "run='/scaleflow/team/my run'\n" in manifest(pods(volume="runs"), 2, [], "team/my run", 120)
    assert "exec python -m scaleflow 'hydra.run.dir=\"/tmp/run\"'\n" in manifest(pods(), 2, [], "/tmp/run", 120)
    for folder in ("/elsewhere/run", "../run", "/scaleflow"):
        with pytest.raises(ConfigError, match=rf"hydra.run.dir={folder}: .* use hydra.run.dir=/scaleflow/\w+"):
            documents(pods(volume="runs"), folder=folder)


def as_kubernetes_does(text: str) -> str:
    """A word of a container's command, as it is given to it: $(NAME) is a variable's value, $$ is $."""
    return re.sub(r"\$(\$|\(\w+\))", lambda found: "$" if found[1] == "$" else "a variable", text)


@pytest.mark.parametrize("text", ["$run", "$(SECRET)", "$$", "$$(a)", "${oc.env:NAME}", "$", 'a"$@"$'])
def test_words_come_through_as_they_were_typed(text: str) -> None:
    assert as_kubernetes_does(escape_expansion(text)) == text


def test_the_command_prints_it_and_leaves_nothing(command: Command) -> None:
    words = ("strategy=parameter_server", "cluster.workers=3", "cluster.volume=runs", "cluster.env_from=[mlflow]")
    more = ("tracking.tags={a: b}", "tracking.flush_seconds=5", "hydra.run.dir=mine")
    ended = command.python("-X", "importtime", "-m", "scaleflow", *PRINT, *words, *more)
    assert ended.returncode == 0, ended.stderr
    assert not re.search(r"\| +(tensorflow|keras|mlflow)$", ended.stderr, re.M)
    assert re.search(r"\| +hydra$", ended.stderr, re.M)
    assert not list(command.folder.iterdir())
    _, job = yaml.safe_load_all(ended.stdout)
    assert job["spec"]["completions"] == 5  # a coordinator and a server beside them
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 65
    script = job["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    kept = f"cluster=kubernetes cluster.image={IMAGE} strategy=parameter_server cluster.volume=runs"
    assert f"exec python -m scaleflow {kept} 'cluster.env_from=[mlflow]' 'tracking.tags={{a: b}}'" in script
    assert "run=/scaleflow/mine\n" in script


def test_the_example_of_the_docs_is_valid_and_names_what_it_makes(command: Command) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    (claim,) = (yaml.safe_load(text) for text in re.findall(r"<<END.*?\n(.*?)\n    END", page, re.S))
    kubernetes_validate.validate(claim, LEAST_VERSION, strict=True)
    (typed,) = re.findall(r"^    (?:python -m )?scaleflow ([^|>]*?cluster=kubernetes[^|>]*)> ", page, re.M)
    ended = command(*shlex.split(typed.replace("\\\n", " ")))
    assert ended.returncode == 0, ended.stderr
    _, job = yaml.safe_load_all(ended.stdout)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"]] == [claim["metadata"]["name"]]
    assert [each["secretRef"]["name"] for each in container["envFrom"]] == re.findall(r"secret generic (\w+)", page)
    assert [container["image"]] == re.findall(r"docker push (\S+)", page)
    assert f"job/{job['metadata']['name']}\n" in page


def test_the_files_of_the_image_exist() -> None:
    kept = (ROOT / "docs" / "kubernetes" / "Dockerfile.dockerignore").read_text()
    named = re.findall(r"^!(\S+)$", kept, re.M)
    assert set(named) >= {"pyproject.toml", "scaleflow", "conf", "hydra_plugins"}
    assert all((ROOT / name).exists() for name in named)


def test_pods_take_back_the_keys_of_a_recipe_for_the_submission(command: Command) -> None:
    recipe = command.folder / "conf" / "experiment" / "four.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\ncluster: {workers: 4, submit: print, volume: runs}\n")
    words = ("--config-dir", "conf", "cluster=kubernetes", "experiment=four", f"cluster.image={IMAGE}", "tracking=none")
    ended = command(*words)
    assert ended.returncode == 0, ended.stderr
    _, job = yaml.safe_load_all(ended.stdout)
    assert job["spec"]["completions"] == 4
    script = job["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    assert 'tracking=none cluster.submit=null cluster.workers=null "$@"' in script


GONE = """
import tensorflow as tf
from scaleflow.dataset.digits import Digits

class Source(Digits):
    def load(self, split):
        raise tf.errors.UnavailableError(None, None, "worker 1 is gone")
"""


def test_the_loss_of_a_peer_before_there_is_a_run_is_no_refusal(command: Command) -> None:
    """A refusal, 2, would fail the Job for good."""
    (command.folder / "gone.py").write_text(GONE)
    ended = command("dataset._target_=gone.Source", "tracking=none")
    assert ended.returncode == 1, ended.stderr
    assert "UnavailableError: worker 1 is gone" in ended.stderr


# ---------------------------------------------------------------------------------------------
# On hosts that are named as pods would be
# ---------------------------------------------------------------------------------------------

WORDS = (
    *("hardware=cpu", "hardware.intra_op_threads=1", "dataset=synthetic", "dataset.shape=[16]"),
    *("dataset.examples=2000", "training.epochs=1000", "evaluation=none"),
)

#: Steps of a run that is preempted: it has half a minute of waiting before it.
STEPS = 60


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[hosts.Host]]:
    if reason := hosts.lacking():
        pytest.skip(reason)
    with hosts.joined(3, tmp_path_factory.mktemp("hosts"), "train-{}.train") as joined:
        yield joined


class Pods:
    """The Job of a printed manifest: its container's command, started on each host as in a pod.

    The folder is both the volume and what a Secret's MLFLOW_TRACKING_URI leads to; each host has a working folder of
    its own, as an image gives it.
    """

    def __init__(self, among: Sequence[hosts.Host], command: Command, *words: str) -> None:
        volume = ("cluster.job=train", "cluster.volume=runs", "cluster.env_from=[mlflow]")
        self._pace = command.folder / "slow"
        printed = command(*PRINT, *volume, *words, *WORDS, slow_down(self._pace, 0.5))
        assert printed.returncode == 0, printed.stderr
        _, job = yaml.safe_load_all(printed.stdout)
        assert job["spec"]["completions"] == len(among)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        (mount,) = container["volumeMounts"]
        self.hosts, self.folder = among, command.folder
        self.run = self.folder / "volume" / "train"
        *shell, script = [as_kubernetes_does(word) for word in container["command"]]
        here = script.replace(f"run={mount['mountPath']}/", f"run={self.folder}/volume/")
        assert here.count("exec python ") == 1
        self._shell, self._script = shell, here
        self._variables = {each["name"]: each["value"] for each in container["env"]}

    def start(self) -> list[subprocess.Popen[str]]:
        return [self._start(index, host) for index, host in enumerate(self.hosts)]

    def _start(self, index: int, host: hosts.Host) -> subprocess.Popen[str]:
        own = self.folder / f"pod-{index}"
        own.mkdir(exist_ok=True)
        secret = {"MLFLOW_TRACKING_URI": f"sqlite:///{self.folder}/mlflow.db"}
        given: Mapping[str, str] = {"JOB_COMPLETION_INDEX": str(index), SERVER_ENV: host.server, **secret}
        script = self._script.replace("exec python ", f"exec {shlex.join(forked.words(host.server))} ")
        return host.start([*self._shell, script], own, {**clean_environment(), **given, **self._variables})

    def events(self) -> list[dict[str, Any]]:
        return events_in(self.run / "events.jsonl")

    def has_checkpoint(self) -> bool:
        return any(event["event"] == "checkpoint" for event in self.events())

    def preempted(self) -> list[tuple[int, str, str]]:
        """Starts them, and in mid-run does to the first pod's process what its preemption would."""
        started = self.start()
        wait_for(lambda: self.has_checkpoint() or started[0].poll() is not None)
        started[0].send_signal(signal.SIGTERM)
        found = ends(started)
        self._pace.unlink()
        return found


def losses(events: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The training loss by step."""
    key = "train/loss"
    return {event["step"]: event["values"][key] for event in events if key in event.get("values", {})}


def lives(pods_of: Pods) -> list[bool]:
    """Of each time that the run was ready whether it went on."""
    return [event.get("resumed", 0) > 0 for event in pods_of.events() if event["event"] == "ready"]


@pytest.mark.slow
def test_pods_that_are_preempted_go_on_with_the_run_and_learn_as_local_workers_do(
    three: list[hosts.Host], command: Command
) -> None:
    words = (f"training.max_steps={STEPS}", "training.steps_per_loop=1", "checkpoint.every_steps=5")
    workers = Pods(three[:2], command, "strategy=multi_worker", *words)
    said = workers.preempted()
    assert [code for code, _, _ in said] == [143, 143], said
    assert only_run(command.folder).info.status == "KILLED"
    assert workers.events()[-1]["status"] == "KILLED"
    again = ends(workers.start())
    assert [code for code, _, _ in again] == [0, 0], again
    assert only_run(command.folder).info.status == "FINISHED"
    assert lives(workers) == [False, True]
    assert "worker 1 of 2 processes; the chief, train-0.train:2222, records the run" in again[1][1]
    assert not list(command.folder.glob("pod-*/*"))  # nothing but what is on the volume

    done = ends(workers.start())  # as a pod does that was lost after the run's end
    assert [(code, "the run is finished" in out) for code, out, _ in done] == [(0, True)] * 2, done

    local = Command(command.folder / "local")
    local.folder.mkdir()
    ended = local("strategy=multi_worker", *words, *WORDS, "cluster.workers=2", "tracking=none")
    assert ended.returncode == 0, ended.stderr
    expected = losses(local.events())
    assert len(expected) == STEPS
    assert losses(workers.events()) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_servers_are_started_again_with_a_coordinator_that_was_preempted(
    three: list[hosts.Host], command: Command
) -> None:
    words = (f"training.max_steps={10 * STEPS}", "training.steps_per_loop=10", "checkpoint.every_steps=50")
    served = Pods(three, command, "strategy=parameter_server", "cluster.workers=1", *words)
    said = served.preempted()
    assert [code for code, _, _ in said] == [143, 143, 143], said
    assert "the coordinator has ended, and the run is not finished" in said[2][2]
    again = ends(served.start())
    assert [code for code, _, _ in again] == [0, 0, 0], again
    assert only_run(command.folder).info.status == "FINISHED"
    assert lives(served) == [False, True]
