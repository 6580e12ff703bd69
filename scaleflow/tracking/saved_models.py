"""Downloads the SavedModel of a logged model.

It does not import TensorFlow. The contents of a store are untrusted input.
"""

from pathlib import Path

from scaleflow.errors import ConfigError
from scaleflow.tracking.model_uris import ModelReference
from scaleflow.tracking.store import MlflowTracker
from scaleflow.tracking.tracked_runs import download_artifact, find_model

#: The SavedModel within a logged model.
SAVED_MODEL = "data/saved_model"


def download_saved_model(tracker: MlflowTracker, model: ModelReference, folder: Path) -> Path:
    """Downloads the SavedModel of a logged model. Raises ConfigError if the model has no SavedModel."""
    path = download_artifact(f"{find_model(tracker, model)}/{SAVED_MODEL}", tracker.uri, folder)
    if path is None:
        raise ConfigError(
            f"{model.run_id}: its model {model.model_id} has no {SAVED_MODEL}; it is not a model of scaleflow"
        )
    return path


def download_exported(tracker: MlflowTracker, model: ModelReference, folder: Path) -> Path:
    """Downloads the folder that the worker exported. Raises ConfigError if the model has no SavedModel."""
    path = download_artifact(f"{find_model(tracker, model)}/data", tracker.uri, folder)
    if path is None or not (path / "saved_model").is_dir():
        raise ConfigError(
            f"{model.run_id}: its model {model.model_id} has no SavedModel; it is not a model of scaleflow"
        )
    return path
