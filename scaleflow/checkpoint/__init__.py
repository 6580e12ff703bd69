"""What is kept of a run so that it can go on: everything, verified, in the background."""

from scaleflow.checkpoint.manager import CheckpointManager
from scaleflow.checkpoint.store import CheckpointStore, DamagedCheckpoint

__all__ = ["CheckpointManager", "CheckpointStore", "DamagedCheckpoint"]
