"""`cluster.submit=print`: renders a Slurm script or a Kubernetes manifest that starts the typed command."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence

from scaleflow.cluster import kubernetes, slurm
from scaleflow.cluster.members import count_processes
from scaleflow.config.hydra_errors import override_key
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.launcher.stop import GRACE_SECONDS
from scaleflow.secret_masking import mask_override

#: Keys that the script sets itself, or that apply only to this command.
SCRIPT_KEYS = ("cluster.submit", "cluster.workers", "hydra.run.dir")

#: Seconds added to a pod's termination grace period, after ending the run and sending its last events to the store.
FLUSH_MARGIN_SECONDS = 30.0


def render_submission(plan: Plan, words: Sequence[str]) -> str:
    """Renders the script or the manifest of a run; `words` are those after `scaleflow`, as they were typed.

    Raises ConfigError if a word holds a secret, which must not be in a file, or if the engine does not allow a name.
    """
    for word in words:
        if mask_override(word) != word:
            raise ConfigError(
                f"cluster.submit={plan.cluster.submit}: {mask_override(word)}: this secret would be written into the "
                "script; put it into an environment variable NAME, and write '${oc.env:NAME}'"
            )
    arguments = [word for word in words if override_key(word) not in SCRIPT_KEYS]
    settings = {"cluster.submit": plan.cluster.submit, "cluster.workers": plan.cluster.workers}
    typed = {override_key(word) for word in words}  # what a recipe, not the user, has set must not be in the script
    arguments += [f"{key}=null" for key, value in settings.items() if value is not None and key not in typed]
    tasks = sum(count_processes(plan).values())  # each has its own launcher
    folder = next((word.partition("=")[2] for word in reversed(words) if override_key(word) == "hydra.run.dir"), None)
    if plan.cluster.name == "kubernetes":
        seconds = math.ceil(GRACE_SECONDS + plan.tracking.flush_seconds + FLUSH_MARGIN_SECONDS)
        return kubernetes.manifest(plan.cluster, tasks, arguments, folder, seconds)
    command = [shlex.quote(word) for word in (sys.executable, "-m", "scaleflow", *arguments)]
    return slurm.render_batch_script(
        " ".join(filter(None, ("scaleflow", plan.tracking.run_name))), tasks, command, folder
    )
