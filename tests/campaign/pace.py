"""A callback that gives a short run a length in which faults can fall."""

from __future__ import annotations

import time
from typing import Any

import keras


class Pace(keras.callbacks.Callback):
    """Waits behind each call of the loop.

    Args:
        seconds: how long.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(self._seconds)
