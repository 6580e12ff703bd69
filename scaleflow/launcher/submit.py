"""`cluster.submit=print`: renders a Slurm script or a Kubernetes manifest that starts the typed command."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scaleflow.cluster.engines import find_engine
from scaleflow.cluster.members import count_processes
from scaleflow.config.hydra_errors import override_key, parse_overrides
from scaleflow.config.words import split_flags
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.interfaces.secret_masking import mask_override
from scaleflow.launcher.processes.stop import GRACE_SECONDS

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
    folders = [
        str(each.value()) for each in parse_overrides(split_flags(words)[1]) if each.key_or_group == "hydra.run.dir"
    ]
    folder = folders[-1] if folders else None
    if folder is not None and "'" in folder:
        raise ConfigError(f"hydra.run.dir={folder}: the script cannot hold an apostrophe here; choose another folder")
    seconds = math.ceil(GRACE_SECONDS + plan.tracking.flush_seconds + FLUSH_MARGIN_SECONDS)
    render_job = find_engine(plan.cluster).render_job
    assert render_job is not None  # a rule refuses `cluster.submit` otherwise
    return render_job(plan, tasks, arguments, folder, seconds)
