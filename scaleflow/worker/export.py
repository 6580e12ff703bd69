"""Exports the trained model to the run's folder."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from scaleflow.errors import RunError
from scaleflow.interfaces.events import Emit, Note

if TYPE_CHECKING:
    from scaleflow.worker.trainer import Trainer

#: Seconds to wait at the end of a run for user code that rebuilds the layers of the exported model.
LOAD_SECONDS = 30.0


class LoadCheck(threading.Thread):
    """Loads the exported Keras file in the background, to find out whether `evaluate` can load it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="load", daemon=True)
        self._folder = folder
        self._fault: str | None = None
        self.start()

    def run(self) -> None:
        from scaleflow.model import find_load_fault

        self._fault = find_load_fault(self._folder)

    def finish(self, emit: Emit) -> None:
        """Waits for the check, and reports why `evaluate` cannot load the file."""
        self.join(LOAD_SECONDS)
        if self._fault:
            emit(Note(f"model: scaleflow evaluate and model.init_from cannot load its .keras file: {self._fault}"))


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
                raise  # the device's memory is full, not the disk
            reason = getattr(error, "strerror", None) or str(getattr(error, "message", None) or error)
            raise RunError(f"the model could not be exported to {folder}: {reason.splitlines()[0]}") from error
