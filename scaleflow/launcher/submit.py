"""`cluster.submit=print`: what starts a run on a cluster, made of the command that was typed."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence

from scaleflow.cluster import kubernetes, roles, slurm
from scaleflow.config.explain import key_of
from scaleflow.errors import Refusal
from scaleflow.interfaces import Plan
from scaleflow.launcher.launch import GRACE_SECONDS
from scaleflow.masking import masked_override

#: What the script says itself, or what was for this command alone.
OWN = ("cluster.submit", "cluster.workers", "hydra.run.dir")

#: What a pod is given to stop in, beside what ends a run and what sends its last points to the store.
MORE_SECONDS = 30.0


def submission(plan: Plan, words: Sequence[str]) -> str:
    """The script of a run, or its manifest.

    Args:
        plan: checked.
        words: behind `scaleflow`, as they were typed.

    Raises:
        Refusal: if a word holds a secret, which has no place in a file, or a name is none for the engine.
    """
    for word in words:
        if masked_override(word) != word:
            raise Refusal(
                f"cluster.submit={plan.cluster.submit}: {masked_override(word)}: a script would hold this secret; "
                "put it into an environment variable NAME, and write '${oc.env:NAME}'"
            )
    kept = [word for word in words if key_of(word) not in OWN]
    kept += [f"{key}=null" for key in set_elsewhere(plan, words)]
    folder = next((word.partition("=")[2] for word in reversed(words) if key_of(word) == "hydra.run.dir"), None)
    if plan.cluster.name == "kubernetes":
        seconds = math.ceil(GRACE_SECONDS + plan.tracking.flush_seconds + MORE_SECONDS)
        return kubernetes.manifest(plan.cluster, tasks_of(plan), kept, folder, seconds)
    command = [shlex.quote(word) for word in (sys.executable, "-m", "scaleflow", *kept)]
    return slurm.script(" ".join(filter(None, ("scaleflow", plan.tracking.run_name))), tasks_of(plan), command, folder)


def set_elsewhere(plan: Plan, words: Sequence[str]) -> list[str]:
    """What a recipe, and no word, says for this command alone."""
    said = {"cluster.submit": plan.cluster.submit, "cluster.workers": plan.cluster.workers}
    typed = [key_of(word) for word in words]
    return [key for key, value in said.items() if value is not None and key not in typed]


def tasks_of(plan: Plan) -> int:
    """How many launchers a run has: one to each process."""
    return sum(roles(plan).values())
