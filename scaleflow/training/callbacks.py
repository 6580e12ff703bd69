"""Keras's callbacks in both engines, told of what the host's half knows: the ends of calls, and epochs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from scaleflow.errors import ConfigError, RunError
from scaleflow.training.engine import Engine


class CallbackModel:
    """What a callback has as its `model`: the engine's, with its optimizer, and `stop_training`.

    Its weights are those of now; on parameter servers a copy of them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.stop_training = False

    @property
    def optimizer(self) -> Any:
        return getattr(self._engine, "optimizer", None)

    @property
    def trainable(self) -> bool:
        return bool(self._engine.gather_model().trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._engine.gather_model().trainable = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.gather_model(), name)


class Callbacks:
    """Several callbacks as one.

    A batch hook is called at the end of each call of the compiled loop, with the number of the last batch in the epoch,
    and before the next one. The logs are as Keras's: `loss`, `accuracy`, `val_loss`.

    Args:
        callbacks: made already.
        engine: what trains.
        epochs, steps: of the run, and of an epoch.
    """

    def __init__(self, callbacks: Sequence[Any], engine: Engine, epochs: int, steps: int) -> None:
        self._all = list(callbacks)
        self._watched = CallbackModel(engine)
        model = engine.gather_model()
        self._trainable = [(part, part.trainable) for part in (*model._flatten_layers(), *model.variables)]
        for callback in self._all:
            callback.set_params({"verbose": 0, "epochs": epochs, "steps": steps})
            callback.set_model(self._watched)
            if change := self._change_by(callback):
                raise ConfigError(change)

    @property
    def wants_end(self) -> bool:
        """Whether one of them has set `model.stop_training`."""
        return bool(self._watched.stop_training)

    def call_hook(self, hook: str, *arguments: Any) -> dict[str, float]:
        """Calls one hook of all of them: `train_begin`, `epoch_end` and so on.

        Returns:
            The numbers that they have added to the logs, by our names of metrics.

        Raises:
            RunError: if one changes what is trained, which would have no effect.
        """
        logs = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
        given = set(logs)
        for callback in self._all:
            getattr(callback, f"on_{hook}")(*arguments)
            if hook != "train_end" and (change := self._change_by(callback)):
                raise RunError(change)
        return metrics_of({name: value for name, value in logs.items() if name not in given})

    def _change_by(self, callback: Any) -> str | None:
        """Says which layer or variable a callback has frozen or made trainable; None where it has not."""
        for part, was in self._trainable:
            if part.trainable != was:
                name = part.path if isinstance(part, keras.Variable) else part.name
                return (
                    f"training.callbacks: {type(callback).__name__} has set {name}.trainable to "
                    f"{str(part.trainable).lower()}, but what is trained is fixed when the run begins; set it in the "
                    "model, or train in two runs, the second with model.init_from"
                )
        return None

    def state(self) -> list[Any]:
        """What each that has a method `get_state` wants to be kept in a checkpoint: what JSON can hold."""
        return [callback.get_state() if hasattr(callback, "get_state") else None for callback in self._all]

    def restore(self, states: Sequence[Any]) -> None:
        """Gives that back to each by its method `set_state`."""
        for callback, state in zip(self._all, states, strict=False):
            if state is not None:
                callback.set_state(state)


def check_callback(callback: Any, path: str) -> Any:
    """The same, if it is one of Keras's kind."""
    if not isinstance(callback, keras.callbacks.Callback):
        raise ConfigError(
            f"training.callbacks: {path} made a {type(callback).__name__}, expected a keras.callbacks.Callback"
        )
    return callback


def to_keras_logs(values: Mapping[str, float]) -> dict[str, float]:
    """Our names of metrics as Keras's: `train/loss` is `loss`, `val/loss` is `val_loss`."""
    return {name.removeprefix("train/").replace("/", "_"): value for name, value in values.items()}


def metrics_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among logs of Keras's by our names of metrics: `val_loss` is `val/loss`, `lr` is `train/lr`."""
    found = {}
    for name, value in logs.items():
        metric = f"val/{name.removeprefix('val_')}" if name.startswith("val_") else f"train/{name}"
        if not isinstance(value, str | bytes):
            with contextlib.suppress(TypeError, ValueError):
                found[metric] = float(value)
    return found
