"""Where the worker processes of a run are, and what tells them of each other. No TensorFlow here."""

from scaleflow.cluster.local import environments
from scaleflow.cluster.members import place_of, workers
from scaleflow.cluster.tf_config import EXAMPLE, TF_CONFIG, answers, parse, port_is_free

__all__ = ["EXAMPLE", "TF_CONFIG", "answers", "environments", "parse", "place_of", "port_is_free", "workers"]
