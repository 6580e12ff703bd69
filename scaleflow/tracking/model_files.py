"""Uploads the files of a logged model one by one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient


def upload_model_file(client: MlflowClient, model_id: str, path: Path, folder: str) -> None:
    """Adds a file to a logged model.

    Args:
        client: of the store that has the model.
        model_id: the logged model's ID.
        path: the file.
        folder: where the file comes in the model's folder, with `/` between names; `.` is that folder itself.
    """
    # Up to MLflow 3.14 `log_model_artifact` has no parameter for the folder. A folder with one link works in all.
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary, folder)
        target.mkdir(parents=True, exist_ok=True)
        (target / path.name).symlink_to(path.absolute())
        client.log_model_artifacts(model_id, temporary)
