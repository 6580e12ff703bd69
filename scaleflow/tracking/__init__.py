"""Stores of runs. MLflow is imported here and nowhere else, and only when a run is tracked."""

from scaleflow.interfaces import Tracker, Tracking
from scaleflow.tracking.board import Board
from scaleflow.tracking.none import NoTracker
from scaleflow.tracking.origin import located

__all__ = ["Board", "NoTracker", "located", "tracker_for"]


def tracker_for(options: Tracking) -> Tracker:
    """The tracker that `tracking` names."""
    if options.name == "none":
        return NoTracker()
    from scaleflow.tracking.store import MlflowTracker

    return MlflowTracker(options)
