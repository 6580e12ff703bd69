"""Records runs in MLflow and TensorBoard. Only this package imports MLflow, and only when a run is tracked."""

import os

from scaleflow.interfaces import Tracker, Tracking
from scaleflow.tracking.model_uris import locate_weights
from scaleflow.tracking.store import MlflowTracker
from scaleflow.tracking.tensorboard import TensorBoardWriter

__all__ = ["RUN_ID", "TensorBoardWriter", "locate_weights", "make_tracker"]

#: The environment variable with the ID of the run that `mlflow run` opened for this command.
RUN_ID = "MLFLOW_RUN_ID"


def make_tracker(options: Tracking, adopts: bool = False) -> Tracker:
    """Returns the tracker that the `tracking` options select.

    With `adopts`, it uses the run in MLFLOW_RUN_ID, if it is set, instead of creating one.
    """
    if options.name == "none":
        return Tracker()
    return MlflowTracker(options, os.environ.get(RUN_ID) if adopts else None)
