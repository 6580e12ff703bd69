"""Checkpoints: the complete state of a run, written in the background and verified."""

from scaleflow.checkpoint.manager import CheckpointManager
from scaleflow.checkpoint.store import CheckpointStore, DamagedCheckpoint
