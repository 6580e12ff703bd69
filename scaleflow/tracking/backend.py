"""An MLflow project backend: `mlflow run . --backend scaleflow --backend-config cluster.json`.

It runs the project on this machine, as MLflow's own `local` does, with the `cluster` settings that the file names:

    {"cluster": "local", "cluster.workers": 2, "cluster.max_restarts": 3}
    {"cluster": {"workers": 2, "max_restarts": 3}}

They become overrides of the command, so that they are checked as such, and are params of the run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from mlflow.exceptions import ExecutionException
from mlflow.projects import _wait_for, utils
from mlflow.projects.backend.local import LocalBackend

GROUP = "cluster"

#: What MLflow puts into the same dictionary.
MLFLOWS = frozenset(value for name, value in vars(utils).items() if name.startswith("PROJECT_"))


class Backend(LocalBackend):  # type: ignore[misc]  # MLflow has no types that hold
    """MLflow's local backend with a command's `cluster` settings from a file."""

    def run(
        self,
        project_uri: str,
        entry_point: str,
        params: dict[str, str],
        version: str | None,
        backend_config: dict[str, Any],
        tracking_uri: str,
        experiment_id: str,
    ) -> Any:
        """Called by MLflow; comes back when the run has ended.

        Raises:
            ExecutionException: if it failed, or the file says something else than `cluster` settings.
        """
        own = {key: value for key, value in backend_config.items() if key not in MLFLOWS}
        words = [*([params["overrides"]] if params.get("overrides") else []), *map(shlex.quote, to_overrides(own))]
        given = {**params, "overrides": " ".join(words)} if words else params
        waits = {**backend_config, utils.PROJECT_SYNCHRONOUS: True}
        submitted = super().run(project_uri, entry_point, given, version, waits, tracking_uri, experiment_id)
        if not backend_config.get(utils.PROJECT_SYNCHRONOUS):
            _wait_for(submitted)  # raises where it failed: the exit code of `mlflow run` is to tell
        return submitted


def to_overrides(config: Mapping[str, Any]) -> list[str]:
    """A command's words for the settings of a file.

    Raises:
        ExecutionException: which MLflow shows, for a key that is no setting of the group `cluster`.
    """
    words: list[str] = []
    for key, value in config.items():
        if key != GROUP and not key.startswith(f"{GROUP}."):
            raise ExecutionException(
                f"--backend-config: {key}: expected settings of the config group {GROUP}, such as "
                f'{{"{GROUP}": "local", "{GROUP}.workers": 2}}; other keys go into -P overrides=...'
            )
        if isinstance(value, Mapping):
            words += [f"{key}.{name}={parse_yaml_value(inner)}" for name, inner in value.items()]
        else:
            words.append(f"{key}={parse_yaml_value(value)}")
    return words


def parse_yaml_value(value: Any) -> str:
    """A value as Hydra reads it."""
    return value if isinstance(value, str) else json.dumps(value)
