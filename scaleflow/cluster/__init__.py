"""Finds the processes of a run and gives each its role, peers and GPUs. This package does not import TensorFlow."""

from scaleflow.cluster.gpus import GPUS, assigned_hardware, gpu_environments, share, visible_gpus
from scaleflow.cluster.local import environments
from scaleflow.cluster.members import (
    STARTED_HERE,
    count_processes,
    count_synchronous_workers,
    count_workers,
    find_unreachable,
    process_names,
    read_tf_config,
)
from scaleflow.cluster.ray import check_address as check_ray
from scaleflow.cluster.tasks import make_tf_configs
from scaleflow.cluster.tf_config import (
    EXAMPLE,
    EXAMPLE_WITH_SERVERS,
    NO_PROXY,
    TF_CONFIG,
    is_listening,
    no_proxy_for,
    parse_tf_config,
    port_is_free,
    wait_until_closed,
    without_evaluator,
)
from scaleflow.cluster.tpu import explain_no_tpu, explain_unreachable, find_tpu, is_sure

__all__ = [
    "EXAMPLE",
    "EXAMPLE_WITH_SERVERS",
    "GPUS",
    "NO_PROXY",
    "STARTED_HERE",
    "TF_CONFIG",
    "assigned_hardware",
    "check_ray",
    "count_processes",
    "count_synchronous_workers",
    "count_workers",
    "environments",
    "explain_no_tpu",
    "explain_unreachable",
    "find_tpu",
    "find_unreachable",
    "gpu_environments",
    "is_listening",
    "is_sure",
    "make_tf_configs",
    "no_proxy_for",
    "parse_tf_config",
    "port_is_free",
    "process_names",
    "read_tf_config",
    "share",
    "visible_gpus",
    "wait_until_closed",
    "without_evaluator",
]
