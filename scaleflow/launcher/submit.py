"""`cluster.submit=print`: what starts a run on a cluster, made of the command that was typed."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence

from scaleflow.cluster import count_processes, kubernetes, slurm
from scaleflow.config.hydra_errors import override_key
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.launcher.supervisor import GRACE_SECONDS
from scaleflow.secret_masking import mask_override

#: What the script says itself, or what was for this command alone.
OWN = ("cluster.submit", "cluster.workers", "hydra.run.dir")

#: What a pod is given to stop in, beside what ends a run and what sends its last points to the store.
MORE_SECONDS = 30.0


def render_submission(plan: Plan, words: Sequence[str]) -> str:
    """The script of a run, or its manifest.

    Args:
        plan: checked.
        words: behind `scaleflow`, as they were typed.

    Raises:
        ConfigError: if a word holds a secret, which has no place in a file, or a name is none for the engine.
    """
    for word in words:
        if mask_override(word) != word:
            raise ConfigError(
                f"cluster.submit={plan.cluster.submit}: {mask_override(word)}: a script would hold this secret; "
                "put it into an environment variable NAME, and write '${oc.env:NAME}'"
            )
    kept = [word for word in words if override_key(word) not in OWN]
    kept += [f"{key}=null" for key in recipe_settings(plan, words)]
    folder = next((word.partition("=")[2] for word in reversed(words) if override_key(word) == "hydra.run.dir"), None)
    if plan.cluster.name == "kubernetes":
        seconds = math.ceil(GRACE_SECONDS + plan.tracking.flush_seconds + MORE_SECONDS)
        return kubernetes.manifest(plan.cluster, count_tasks(plan), kept, folder, seconds)
    command = [shlex.quote(word) for word in (sys.executable, "-m", "scaleflow", *kept)]
    return slurm.render_batch_script(
        " ".join(filter(None, ("scaleflow", plan.tracking.run_name))), count_tasks(plan), command, folder
    )


def recipe_settings(plan: Plan, words: Sequence[str]) -> list[str]:
    """What a recipe, and no word, says for this command alone."""
    said = {"cluster.submit": plan.cluster.submit, "cluster.workers": plan.cluster.workers}
    typed = [override_key(word) for word in words]
    return [key for key, value in said.items() if value is not None and key not in typed]


def count_tasks(plan: Plan) -> int:
    """How many launchers a run has: one to each process."""
    return sum(count_processes(plan).values())
