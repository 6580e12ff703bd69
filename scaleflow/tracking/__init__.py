"""Stores of runs. MLflow is imported here and nowhere else, and only when a run is tracked."""

import os

from scaleflow.interfaces import Tracker, Tracking
from scaleflow.tracking.initial_weights import locate_weights
from scaleflow.tracking.none import NoTracker
from scaleflow.tracking.tensorboard import TensorBoardWriter

__all__ = ["RUN_ID", "NoTracker", "TensorBoardWriter", "locate_weights", "make_tracker"]

#: The environment variable by which `mlflow run` names the run that it has opened for a command.
RUN_ID = "MLFLOW_RUN_ID"


def make_tracker(options: Tracking, adopts: bool = False) -> Tracker:
    """The tracker that `tracking` names.

    Args:
        options: what the config says.
        adopts: take the run that the environment names in MLFLOW_RUN_ID, where a new one would be made.
    """
    if options.name == "none":
        return NoTracker()
    from scaleflow.tracking.store import MlflowTracker

    return MlflowTracker(options, os.environ.get(RUN_ID) if adopts else None)
