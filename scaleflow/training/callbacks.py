"""Keras callbacks in both engines. The session calls their hooks for epochs and for calls of the compiled loop.

A checkpoint holds their attributes as JSON values and arrays.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pathlib
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.compat.keras import DECIDE, find_rate, flatten_layers
from scaleflow.errors import ConfigError, RunError
from scaleflow.interfaces import find_direction
from scaleflow.training.engine import Engine
from scaleflow.training.state import list_variables_in

#: Attributes that Keras sets for each command.
OF_KERAS = {"_model", "params", "validation_data", "monitor_op", "append_header"}

#: Types that a checkpoint can hold, by name: sequences, mappings, and factories of a `defaultdict`.
SEQUENCES: dict[str, Callable[..., Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
MAPPINGS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": defaultdict,
}
FACTORIES: dict[str, Callable[[], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "list": list,
    "set": set,
    "dict": dict,
}

#: Types without a state of the run, or with one that is in the checkpoint anyway, and files, which hooks open again.
STATELESS = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, np.ufunc),
    *(io.IOBase, keras.Model, keras.Layer),
)

Add = Callable[[np.ndarray[Any, Any]], int]
Get = Callable[[int], np.ndarray[Any, Any]]


class NotKept(Exception):
    """A checkpoint cannot hold a value of the type that the message names."""


class CallbackState:
    """The attributes of a callback that change during a run.

    An attribute with its value from the constructor is not kept: each worker has its own name of a file, for example.

    Args:
        callback: has its model; no other hook was called.
        of_model: ids of the TensorFlow variables that the checkpoint has anyway.

    Attributes:
        doubts: `NAME (TYPE)` of each attribute that a checkpoint cannot hold. Attributes of Keras's own callbacks are
            not listed, because their hooks make them again.
    """

    def __init__(self, callback: Any, of_model: Set[int]) -> None:
        self.doubts: list[str] = []
        self._callback = callback
        self._of_model = of_model
        self._changed: set[str] = set()
        self._first: dict[str, tuple[Any, list[bytes], Any]] = {}  # the attributes from the constructor
        self._first = {name: self._describe(name) for name in self._list_names()}

    def _list_names(self) -> list[str]:
        """Lists the attributes of the callback, and the lists, sets and dicts of its class, which it may change."""
        containers = (*SEQUENCES.values(), *MAPPINGS.values())
        names = set(vars(self._callback))
        for base in type(self._callback).__mro__:
            if base.__module__.startswith("keras."):
                continue
            for name, value in vars(base).items():
                if not name.startswith("__") and type(value) in containers:
                    names.add(name)
        return sorted(names - OF_KERAS)

    def _describe(self, name: str) -> tuple[Any, list[bytes], Any]:
        """Returns an attribute as JSON, digests of its arrays, and the attribute itself."""
        value = getattr(self._callback, name)
        digests: list[bytes] = []

        def add(array: np.ndarray[Any, Any]) -> int:
            digests.append(hashlib.blake2b(array.data, digest_size=16).digest())
            return len(digests) - 1

        try:
            return self._encode(name, add), digests, value
        except NotKept as error:
            if not isinstance(value, STATELESS) and name not in self._first:
                self._doubt(name, error)
            return ["object", id(value)], [], value

    def _doubt(self, name: str, error: NotKept) -> None:
        doubt = f"{name} ({error})"
        if doubt not in self.doubts and not type(self._callback).__module__.startswith("keras."):
            self.doubts.append(doubt)

    def _encode(self, name: str, add: Add) -> Any:
        value = getattr(self._callback, name)
        inner = read_inner(value, self._of_model)
        if inner is None:
            return encode_value(value, add)
        if self._first and self._first.get(name, (None, None, None))[2] is not value:
            raise NotKept(type(value).__name__)  # it could not be made again
        return ["inner", encode_value(inner, add)]

    def note_changes(self) -> None:
        """Finds attributes that differ from the constructor's values. They are kept from now on, even if reset."""
        for name in self._list_names():
            if name not in self._changed and self._describe(name)[:2] != self._first.get(name, ())[:2]:
                self._changed.add(name)

    def read(self, add: Add) -> dict[str, Any]:
        """Returns the changed attributes as JSON values. `add` takes an array of bytes and returns its number."""
        self.note_changes()
        kept = {}
        for name in sorted(self._changed & set(self._list_names())):
            try:
                kept[name] = self._encode(name, add)
            except NotKept as error:
                self._doubt(name, error)
        return kept

    def restore(self, kept: Mapping[str, Any], get: Get) -> None:
        """Sets the attributes that `read` returned, and resets other attributes to their first values."""
        self.note_changes()
        for name, value in kept.items():
            self._set(name, value, get)
        for name in self._changed - set(kept):
            self._reset(name, get)
        self._changed |= set(kept)

    def _reset(self, name: str, get: Get) -> None:
        """Sets an attribute to its first value, unless a hook has made an object that no checkpoint holds."""
        attributes = vars(self._callback)
        if name not in attributes or is_object(self._describe(name)[0]):
            return
        if name not in self._first:
            del attributes[name]
            return
        value, digests, first = self._first[name]
        if digests or is_object(value):
            attributes[name] = first
        else:
            self._set(name, value, get)

    def _set(self, name: str, value: Any, get: Get) -> None:
        attributes = vars(self._callback)
        if isinstance(value, list) and value[0] == "inner":
            write_inner(attributes[name], decode_value(value[1], get), self._of_model)
        else:
            attributes[name] = decode_value(value, get)


