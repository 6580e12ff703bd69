"""Private names of MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

#: (table, column) of an SQL store with the absolute addresses of artifact folders.
LOCATION_COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def use_tracking_uri(uri: str) -> AbstractContextManager[None]:
    """Returns a context with another tracking URI. The public functions cannot restore an unset URI."""
    from mlflow.tracking._tracking_service.utils import _use_tracking_uri

    changed: AbstractContextManager[None] = _use_tracking_uri(uri)
    return changed


def write_input_example(model: Any, example: Any, folder: Path) -> None:
    """Writes a model's input example as MLflow does when it logs a model, and records it in the model."""
    from mlflow.models.utils import _save_example

    _save_example(model, example, str(folder))


def write_environment(folder: Path, requirements: Sequence[str]) -> None:
    """Writes a model's environment in MLflow's files for conda and for virtual environments."""
    from mlflow.utils.environment import _mlflow_conda_env, _PythonEnv

    _PythonEnv.current().to_yaml(str(folder / "python_env.yaml"))
    _mlflow_conda_env(path=str(folder / "conda.yaml"), additional_pip_deps=list(requirements), install_mlflow=False)


def wait_for_project(submitted: Any) -> None:
    """Waits for the run of a project, and raises `ExecutionException` if it fails, as `mlflow run` does."""
    from mlflow.projects import _wait_for

    _wait_for(submitted)


def draw_run_name() -> str:
    """Draws a run's name from Python's random numbers, as MLflow does for a run without one."""
    from mlflow.utils.name_utils import _generate_random_name

    name: str = _generate_random_name()
    return name
