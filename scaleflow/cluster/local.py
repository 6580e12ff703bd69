"""Runs all processes on this machine."""

from scaleflow.cluster.engines import ClusterEngine
from scaleflow.interfaces import Rule

#: Maximum number of workers that one command starts on its machine.
MAX_LOCAL_WORKERS = 64

ENGINE = ClusterEngine(
    name="local",
    is_local=True,
    rules=(
        Rule(
            f"cluster.workers>{MAX_LOCAL_WORKERS} & cluster=local",
            f"one machine runs at most {MAX_LOCAL_WORKERS} workers",
            "use cluster=ray, slurm or kubernetes for more",
        ),
    ),
)
