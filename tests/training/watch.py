"""Keras callbacks: one keeps what it is called with, one changes what is trained."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

#: What was called, as (hook, first argument, names of the logs).
CALLED: list[tuple[str, Any, tuple[str, ...]]] = []


class Watch(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Notes what it is told, sets the rate by the epoch, and ends the run after an epoch."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last
        self.epochs = 0

    def note(self, hook: str, place: Any, logs: Any) -> None:
        CALLED.append((hook, place, tuple(sorted(logs or ()))))

    def on_train_begin(self, logs: Any = None) -> None:
        self.note("train begins", self.params["epochs"], logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.1 / (epoch + 1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note("batch", batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch", epoch, logs)
        self.epochs += 1
        self.model.stop_training = epoch == self.last

    def on_train_end(self, logs: Any = None) -> None:
        self.note("train ends", round(float(self.model.optimizer.learning_rate.numpy()), 6), ())

    def get_state(self) -> Any:
        return self.epochs

    def set_state(self, state: Any) -> None:
        self.epochs = state


class Freeze(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Changes what is trained, in one of its hooks."""

    def __init__(self, hook: str, layer: str | None = None) -> None:
        super().__init__()
        self.layer = layer
        setattr(self, hook, self.change)

    def change(self, given: Any = None, *_: Any) -> None:
        model = given if self.model is None else self.model
        changed = model.get_layer(self.layer) if self.layer else model
        changed.trainable = False


class Judge(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports a value of its own at the end of each epoch: 2, 5, 1, 0, unless it says nothing."""

    def __init__(self, name: str | None = "val_own") -> None:
        super().__init__()
        self.name = name

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        CALLED.append(("outputs", epoch, tuple(self.model(np.zeros((2, *self.model.input_shape[1:]))).shape)))
        if self.name:
            logs[self.name] = (2.0, 5.0, 1.0, 0.0)[epoch]
