"""Where the worker processes of a run are, and what tells them of each other. No TensorFlow here."""

from scaleflow.cluster.gpus import GPUS, assigned_hardware, gpu_environments, share, visible_gpus
from scaleflow.cluster.local import environments
from scaleflow.cluster.members import STARTED_HERE, config_of, in_step, names, place_of, roles, silent, workers
from scaleflow.cluster.ray import check as check_ray
from scaleflow.cluster.tasks import tf_configs
from scaleflow.cluster.tf_config import (
    EXAMPLE,
    EXAMPLE_WITH_SERVERS,
    NO_PROXY,
    TF_CONFIG,
    answers,
    parse,
    past_proxies,
    port_is_free,
    waited_until_ended,
    without_evaluator,
)
from scaleflow.cluster.tpu import TpuPlace, find_tpu, is_sure, no_tpu, unreachable

__all__ = [
    "EXAMPLE",
    "EXAMPLE_WITH_SERVERS",
    "GPUS",
    "NO_PROXY",
    "STARTED_HERE",
    "TF_CONFIG",
    "TpuPlace",
    "answers",
    "assigned_hardware",
    "check_ray",
    "config_of",
    "environments",
    "find_tpu",
    "gpu_environments",
    "in_step",
    "is_sure",
    "names",
    "no_tpu",
    "parse",
    "past_proxies",
    "place_of",
    "port_is_free",
    "roles",
    "share",
    "silent",
    "tf_configs",
    "unreachable",
    "visible_gpus",
    "waited_until_ended",
    "without_evaluator",
    "workers",
]
