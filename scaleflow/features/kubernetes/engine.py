"""Runs one launcher per pod of a Kubernetes Indexed Job. A headless Service gives each pod a host name.

The pod's index is its task, and the hosts are named `JOB-INDEX.JOB`:
https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode. The Job's podFailurePolicy (stable since
Kubernetes 1.31) decides by the command's exit code whether a pod is restarted.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from scaleflow.cluster.engines import ClusterEngine
from scaleflow.cluster.tasks import HAS_RUN, check_enough, count_servers, make_tf_config
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Cluster, Plan, Rule

#: Kubernetes sets the pod's index. The manifest sets the number of pods and the Job's name.
INDEX = "JOB_COMPLETION_INDEX"
PODS = "SCALEFLOW_PODS"
JOB = "SCALEFLOW_JOB"

#: Oldest version of Kubernetes that supports every field of the manifest.
LEAST_VERSION = "1.31"

#: Group that owns a volume's files, so that a non-root user of an image can write them.
GROUP = 1000

#: Maximum length of a host, Service or Job name, in characters.
MAX_NAME_LENGTH = 63

CONTAINER = "scaleflow"

REFUSED = 2
TERMINATED = 143
MANIFEST_HINT = "use cluster.submit=print to write the manifest of such a Job, for kubectl apply -f -"

_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_PART = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_IMAGE = re.compile(rf"(?:[\w.-]+(?::\d+)?/)?{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?")
_MEMORY = re.compile(r"\d+(?:\.\d+)?(?:[KMGTP]i|[kMGTP])?")


@dataclass(frozen=True)
class KubernetesCluster(Cluster):
    """Keys that only pods have. conf/cluster/kubernetes.yaml describes them."""

    name: str = "kubernetes"
    image: str | None = None
    job: str = "scaleflow"
    namespace: str | None = None
    memory: str | None = None
    env_from: list[str] | None = None
    volume: str | None = None
    path: str = "/scaleflow"
    port: int = field(default=2222, metadata={"at_least": 1, "at_most": 65535})
    retries: int = field(default=3, metadata={"at_least": 0})


def pod_options(plan: Plan) -> KubernetesCluster:
    assert isinstance(plan.cluster, KubernetesCluster)
    return plan.cluster


def make_pod_config(environment: Mapping[str, str], servers: int, port: int) -> str:
    """Returns the TF_CONFIG of this pod, with the variables of its `environment`. Each pod listens on `port`.

    `servers` is the number of parameter servers, or 0. Raises ConfigError if this process is not in a pod of such a
    Job, or there are too few pods.
    """
    missing = [name for name in (INDEX, PODS, JOB) if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"cluster=kubernetes: {', '.join(missing)} is not set, so this process is not in a pod of an Indexed "
            f"Job; {MANIFEST_HINT}"
        )
    index, pods = (read_number(environment, name) for name in (INDEX, PODS))
    if index >= pods:
        raise ConfigError(f"{INDEX}={index}: expected 0 to {pods - 1}, since {PODS}={pods}; {MANIFEST_HINT}")
    check_enough(PODS, pods, servers, instead="use a Job of {least} pods or more")
    job = environment[JOB]
    return make_tf_config(index, [f"{job}-{pod_index}.{job}:{port}" for pod_index in range(pods)], servers)


def read_number(environment: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"\d{1,6}", environment[name]):
        raise ConfigError(f"{name}={environment[name]}: expected a number; {MANIFEST_HINT}")
    return int(environment[name])


def manifest(
    cluster: KubernetesCluster, pods: int, words: Sequence[str], folder: str | None, grace_seconds: int
) -> str:
    """Returns a Service and a Job, in YAML, that run a command as one run.

    Args:
        cluster: the `cluster` options; `cluster.image` is required.
        pods: number of pods, each with one launcher.
        words: the arguments after `python -m scaleflow`.
        folder: the run's folder; None with a volume means a folder on it with the Job's name.
        grace_seconds: time that a pod has to save its state when it is asked to stop.

    Raises ConfigError if Kubernetes would reject a name or a quantity, or the folder is not on the volume.
    """
    check_kubernetes_values(cluster, pods)
    if cluster.volume is not None:
        folder = path_on_volume(cluster, folder)
    elif folder is not None:
        words = [*words, f'hydra.run.dir="{folder}"']
    command = pod_command(words, folder if cluster.volume else None)
    documents = [service(cluster), job(cluster, pods, command, grace_seconds=grace_seconds)]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as literal blocks."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def check_kubernetes_values(cluster: KubernetesCluster, pods: int) -> None:
    """Raises ConfigError for values that the API server or a node would reject."""
    longest = MAX_NAME_LENGTH - len(f"-{pods - 1}")
    if not _LABEL.fullmatch(cluster.job) or len(cluster.job) > longest:
        raise ConfigError(
            f"cluster.job={cluster.job}: becomes part of host names; use at most {longest} lower-case letters, digits "
            f"and -, with a letter first and no - at the end, such as {suggest_valid_name(cluster.job, longest)}"
        )
    if cluster.image is None or not _IMAGE.fullmatch(cluster.image):
        raise ConfigError(
            f"cluster.image={cluster.image}: expected an image, such as registry.example.com/team/train:1.0"
        )
    secrets = [("env_from", name) for name in cluster.env_from or []]
    for key, name in (("namespace", cluster.namespace), ("volume", cluster.volume), *secrets):
        if name is not None and not _NAME.fullmatch(name):
            raise ConfigError(f"cluster.{key}={name}: expected a name of lower-case letters, digits, - and .")
    if cluster.memory is not None and not _MEMORY.fullmatch(cluster.memory):
        raise ConfigError(f"cluster.memory={cluster.memory}: expected bytes, such as 16Gi or 512Mi")
    path = PurePosixPath(cluster.path)
    if not path.is_absolute() or len(path.parts) < 2 or ":" in cluster.path or ".." in path.parts:
        raise ConfigError(f"cluster.path={cluster.path}: expected a folder in the pods, such as /scaleflow")


def suggest_valid_name(name: str, longest: int) -> str:
    suggestion = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-0123456789")[:longest].rstrip("-")
    return suggestion or "train"


def path_on_volume(cluster: KubernetesCluster, folder: str | None) -> str:
    """Returns the absolute path of the run's folder, which must be below the volume's mount point."""
    path = PurePosixPath(cluster.path)
    run_folder = path / (cluster.job if folder is None else folder)
    if path not in run_folder.parents or ".." in run_folder.parts:
        raise ConfigError(
            f"hydra.run.dir={folder}: is not on the volume {cluster.volume}, which is mounted at {path} "
            f"(cluster.path); use hydra.run.dir={path / run_folder.name}"
        )
    return str(run_folder)


def pod_command(words: Sequence[str], folder: str | None) -> Sequence[str]:
    """Returns the pod's command. If the folder on the volume already holds a run, the command resumes it."""
    program = shlex.join(["python", "-m", "scaleflow", *words])
    if folder is None:
        script = f"exec {program}\n"
    else:
        script = SCRIPT.format(folder=shlex.quote(folder), ready=HAS_RUN, program=program)
    return ["/bin/sh", "-c", escape_expansion(script)]


