"""The attributes of Keras callbacks as JSON values and arrays, which a checkpoint holds, and back."""

from __future__ import annotations

import hashlib
import io
import pathlib
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Set
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.training.state import list_variables_in

#: Attributes that Keras sets for each command.
OF_KERAS = {"_model", "params", "validation_data", "monitor_op", "append_header"}

SEQUENCES: dict[str, Callable[..., Any]] = {each.__name__: each for each in (list, tuple, set, frozenset, deque)}
MAPPINGS: dict[str, Callable[..., Any]] = {each.__name__: each for each in (dict, OrderedDict, Counter, defaultdict)}
FACTORIES: dict[str, Callable[[], Any]] = {each.__name__: each for each in (int, float, str, bool, list, set, dict)}

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

    What is as the constructor made it is not kept: each worker has its own name of a file, for example.

    Args:
        callback: has its model; no other hook was called.
        of_model: ids of the TensorFlow variables that the checkpoint has anyway.

    Attributes:
        doubts: `NAME (TYPE)` of each attribute that a checkpoint cannot hold. Those of Keras's own callbacks are
            not listed: their hooks make them again.
    """

    def __init__(self, callback: Any, of_model: Set[int]) -> None:
        self.doubts: list[str] = []
        self._callback = callback
        self._of_model = of_model
        self._changed: set[str] = set()
        self._first: dict[str, tuple[Any, list[bytes], Any]] = {}
        self._first = {name: self._describe(name) for name in self._list_names()}

    def _list_names(self) -> list[str]:
        """Lists the attributes of the callback, and the lists, sets and dicts of its class, which it may change."""
        classes = [each for each in type(self._callback).__mro__ if not each.__module__.startswith("keras.")]
        of_classes = {
            name
            for each in classes
            for name, value in vars(each).items()
            if not name.startswith("__") and type(value) in (*SEQUENCES.values(), *MAPPINGS.values())
        }
        return sorted((set(vars(self._callback)) | of_classes) - OF_KERAS)

    def _describe(self, name: str) -> tuple[Any, list[bytes], Any]:
        """Returns an attribute as JSON, digests of its arrays, and itself."""
        value, digests = getattr(self._callback, name), []

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
        """Finds what differs from the constructor's values. From now on it is kept, also if it changes back."""
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
        """Sets the attributes to what `read` returned, and others that have changed to what they were at first."""
        self.note_changes()
        for name, value in kept.items():
            self._set(name, value, get)
        for name in self._changed - set(kept):
            if name not in vars(self._callback) or is_object(self._describe(name)[0]):
                continue  # a hook has made it
            value, digests, first = self._first.get(name, (None, [], None))
            if name not in self._first:
                del vars(self._callback)[name]
            elif digests or is_object(value):
                vars(self._callback)[name] = first
            else:
                self._set(name, value, get)
        self._changed |= set(kept)

    def _set(self, name: str, value: Any, get: Get) -> None:
        attributes = vars(self._callback)
        if isinstance(value, list) and value[0] == "inner":
            write_inner(attributes[name], decode_value(value[1], get), self._of_model)
        else:
            attributes[name] = decode_value(value, get)


def is_object(described: Any) -> bool:
    """Returns whether an attribute is described as what no checkpoint holds."""
    return isinstance(described, list) and described[0] == "object"


def read_inner(value: Any, of_model: Set[int]) -> Any:
    """Returns the state of a random generator, or of an object with variables; None for other values."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, list | tuple | Mapping):
        return None
    return [np.asarray(each.read_value()) for each in list_own_variables(value, of_model)] or None


def write_inner(value: Any, inner: Any, of_model: Set[int]) -> None:
    """Sets what `read_inner` returned."""
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = inner
    elif isinstance(value, random.Random):
        value.setstate(inner)
    else:
        for variable, array in zip(list_own_variables(value, of_model), inner, strict=True):
            variable.assign(array)


def list_own_variables(value: Any, of_model: Set[int]) -> list[tf.Variable]:
    """Lists the TensorFlow variables of an object, without those of the model."""
    listed = list_variables_in(value.state if isinstance(value, keras.random.SeedGenerator) else value)
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
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
            dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str  # bfloat16 has no other name
            label = "array" if kind is np.ndarray else "tensor" if isinstance(value, tf.Tensor) else "number"
            return [label, add(flat), dtype, list(array.shape)]
    if isinstance(value, pathlib.Path):
        return ["path", str(value)]
    if SEQUENCES.get(name) is kind:
        return [name, [encode_value(each, add) for each in value], getattr(value, "maxlen", None)]
    factory = getattr(value, "default_factory", None)
    made = getattr(factory, "__name__", None)
    if MAPPINGS.get(name) is kind and (factory is None or FACTORIES.get(str(made)) is factory):
        return [name, [[encode_value(key, add), encode_value(each, add)] for key, each in value.items()], made]
    raise NotKept(name)


def decode_value(kept: Any, get: Get) -> Any:
    """Returns the value that `encode_value` was given."""
    if not isinstance(kept, list):
        return kept
    kind, content, *more = kept
    if kind in ("array", "tensor", "number"):
        dtype, shape = more
        array = get(content).copy().view(np.dtype(dtype)).reshape(shape)
        return tf.constant(array) if kind == "tensor" else array if kind == "array" else array[()]
    if kind == "path":
        return pathlib.Path(content)
    if kind in SEQUENCES:
        values = [decode_value(each, get) for each in content]
        return deque(values, more[0]) if kind == "deque" else SEQUENCES[kind](values)
    items = {decode_value(key, get): decode_value(each, get) for key, each in content}
    if kind == "defaultdict":
        made: defaultdict[Any, Any] = defaultdict(FACTORIES[more[0]] if more[0] else None)
        made.update(items)
        return made
    return MAPPINGS[kind](items)
