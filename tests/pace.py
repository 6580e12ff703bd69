"""Callbacks that slow a run down, so that a test has time to interrupt it. A run that sleeps computes nothing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import keras


class Pace(keras.callbacks.Callback):
    """Sleeps after each call of the loop.

    Args:
        seconds: how long.
        path: a file; the run is slow only while it exists. None: always.
    """

    def __init__(self, seconds: float, path: str | None = None) -> None:
        super().__init__()
        self._seconds = seconds
        self._path = None if path is None else Path(path)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._path is None or self._path.exists():
            time.sleep(self._seconds)


class Rest(keras.callbacks.Callback):
    """Sleeps once in each epoch, after its first call of the loop, from the second epoch on.

    A file `go` in the folder where the run was started ends that.

    Args:
        seconds: how long.
        worker: the only worker that sleeps. None: all do.
    """

    def __init__(self, seconds: float = 0.2, worker: int | None = None) -> None:
        super().__init__()
        task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
        self._seconds = seconds
        self._sleeps = worker in (None, task["index"])
        self._is_due = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._is_due = epoch > 0 and self._sleeps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        end = time.monotonic() + self._seconds
        while self._is_due and not Path("go").exists() and time.monotonic() < end:
            time.sleep(min(0.1, self._seconds))
        self._is_due = False


class Stuck(keras.callbacks.Callback):
    """Waits, while the run starts, for something that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(600)


class Meet(keras.callbacks.Callback):
    """Waits, before training, until files of other runs exist.

    Args:
        patterns: of the files, each of which has to match one, from the folder where the run was started.
    """

    def __init__(self, patterns: list[str]) -> None:
        super().__init__()
        self._patterns = patterns

    def on_train_begin(self, logs: Any = None) -> None:
        deadline = time.monotonic() + 240
        while not all(any(Path().glob(pattern)) for pattern in self._patterns):
            assert time.monotonic() < deadline, f"waited in vain for {self._patterns}"
            time.sleep(0.05)
