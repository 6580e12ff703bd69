"""Keras callbacks in both engines. The session calls their hooks for epochs and for calls of the compiled loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from scaleflow.errors import ConfigError, RunError
from scaleflow.training.callback_state import CallbackState
from scaleflow.training.engine import Engine

#: The start of the names of the arrays of callbacks in a checkpoint.
ARRAYS = "callbacks/"


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
            check_callback(callback, engine)
            prepare_monitor(callback, engine)
            if change := self._change_by(callback):
                raise ConfigError(change)
        of_engine = (
            {id(part) for parts in engine.variables_by_name().values() for part in parts} if callbacks else set()
        )
        self._states = [CallbackState(callback, of_engine) for callback in self._all]

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

    def list_doubts(self) -> list[str]:
        """Lists what a checkpoint does not hold, as `Halve.smoother (Smoother)`."""
        pairs = zip(self._all, self._states, strict=True)
        unaided = [(each, state) for each, state in pairs if not hasattr(each, "get_state")]
        return [f"{type(each).__name__}.{doubt}" for each, state in unaided for doubt in state.doubts]

    def read_state(self) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        """Returns the state of the callbacks for a checkpoint: JSON values, and arrays by name.

        It is what a callback's attributes hold, and what its `get_state` returns, if it has that method.
        """
        arrays: dict[str, np.ndarray[Any, Any]] = {}

        def add(array: np.ndarray[Any, Any]) -> int:
            arrays[f"{ARRAYS}{len(arrays)}"] = array
            return len(arrays) - 1

        kept = [
            {"class": type(each).__qualname__, "attributes": state.read(add)}
            | ({"own": each.get_state()} if hasattr(each, "get_state") else {})
            for each, state in zip(self._all, self._states, strict=True)
        ]
        return {"callbacks": kept, "stops": self._watched.stop_training}, arrays

    def restore(self, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Gives the callbacks the state that `read_state` returned, as far as their classes are the same."""
        self._watched.stop_training = host.get("stops", False)
        for callback, state, kept in zip(self._all, self._states, host["callbacks"], strict=False):
            is_new = isinstance(kept, dict) and kept.get("class") == type(callback).__qualname__
            own = kept.get("own") if is_new else kept  # an earlier version kept only what `get_state` returned
            if is_new:
                state.restore(kept["attributes"], lambda number: arrays[f"{ARRAYS}{number}"])
            if own is not None and hasattr(callback, "set_state"):
                callback.set_state(own)
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True  # not to delete the lines of the epochs before


def check_callback(callback: Any, engine: Engine) -> None:
    """Raises ConfigError for a callback of Keras's that cannot do its work here."""
    name = type(callback).__name__
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        raise ConfigError(
            f"training.callbacks: {name}: scaleflow's checkpoints do its work; remove it, and continue a run with "
            "resume=RUN"
        )
    if isinstance(callback, keras.callbacks.ReduceLROnPlateau | keras.callbacks.LearningRateScheduler):
        inner = getattr(engine.optimizer, "inner_optimizer", engine.optimizer)
        if inner is None:
            raise ConfigError(f"training.callbacks: {name}: the training step has its own optimizers; set their rates")
        if isinstance(inner._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            raise ConfigError(
                f"training.callbacks: {name} sets the learning rate, which here follows from the step; use "
                "optimizer.schedule=constant without a warm-up, or remove the callback"
            )


def prepare_monitor(callback: Any, engine: Engine) -> None:
    """Gives a callback of Keras's the direction of the metric that it monitors. Keras does it after the first epoch,
    and changes the sign of `min_delta` then, which must not happen again in a resumed run.

    Raises:
        ConfigError: if neither the config nor Keras knows whether larger values are better.
    """
    if getattr(callback, "monitor_op", 0) is not None or not hasattr(callback, "_set_monitor_op"):
        return
    if getattr(callback, "mode", None) == "auto":
        callback.mode = engine.objective.modes.get(callback.monitor.removeprefix("val_"), "auto")
    try:
        callback._set_monitor_op()
    except ValueError as error:
        raise ConfigError(
            f"training.callbacks: {type(callback).__name__} has monitor={callback.monitor}, and it is not known "
            "whether larger values are better; add mode: max or mode: min"
        ) from error


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