def is_object(described: Any) -> bool:
    """Whether the description of an attribute says that no checkpoint can hold it."""
    return isinstance(described, list) and described[0] == "object"


def read_inner(value: Any, of_model: Set[int]) -> Any:
    """Returns the state of a random generator, or of an object with variables; None for other values."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, list | tuple | Mapping):
        return None
    return [np.asarray(variable.read_value()) for variable in list_own_variables(value, of_model)] or None


def write_inner(value: Any, inner: Any, of_model: Set[int]) -> None:
    """Sets the state that `read_inner` returned."""
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = inner
    elif isinstance(value, random.Random):
        value.setstate(inner)
    else:
        for variable, array in zip(list_own_variables(value, of_model), inner, strict=True):
            variable.assign(array)


def list_own_variables(value: Any, of_model: Set[int]) -> list[tf.Variable]:
    """Lists the TensorFlow variables of an object, without the model's variables."""
    if isinstance(value, keras.random.SeedGenerator):
        value = value.state
    listed = list_variables_in(value)
    return [variable for variable in listed if id(variable) not in of_model]


def encode_value(value: Any, add: Add) -> Any:
    """Returns numbers, texts, arrays, tensors, and lists, tuples, sets and dicts of them as JSON.

    `add` takes an array of bytes and returns its number. Raises NotKept for other values.
    """
    kind = type(value)
    name = kind.__name__
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is np.ndarray or isinstance(value, np.generic | tf.Tensor):
        array = np.asarray(value)
        if not array.dtype.hasobject:
            return encode_array(array, kind, add)
    if isinstance(value, pathlib.Path):
        return ["path", str(value)]
    if SEQUENCES.get(name) is kind:
        content = [encode_value(item, add) for item in value]
        return [name, content, getattr(value, "maxlen", None)]
    factory = getattr(value, "default_factory", None)
    factory_name = getattr(factory, "__name__", None)
    if MAPPINGS.get(name) is kind and (factory is None or FACTORIES.get(str(factory_name)) is factory):
        content = []
        for key, item in value.items():
            content.append([encode_value(key, add), encode_value(item, add)])
        return [name, content, factory_name]
    raise NotKept(name)


def encode_array(array: np.ndarray[Any, Any], kind: type, add: Add) -> list[Any]:
    """Encodes the array of a value of a type: an array, a tensor, or a NumPy number."""
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
    dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str  # bfloat16 has no other name
    label = "number"
    if kind is np.ndarray:
        label = "array"
    elif issubclass(kind, tf.Tensor):
        label = "tensor"
    return [label, add(content), dtype, list(array.shape)]


def decode_value(kept: Any, get: Get) -> Any:
    """Returns the value that `encode_value` has encoded."""
    if not isinstance(kept, list):
        return kept
    kind, content, *more = kept
    if kind in ("array", "tensor", "number"):
        return decode_array(kind, get(content), *more)
    if kind == "path":
        return pathlib.Path(content)
    if kind in SEQUENCES:
        values = [decode_value(item, get) for item in content]
        return deque(values, more[0]) if kind == "deque" else SEQUENCES[kind](values)
    items = {}
    for key, item in content:
        items[decode_value(key, get)] = decode_value(item, get)
    if kind == "defaultdict":
        factory = FACTORIES[more[0]] if more[0] else None
        return defaultdict(factory, items)
    return MAPPINGS[kind](items)


