"""Where the worker processes of a run are, and what tells them of each other. No TensorFlow here."""

from scaleflow.cluster.local import environments
from scaleflow.cluster.tf_config import TF_CONFIG, answers, parse, port_is_free
from scaleflow.cluster.tpu import TpuPlace, find_tpu, is_sure, no_tpu, unreachable

__all__ = [
    "TF_CONFIG",
    "TpuPlace",
    "answers",
    "environments",
    "find_tpu",
    "is_sure",
    "no_tpu",
    "parse",
    "port_is_free",
    "unreachable",
]