#: `exec` lets the signal that stops a pod reach the launcher. The script writes nothing itself: the image's working
#: directory may belong to another user.
SCRIPT = """\
run={folder}
set -- "hydra.run.dir='$run'"
if {ready}; then
    set -- "$@" "resume='$run'"
fi
exec {program} "$@"
"""


def escape_expansion(text: str) -> str:
    """Escapes a text for Kubernetes, which expands $(NAME) as a variable and $$ as $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def make_metadata(cluster: KubernetesCluster) -> dict[str, Any]:
    """Returns the metadata of the objects of a run: their name, namespace and labels."""
    namespace = {} if cluster.namespace is None else {"namespace": cluster.namespace}
    return {"name": cluster.job, **namespace, "labels": make_labels(cluster)}


def make_labels(cluster: KubernetesCluster) -> dict[str, str]:
    return {"app.kubernetes.io/name": "scaleflow", "app.kubernetes.io/instance": cluster.job}


def service(cluster: KubernetesCluster) -> dict[str, Any]:
    """Returns the headless Service, which gives each pod a host name even before the pod is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": make_metadata(cluster),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": cluster.job},
            "ports": [{"name": "grpc", "port": cluster.port}],
        },
    }


def job(cluster: KubernetesCluster, pods: int, command: Sequence[str], grace_seconds: int) -> dict[str, Any]:
    """Returns the Indexed Job.

    A disrupted or terminated pod is replaced, and any other failure is retried `cluster.retries` times per index. A
    rejected config fails the whole Job.
    """
    exit_codes = {"containerName": CONTAINER, "operator": "In"}
    spec = pod(cluster, pods, command, grace_seconds=grace_seconds)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": make_metadata(cluster),
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "backoffLimitPerIndex": cluster.retries,
            "maxFailedIndexes": 0,
            "podReplacementPolicy": "Failed",  # TensorFlow allows only one process per task at a time
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": "Ignore", "onExitCodes": {**exit_codes, "values": [TERMINATED]}},
                    {"action": "FailJob", "onExitCodes": {**exit_codes, "values": [REFUSED]}},
                ]
            },
            "template": {"metadata": {"labels": make_labels(cluster)}, "spec": spec},
        },
    }


