"""A launcher to each pod of an Indexed Job, with a headless Service that gives the pods names: plain Kubernetes.

A pod's index gives its task, and the name of the Job the names of all hosts (`JOB-INDEX.JOB`):
https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode. What becomes of a pod that ends follows
from the command's exit code, by the Job's podFailurePolicy, which is stable since Kubernetes 1.31.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from scaleflow.cluster.tasks import HAS_RUN, check_enough, make_tf_config
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Cluster

#: Which pod this is, set by Kubernetes; how many there are, and their Job's name, set by the manifest.
INDEX = "JOB_COMPLETION_INDEX"
PODS, JOB = "SCALEFLOW_PODS", "SCALEFLOW_JOB"

#: The least version whose Jobs have all that the manifest says.
LEAST_VERSION = "1.31"

#: The group that a volume's files belong to, so that an image's user who is not root may write them.
GROUP = 1000

#: Of a host's name, a Service's and a Job's.
LONGEST = 63

REFUSED, TERMINATED = 2, 143
INSTEAD = "cluster.submit=print writes the manifest of one, for kubectl apply -f -"

_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_PART = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_IMAGE = re.compile(rf"(?:[\w.-]+(?::\d+)?/)?{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?")
_MEMORY = re.compile(r"\d+(?:\.\d+)?(?:[KMGTP]i|[kMGTP])?")


# ---------------------------------------------------------------------------------------------
# In a pod
# ---------------------------------------------------------------------------------------------


def tf_config(environment: Mapping[str, str], servers: int, port: int) -> str:
    """The TF_CONFIG of this pod.

    Args:
        environment: of the pod.
        servers: the pods with the highest indices are so many parameter servers, and the one with index 0 is the
            coordinator; with 0 all are workers that go in step.
        port: that each of them listens on.

    Raises:
        ConfigError: if this is no pod of such a Job.
    """
    missing = [name for name in (INDEX, PODS, JOB) if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"cluster=kubernetes: {', '.join(missing)} is not set, so this is no pod of an Indexed Job; {INSTEAD}"
        )
    index, pods = (read_number(environment, name) for name in (INDEX, PODS))
    if index >= pods:
        raise ConfigError(f"{INDEX}={index}: expected 0 to {pods - 1}, since {PODS}={pods}; {INSTEAD}")
    check_enough(PODS, pods, servers, "use a Job of {least} pods or more")
    job = environment[JOB]
    return make_tf_config(index, [f"{job}-{each}.{job}:{port}" for each in range(pods)], servers)


def read_number(environment: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"\d{1,6}", environment[name]):
        raise ConfigError(f"{name}={environment[name]}: expected a number; {INSTEAD}")
    return int(environment[name])


# ---------------------------------------------------------------------------------------------
# The manifest
# ---------------------------------------------------------------------------------------------


def manifest(cluster: Cluster, pods: int, words: Sequence[str], folder: str | None, grace_seconds: int) -> str:
    """A Service and a Job, in YAML, that run a command as one run.

    Args:
        cluster: names the image.
        pods: how many launchers.
        words: of the command, behind `scaleflow`.
        folder: the run's; null for one on the volume that is named as the Job.
        grace_seconds: how long a pod that is to stop may take to save.

    Raises:
        ConfigError: if a name or a quantity is none for Kubernetes.
    """
    check_kubernetes_values(cluster, pods)
    if cluster.volume is not None:
        folder = path_on_volume(cluster, folder)
    elif folder is not None:
        words = [*words, f"hydra.run.dir={folder}"]
    said = pod_command(words, folder if cluster.volume else None)
    documents = [service(cluster), job(cluster, pods, said, grace_seconds)]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Scripts as they read, and everything where it stands."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def check_kubernetes_values(cluster: Cluster, pods: int) -> None:
    """Refuses what the API server, or a node, would not take."""
    longest = LONGEST - len(f"-{pods - 1}")
    if not _LABEL.fullmatch(cluster.job) or len(cluster.job) > longest:
        raise ConfigError(
            f"cluster.job={cluster.job}: is a part of host names; expected at most {longest} lower-case letters, "
            f"digits and -, a letter first and no - last, such as {suggest_valid_name(cluster.job, longest)}"
        )
    if cluster.image is None or not _IMAGE.fullmatch(cluster.image):
        raise ConfigError(
            f"cluster.image={cluster.image}: expected an image, such as registry.example.com/team/train:1.0"
        )
    names: dict[str, list[str | None]] = {
        "namespace": [cluster.namespace],
        "volume": [cluster.volume],
        "env_from": [*(cluster.env_from or [])],
    }
    for key, values in names.items():
        for value in values:
            if value is not None and not _NAME.fullmatch(value):
                raise ConfigError(f"cluster.{key}={value}: expected a name of lower-case letters, digits, - and .")
    if cluster.memory is not None and not _MEMORY.fullmatch(cluster.memory):
        raise ConfigError(f"cluster.memory={cluster.memory}: expected bytes, such as 16Gi or 512Mi")
    path = PurePosixPath(cluster.path)
    if not path.is_absolute() or len(path.parts) < 2 or ":" in cluster.path or ".." in path.parts:
        raise ConfigError(f"cluster.path={cluster.path}: expected a folder in the pods, such as /scaleflow")


def suggest_valid_name(name: str, longest: int) -> str:
    """A name that is taken, as near to one that is not as can be."""
    near = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-0123456789")[:longest].rstrip("-")
    return near or "train"


def path_on_volume(cluster: Cluster, folder: str | None) -> str:
    """The run's folder, below where the volume is mounted."""
    path = PurePosixPath(cluster.path)
    found = path / (cluster.job if folder is None else folder)
    if path not in found.parents or ".." in found.parts:
        raise ConfigError(
            f"hydra.run.dir={folder}: is not on the volume {cluster.volume}, which is mounted at {path} "
            f"(cluster.path); use hydra.run.dir={path / found.name}"
        )
    return str(found)


