"""A callback that makes a run as slow as a test needs it, at no cost: nothing computes while it waits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import keras


class Pace(keras.callbacks.Callback):
    """Waits behind each call of the loop as long as there is a file.

    Args:
        path: the file.
        seconds: how long.
    """

    def __init__(self, path: str, seconds: float) -> None:
        super().__init__()
        self._path = Path(path)
        self._seconds = seconds

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._path.exists():
            time.sleep(self._seconds)


def slow_down(path: Path, seconds: float) -> str:
    """The word for a run that is slow until the file, which this makes, is taken away."""
    path.touch()
    return f"training.callbacks=[{{_target_: {Pace.__module__}.{Pace.__name__}, path: {path}, seconds: {seconds}}}]"