def pod(cluster: KubernetesCluster, pods: int, command: Sequence[str], grace_seconds: int) -> dict[str, Any]:
    """Returns the pod's spec.

    Service links are off: the variables that Kubernetes sets for Services could be mistaken for MLflow's settings.
    """
    volumes = []
    mounts = []
    if cluster.volume is not None:
        volumes.append({"name": "run", "persistentVolumeClaim": {"claimName": cluster.volume}})
        mounts.append({"name": "run", "mountPath": cluster.path})
    if cluster.gpus > 1:  # NCCL needs more shared memory than a container has by default
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    container = {
        "name": CONTAINER,
        "image": cluster.image,
        "command": list(command),
        "env": [{"name": PODS, "value": str(pods)}, {"name": JOB, "value": cluster.job}],
        **optional_entry("envFrom", [{"secretRef": {"name": name}} for name in cluster.env_from or []]),
        "ports": [{"name": "grpc", "containerPort": cluster.port}],
        **optional_entry("resources", resources(cluster)),
        **optional_entry("volumeMounts", mounts),
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_seconds,
        "subdomain": cluster.job,
        "shareProcessNamespace": True,  # otherwise the launcher is process 1, which ignores signals without a handler
        "enableServiceLinks": False,
        **({"securityContext": {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"}} if cluster.volume else {}),
        "containers": [container],
        **optional_entry("volumes", volumes),
    }


def optional_entry(key: str, value: Any) -> dict[str, Any]:
    """Returns {key: value}, or an empty dict for an empty value."""
    return {key: value} if value else {}


def resources(cluster: KubernetesCluster) -> dict[str, Any]:
    """Returns a pod's requests and limits. CPUs have no limit, so that a pod may use idle processors."""
    cpus = {} if cluster.cpus is None else {"cpu": str(cluster.cpus)}
    memory = {} if cluster.memory is None else {"memory": cluster.memory}
    gpus = {"nvidia.com/gpu": str(cluster.gpus)} if cluster.gpus else {}
    return {**optional_entry("requests", {**cpus, **memory}), **optional_entry("limits", {**memory, **gpus})}


ENGINE = ClusterEngine(
    name="kubernetes",
    section=KubernetesCluster,
    place="pods",
    variables=("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "HOSTNAME", INDEX),
    assigns_resources=True,
    restarts_failed_only=True,
    read_tf_config=lambda plan, environment: make_pod_config(environment, count_servers(plan), pod_options(plan).port),
    render_job=lambda plan, *job: manifest(pod_options(plan), *job),
    rules=(
        Rule(
            "checkpoint.max_seconds!=null & cluster=kubernetes",
            "a pod that stops at this limit looks preempted, and Kubernetes starts it again at once",
            "set activeDeadlineSeconds in the Job, and leave it null",
        ),
        Rule(
            "!cluster.image & cluster=kubernetes & cluster.submit!=null",
            "a pod needs an image with Python, scaleflow and your code",
            "set cluster.image=REGISTRY/IMAGE:TAG",
            keys=("cluster.image", "cluster"),
        ),
        Rule(
            "!cluster.volume & checkpoint!=none & cluster.submit!=null",
            "without a volume the run's folder, with its checkpoints, is deleted with the pod",
            "set cluster.volume to a PersistentVolumeClaim that all pods can write to, or use checkpoint=none",
            keys=("cluster.volume", "checkpoint"),
        ),
        Rule(
            "!cluster.volume & strategy=parameter_server & cluster.submit!=null",
            "the pods of servers read in the run's folder whether the coordinator has finished",
            "set cluster.volume to a PersistentVolumeClaim that all pods can write to",
            keys=("cluster.volume", "strategy"),
        ),
        Rule(
            "!tracking.uri & tracking!=none & !cluster.env_from & cluster.submit!=null",
            "the store would be a file in the first pod, which is deleted with the pod",
            "set tracking.uri to a server, or cluster.env_from to a Secret with MLFLOW_TRACKING_URI, or use "
            "tracking=none",
            keys=("tracking.uri", "cluster.env_from", "cluster"),
        ),
    ),
)
