"""Reads TF_CONFIG, the environment variable that gives a process its task and the addresses of all tasks.

    {"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}

https://www.tensorflow.org/guide/distributed_training#TF_CONFIG
"""

import json
from typing import Any

from scaleflow.cluster.engines import ClusterEngine
from scaleflow.cluster.network import is_address
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Rule, TaskInfo

TF_CONFIG = "TF_CONFIG"
#: The roles, in the order of the processes' numbers.
ROLES = ("chief", "worker", "ps")
#: A role of TensorFlow's estimators that scaleflow does not support.
EVALUATOR = "evaluator"

EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


def parse_tf_config(text: str | None) -> TaskInfo:
    """Returns this process's task and the addresses of all processes.

    The numbers of processes have the order chief, workers, parameter servers (`ps`). Without a `chief`, worker 0 is
    the chief. Raises ConfigError if TF_CONFIG is missing or invalid.
    """
    if not text:
        raise ConfigError(
            f"cluster=tf_config: the environment variable TF_CONFIG is not set; set it, for example to {EXAMPLE}"
        )
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"TF_CONFIG={text[:60]}: is not valid JSON ({error}); expected for example {EXAMPLE}"
        ) from None
    cluster, task = split_sections(config)
    chief = parse_addresses(cluster, "chief")
    workers = parse_addresses(cluster, "worker")
    servers = parse_addresses(cluster, "ps")
    if not chief and not workers:
        raise ConfigError(f"TF_CONFIG: cluster names no worker; expected for example {EXAMPLE}")
    if servers and not (chief and workers):
        raise ConfigError("TF_CONFIG: cluster names ps, which also needs a chief and at least one worker")
    if len(chief) > 1:
        raise ConfigError(f"TF_CONFIG: cluster.chief={format_json(chief)}: expected one address")
    return TaskInfo(task_index(cluster, task), (*chief, *workers, *servers), len(servers))


def split_sections(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the sections `cluster` and `task`, after checking the roles."""
    sections = config if isinstance(config, dict) else {}
    cluster = sections.get("cluster")
    task = sections.get("task")
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise ConfigError(f"TF_CONFIG: expected the keys `cluster` and `task`, for example {EXAMPLE}")
    if EVALUATOR in cluster or task.get("type") == EVALUATOR:
        raise ConfigError(
            "TF_CONFIG: the role evaluator: the training processes validate by themselves; remove evaluator from "
            "cluster, and start no process for it"
        )
    for role in cluster:
        if role not in ROLES:
            raise ConfigError(f"TF_CONFIG: there is no role {role}; use one of {', '.join(ROLES)}")
    return cluster, task


def parse_addresses(cluster: dict[str, Any], role: str) -> list[str]:
    """Returns the addresses of a role; [] if the cluster does not name it."""
    addresses = cluster.get(role, [])
    if not isinstance(addresses, list) or not all(isinstance(text, str) and is_address(text) for text in addresses):
        raise ConfigError(f"TF_CONFIG: cluster.{role}={format_json(addresses)}: expected a list of HOST:PORT")
    return addresses


def task_index(cluster: dict[str, Any], task: dict[str, Any]) -> int:
    """Returns the number of this process among all processes."""
    role = task.get("type")
    index = task.get("index")
    if role not in cluster:
        raise ConfigError(f"TF_CONFIG: task.type={format_json(role)}: the cluster has only {', '.join(cluster)}")
    count = len(cluster[role])
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise ConfigError(
            f"TF_CONFIG: task.index={format_json(index)}: expected 0 to {count - 1}, one of cluster.{role}"
        )
    earlier_roles = ROLES[: ROLES.index(role)]
    return index + sum(len(cluster.get(earlier, [])) for earlier in earlier_roles)


def format_json(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


ENGINE = ClusterEngine(
    name="tf_config",
    rules=(
        Rule(
            "strategy=parameter_server & cluster=tf_config",
            "TF_CONFIG names no parameter servers (ps)",
            "add a chief, worker and ps, or use strategy=multi_worker",
            only_if=lambda p: p.task is None or not p.task.servers,
        ),
    ),
)
