"""Keras callbacks in both engines. The session calls their hooks for epochs and for calls of the compiled loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from scaleflow.errors import ConfigError, RunError
from scaleflow.training.engine import Engine


class CallbackModel:
    """The `model` attribute of a callback: the engine's model with its optimizer and `stop_training`.

    Its weights are current. On parameter servers they are a copy, which only `set_weights` writes back.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.stop_training = False

    @property
    def optimizer(self) -> Any:
        return self._engine.optimizer

    @property
    def trainable(self) -> bool:
        return bool(self._engine.gather_model().trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._engine.gather_model().trainable = value

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """Returns the weights that are evaluated and exported, as `Engine.get_weights`."""
        return self._engine.get_weights()

    def set_weights(self, weights: Sequence[np.ndarray[Any, Any]]) -> None:
        """Sets the weights that are trained, evaluated and exported, as `Engine.set_weights`."""
        self._engine.set_weights(weights)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._engine.gather_model()(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.gather_model(), name)


class Callbacks:
    """Calls the hooks of several callbacks.

    Batch hooks run before and after each call of the compiled loop, not for each step. After a call they get the
    index of its last batch in the epoch. Logs have Keras's names: `loss`, `accuracy`, `val_loss`.

    Args:
        callbacks: `keras.callbacks.Callback` objects.
        engine: the engine that trains.
        epochs, steps: the length of the run in epochs, and of an epoch in steps.

    Raises:
        ConfigError: if a callback changes what is trainable in `set_model`.
    """

    def __init__(self, callbacks: Sequence[Any], engine: Engine, epochs: int, steps: int) -> None:
        self._all = list(callbacks)
        self._watched = CallbackModel(engine)
        self._trainable: list[tuple[Any, bool]] = []
        if callbacks:
            model = engine.gather_model()
            self._trainable = [(part, part.trainable) for part in (*model._flatten_layers(), *model.variables)]
        for callback in self._all:
            callback.set_params({"verbose": 0, "epochs": epochs, "steps": steps})
            callback.set_model(self._watched)
            if change := self._change_by(callback):
                raise ConfigError(change)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def wants_end(self) -> bool:
        """Whether a callback has set `model.stop_training`."""
        return bool(self._watched.stop_training)

    def call_hook(self, hook: str, *arguments: Any) -> dict[str, float]:
        """Calls one hook of all callbacks: `train_begin`, `epoch_end` and so on.

        Returns:
            The numbers that the callbacks added to the logs, under our metric names.

        Raises:
            RunError: if a callback changes what is trainable, which would have no effect.
        """
        logs = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
        original_names = set(logs)
        self._trainable = [(part, part.trainable) for part, _ in self._trainable]  # `model.freeze` may change it
        for callback in self._all:
            getattr(callback, f"on_{hook}")(*arguments)
            if hook != "train_end" and (change := self._change_by(callback)):
                raise RunError(change)
        return metrics_of({name: value for name, value in logs.items() if name not in original_names})

    def _change_by(self, callback: Any) -> str | None:
        """Returns an error text if a callback has changed `trainable` of a layer or variable, else None."""
        for part, was_trainable in self._trainable:
            if part.trainable != was_trainable:
                name = part.path if isinstance(part, keras.Variable) else part.name
                return (
                    f"training.callbacks: {type(callback).__name__} has set {name}.trainable to "
                    f"{str(part.trainable).lower()}, which has no effect here; set model.freeze, also by epochs: "
                    "{0: ['*', '!outputs'], 3: []}"
                )
        return None

    def state(self) -> list[Any]:
        """Returns the state of each callback for a checkpoint, as JSON values; None without a method `get_state`."""
        return [callback.get_state() if hasattr(callback, "get_state") else None for callback in self._all]

    def restore(self, states: Sequence[Any]) -> None:
        """Passes each saved state to its callback's method `set_state`."""
        for callback, state in zip(self._all, states, strict=False):
            if state is not None:
                callback.set_state(state)


def make_callback(factory: Callable[[], Any], path: str) -> Any:
    """Makes a callback with the class or function `path`.

    Raises:
        ConfigError: if it does not return a `keras.callbacks.Callback`, or if a class of Keras rejects an argument.
    """
    try:
        callback = factory()
    except (TypeError, ValueError) as error:
        if not path.removeprefix("tensorflow.").startswith("keras."):
            raise  # the user's own code: its traceback helps
        raise ConfigError(f"training.callbacks: {path}: {' '.join(str(error).split())}") from error
    if not isinstance(callback, keras.callbacks.Callback):
        raise ConfigError(
            f"training.callbacks: {path} returned a {type(callback).__name__}, expected a keras.callbacks.Callback"
        )
    return callback


def to_keras_logs(values: Mapping[str, float]) -> dict[str, float]:
    """Renames our metrics to Keras's logs: `train/loss` to `loss`, `val/loss` to `val_loss`."""
    return {name.removeprefix("train/").replace("/", "_"): value for name, value in values.items()}


def metrics_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """Renames Keras's logs to our metrics, numbers only: `val_loss` to `val/loss`, `lr` to `train/lr`."""
    metrics = {}
    for name, value in logs.items():
        metric = f"val/{name.removeprefix('val_')}" if name.startswith("val_") else f"train/{name}"
        if not isinstance(value, str | bytes):
            with contextlib.suppress(TypeError, ValueError):
                metrics[metric] = float(value)
    return metrics
