"""Exports the trained model to the run's folder."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from scaleflow.errors import RunError

if TYPE_CHECKING:
    from scaleflow.worker.trainer import Trainer


def export_model(trainer: Trainer) -> str:
    """Exports the model, and returns the digest of its weights.

    All workers must call it, because reading some variables needs all of them. Only the chief keeps the files. Raises
    RunError if the files cannot be written.
    """
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as temporary:
        folder = trainer.spec.files.model if trainer.spec.worker == 0 else Path(temporary)
        try:
            return trainer.setup.export(folder)
        except (OSError, tf.errors.OpError) as error:
            if isinstance(error, tf.errors.ResourceExhaustedError) and "OOM" in str(error):
                raise  # the memory of the device is full, not the disk
            reason = getattr(error, "strerror", None) or str(getattr(error, "message", None) or error)
            raise RunError(f"the model could not be exported to {folder}: {reason.splitlines()[0]}") from error
