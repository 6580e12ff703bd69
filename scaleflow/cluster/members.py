"""Which worker processes a plan has, and which of them this machine is."""

from __future__ import annotations

import os

from scaleflow.cluster.tf_config import TF_CONFIG, parse
from scaleflow.interfaces import Place, Plan


def place_of(plan: Plan) -> Place | None:
    """This machine's place in a cluster of several machines, or None where all workers are on this one."""
    return parse(os.environ.get(TF_CONFIG)) if plan.cluster.name == "tf_config" else None


def workers(plan: Plan) -> int:
    """How many worker processes the plan has, on all machines."""
    if plan.strategy.name != "multi_worker":
        return 1
    place = place_of(plan)
    return len(place.peers) if place else plan.cluster.workers or 2
