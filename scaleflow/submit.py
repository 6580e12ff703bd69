"""`cluster.submit=print`: what starts a run on a cluster, made of the command that was typed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from scaleflow.cluster import slurm
from scaleflow.errors import Refusal
from scaleflow.explain import key_of
from scaleflow.interfaces import Plan
from scaleflow.masking import masked_override

#: What the script says itself, or what was for this command alone.
OWN = ("cluster.submit", "cluster.workers", "hydra.run.dir")


def submission(plan: Plan, words: Sequence[str]) -> str:
    """The script of a run.

    Args:
        plan: checked.
        words: behind `scaleflow`, as they were typed.

    Raises:
        Refusal: if a word holds a secret, which has no place in a file.
    """
    for word in words:
        if masked_override(word) != word:
            raise Refusal(
                f"cluster.submit={plan.cluster.submit}: {masked_override(word)}: a script would hold this secret; "
                "put it into an environment variable NAME, and write '${oc.env:NAME}'"
            )
    kept = [word for word in words if key_of(word) not in OWN]
    folder = next((word.partition("=")[2] for word in reversed(words) if key_of(word) == "hydra.run.dir"), None)
    command = [shlex.quote(word) for word in (sys.executable, "-m", "scaleflow", *kept)]
    servers = 1 + (plan.cluster.servers or 1) if plan.strategy.name == "parameter_server" else 0
    several = plan.strategy.name in ("multi_worker", "parameter_server")
    tasks = servers + (plan.cluster.workers or (2 if several else 1))
    return slurm.script(" ".join(filter(None, ("scaleflow", plan.tracking.run_name))), tasks, command, folder)