def decode_array(kind: str, content: np.ndarray[Any, Any], dtype: str, shape: Sequence[int]) -> Any:
    array = content.copy().view(np.dtype(dtype)).reshape(shape)
    if kind == "tensor":
        return tf.constant(array)
    return array if kind == "array" else array[()]


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
        """Returns the weights for evaluation and export, as `Engine.get_weights`."""
        return self._engine.get_weights()

    def set_weights(self, weights: Sequence[np.ndarray[Any, Any]]) -> None:
        """Sets the weights for training, evaluation and export, as `Engine.set_weights`."""
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
        epochs, steps: the length of the run in epochs, and of an epoch in steps.

    Raises:
        ConfigError: if a callback changes `trainable` of a layer or variable in `set_model`.
    """

    def __init__(self, callbacks: Sequence[Any], engine: Engine, epochs: int, steps: int) -> None:
        self._all = list(callbacks)
        self._watched = CallbackModel(engine)
        self._trainable: list[tuple[Any, bool]] = []
        if callbacks:
            model = engine.gather_model()
            self._trainable = [(part, part.trainable) for part in (*flatten_layers(model), *model.variables)]
        for callback in self._all:
            callback.set_params({"verbose": 0, "epochs": epochs, "steps": steps})
            callback.set_model(self._watched)
            check_callback(callback, engine)
            prepare_monitor(callback, engine)
            change = self._change_by(callback)
            if change:
                raise ConfigError(change)
        of_engine: set[int] = set()
        if callbacks:
            for variables in engine.variables_by_name().values():
                of_engine.update(map(id, variables))
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

        Raises RunError if a callback changes `trainable` of a layer or variable, which would have no effect.
        """
        logs = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
        original_names = set(logs)
        self._trainable = [(part, part.trainable) for part, _ in self._trainable]  # `model.freeze` may change it
        for callback in self._all:
            getattr(callback, f"on_{hook}")(*arguments)
            change = None if hook == "train_end" else self._change_by(callback)
            if change:
                raise RunError(change)
        added = {name: value for name, value in logs.items() if name not in original_names}
        return to_metrics(added)

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
        """Lists attributes that a checkpoint does not hold, as `Halve.smoother (Smoother)`."""
        doubts = []
        for callback, state in zip(self._all, self._states, strict=True):
            if not hasattr(callback, "get_state"):
                doubts += [f"{type(callback).__name__}.{doubt}" for doubt in state.doubts]
        return doubts

    def read_state(self) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        """Returns the state of the callbacks for a checkpoint: JSON values, and arrays by name.

        The state is the attributes of each callback, and the result of its `get_state`, if it has that method.
        """
        arrays: dict[str, np.ndarray[Any, Any]] = {}

        def add(array: np.ndarray[Any, Any]) -> int:
            arrays[f"{ARRAYS}{len(arrays)}"] = array
            return len(arrays) - 1

        kept = []
        for callback, state in zip(self._all, self._states, strict=True):
            values = {"class": type(callback).__qualname__, "attributes": state.read(add)}
            if hasattr(callback, "get_state"):
                values["own"] = callback.get_state()
            kept.append(values)
        return {"callbacks": kept, "stops": self._watched.stop_training}, arrays

    def restore(self, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Restores the state that `read_state` returned, for callbacks whose class is the same."""
        self._watched.stop_training = host["stops"]
        for callback, state, kept in zip(self._all, self._states, host["callbacks"], strict=False):
            if kept["class"] == type(callback).__qualname__:
                state.restore(kept["attributes"], lambda number: arrays[f"{ARRAYS}{number}"])
                if kept.get("own") is not None and hasattr(callback, "set_state"):
                    callback.set_state(kept["own"])
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
        if engine.optimizer is None:
            raise ConfigError(f"training.callbacks: {name}: the training step has its own optimizers; set their rates")
        if isinstance(find_rate(engine.optimizer), keras.optimizers.schedules.LearningRateSchedule):
            raise ConfigError(
                f"training.callbacks: {name} sets the learning rate, which here follows from the step; use "
                "optimizer.schedule=constant without a warm-up, or remove the callback"
            )


def prepare_monitor(callback: Any, engine: Engine) -> None:
    """Tells a callback of Keras's whether larger values of its metric are better.

    Keras does this after the first epoch, and changes the sign of `min_delta` then. That must not happen again in a
    resumed run.

    Raises ConfigError if neither the config nor Keras knows whether larger values are better.
    """
    decide = getattr(callback, DECIDE, None)
    if getattr(callback, "monitor_op", 0) is not None or decide is None:
        return
    if getattr(callback, "mode", None) == "auto":
        callback.mode = find_direction(callback.monitor, engine.objective.modes) or "auto"
    try:
        decide()
    except ValueError as error:
        raise ConfigError(
            f"training.callbacks: {type(callback).__name__} has monitor={callback.monitor}, and it is not known "
            "whether larger values are better; add mode: max or mode: min"
        ) from error


def make_callback(factory: Callable[[], Any], path: str) -> Any:
    """Makes a callback with the class or function `path`.

    Raises ConfigError if it does not return a `keras.callbacks.Callback`, or if a class of Keras rejects an argument.
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


def to_metrics(logs: Mapping[str, Any]) -> dict[str, float]:
    """Renames Keras's logs to our metrics, numbers only: `val_loss` to `val/loss`, `lr` to `train/lr`."""
    metrics = {}
    for name, value in logs.items():
        metric = f"val/{name.removeprefix('val_')}" if name.startswith("val_") else f"train/{name}"
        if not isinstance(value, str | bytes):
            with contextlib.suppress(TypeError, ValueError):
                metrics[metric] = float(value)
    return metrics