def pod_command(words: Sequence[str], folder: str | None) -> Sequence[str]:
    """What a pod executes: where the folder has a run, the command goes on with it."""
    program = shlex.join(["python", "-m", "scaleflow", *words])
    if folder is None:
        script = f"exec {program}\n"
    else:
        script = SCRIPT.format(folder=shlex.quote(folder), ready=HAS_RUN, program=program)
    return ["/bin/sh", "-c", escape_expansion(script)]


#: `exec`, so that what asks a pod to stop reaches the launcher. Nothing is written but in the run's folder: the image's
#: working directory may be another user's.
SCRIPT = """\
run={folder}
set -- hydra.run.dir="$run"
if {ready}; then
    set -- "$@" resume="$run"
fi
exec {program} "$@"
"""


def escape_expansion(text: str) -> str:
    """A text from which Kubernetes, which takes $(NAME) for a variable and $$ for $, makes the one that is meant."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def metadata(cluster: Cluster) -> dict[str, Any]:
    namespace = {} if cluster.namespace is None else {"namespace": cluster.namespace}
    return {"name": cluster.job, **namespace, "labels": labels(cluster)}


def labels(cluster: Cluster) -> dict[str, str]:
    return {"app.kubernetes.io/name": "scaleflow", "app.kubernetes.io/instance": cluster.job}


def service(cluster: Cluster) -> dict[str, Any]:
    """Gives each pod a name, from before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(cluster),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": cluster.job},
            "ports": [{"name": "grpc", "port": cluster.port}],
        },
    }


def job(cluster: Cluster, pods: int, said: Sequence[str], grace_seconds: int) -> dict[str, Any]:
    """So many pods, each with its index; all of them are started again when one is lost, and what is refused is not."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(cluster),
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "backoffLimitPerIndex": cluster.retries,
            "maxFailedIndexes": 0,
            "podReplacementPolicy": "Failed",  # TensorFlow knows of one process of an index at a time
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": "Ignore", "onExitCodes": exit_code(TERMINATED)},
                    {"action": "FailJob", "onExitCodes": exit_code(REFUSED)},
                ]
            },
            "template": {"metadata": {"labels": labels(cluster)}, "spec": pod(cluster, pods, said, grace_seconds)},
        },
    }


CONTAINER = "scaleflow"


def exit_code(code: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": [code]}


def pod(cluster: Cluster, pods: int, said: Sequence[str], grace_seconds: int) -> dict[str, Any]:
    """What a pod is made of. Of the Services around it no variables are set, which might read as MLflow's own."""
    volumes = list_volumes(cluster)
    mounts = [{"name": name, "mountPath": path} for name, path, _ in volumes]
    container = {
        "name": CONTAINER,
        "image": cluster.image,
        "command": list(said),
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
        "shareProcessNamespace": True,  # the launcher is not process 1, which is deaf to signals until it listens
        "enableServiceLinks": False,
        **({"securityContext": {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"}} if cluster.volume else {}),
        "containers": [container],
        **optional_entry("volumes", [{"name": name, **source} for name, _, source in volumes]),
    }


def optional_entry(key: str, value: Any) -> dict[str, Any]:
    """Nothing, where there is nothing to say."""
    return {key: value} if value else {}


def resources(cluster: Cluster) -> dict[str, Any]:
    """What a pod needs; of memory and GPUs it has no more, processors may be used that nobody else needs."""
    cpus = {} if cluster.cpus is None else {"cpu": str(cluster.cpus)}
    memory = {} if cluster.memory is None else {"memory": cluster.memory}
    gpus = {"nvidia.com/gpu": str(cluster.gpus)} if cluster.gpus else {}
    return {**optional_entry("requests", {**cpus, **memory}), **optional_entry("limits", {**memory, **gpus})}


def list_volumes(cluster: Cluster) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, where it is mounted, what it is): the claimed one, and for GPUs of one pod shared memory, NCCL's way."""
    found: list[tuple[str, str, dict[str, Any]]] = []
    if cluster.volume is not None:
        found.append(("run", cluster.path, {"persistentVolumeClaim": {"claimName": cluster.volume}}))
    if cluster.gpus > 1:
        found.append(("shared-memory", "/dev/shm", {"emptyDir": {"medium": "Memory"}}))
    return found
