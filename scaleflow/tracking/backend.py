"""Defines an MLflow project backend: `mlflow run . --backend scaleflow --backend-config cluster.json`.

Like MLflow's `local` backend, it runs the project on this machine. The file contains `cluster` settings:

    {"cluster": "local", "cluster.workers": 2, "cluster.max_restarts": 3}
    {"cluster": {"workers": 2, "max_restarts": 3}}

The settings become overrides of the command, so scaleflow validates them and logs them as params of the run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from mlflow.exceptions import ExecutionException
from mlflow.projects import utils
from mlflow.projects.backend.local import LocalBackend

from scaleflow.compat.mlflow import wait_for_project

GROUP = "cluster"

#: Keys that MLflow adds to the same dictionary.
MLFLOW_KEYS = frozenset(value for name, value in vars(utils).items() if name.startswith("PROJECT_"))


class Backend(LocalBackend):  # type: ignore[misc]  # MLflow's types are incomplete
    """MLflow's local backend, which adds `cluster` settings from a file to the command."""

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
        """Runs the project until the run has ended. MLflow calls this method.

        Raises `ExecutionException` if the run failed, or if the file has a key that is not a `cluster` setting.
        """
        settings = {key: value for key, value in backend_config.items() if key not in MLFLOW_KEYS}
        words = [*([params["overrides"]] if params.get("overrides") else []), *map(shlex.quote, to_overrides(settings))]
        project_params = {**params, "overrides": " ".join(words)} if words else params
        config = {**backend_config, utils.PROJECT_SYNCHRONOUS: True}
        submitted = super().run(project_uri, entry_point, project_params, version, config, tracking_uri, experiment_id)
        if not backend_config.get(utils.PROJECT_SYNCHRONOUS):
            wait_for_project(submitted)  # raises if the run failed, so that `mlflow run` exits with an error
        return submitted


def to_overrides(config: Mapping[str, Any]) -> list[str]:
    """Converts the settings of a file to Hydra overrides.

    Raises `ExecutionException` if a key is not a setting of the group `cluster`. MLflow prints its message.
    """
    words: list[str] = []
    for key, value in config.items():
        if key != GROUP and not key.startswith(f"{GROUP}."):
            raise ExecutionException(
                f"--backend-config: {key}: expected keys of the config group {GROUP}, such as "
                f'{{"{GROUP}": "local", "{GROUP}.workers": 2}}; other keys go into -P overrides=...'
            )
        if isinstance(value, Mapping):
            words += [f"{key}.{name}={parse_yaml_value(inner)}" for name, inner in value.items()]
        else:
            words.append(f"{key}={parse_yaml_value(value)}")
    return words


def parse_yaml_value(value: Any) -> str:
    """Formats a value for Hydra. Strings stay unquoted."""
    return value if isinstance(value, str) else json.dumps(value)
