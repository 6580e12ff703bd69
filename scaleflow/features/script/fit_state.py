"""The state of one call of `fit`, from which a later command continues.

A state has what Keras's `fit` changes: variables, the attributes of callbacks, the history and random states. It has no
data: a command that continues reads the data from the beginning again, without training on it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.compat.keras import flatten_layers, to_tf_variable
from scaleflow.errors import RunError
from scaleflow.features.script.random_state import RandomState

#: Attributes of callbacks that Keras sets itself.
SET_BY_KERAS = ("model", "_model", "params")

#: Objects whose copies would not be those of the script. Attributes with such objects are not saved.
LIVE_OBJECTS = (
    keras.layers.Layer,
    keras.optimizers.Optimizer,
    keras.metrics.Metric,
    keras.callbacks.Callback,
    keras.Variable,
    tf.Variable,
    tf.Module,
    tf.data.Dataset,
)

#: An array of more bytes than this that a callback had before the fit is data of the script, and is not saved.
MAX_UNCHANGED_BYTES = 1 << 20


class StateMismatch(RunError):
    """A saved state does not fit the script that is run."""


@dataclass(frozen=True)
class FitState:
    """The state of a fit.

    Attributes:
        fit: the number of the fit in the script, from 1.
        epochs: the number of its complete epochs.
        batches: the number of calls of the training function in the next epoch.
        is_finished: whether the fit has returned.
        step: the number of updates by all fits of the script.
        recorded_step: the number of updates at the last recorded epoch, to which MLflow's calls without a step refer.
        recorded_epochs: the number of epochs that were recorded.
        logs: what the last call of the training function returned.
        values: the values of the copies of each variable, in the order of `list_variables`.
        random: the random states.
        history: the epochs and the values of Keras's history.
        callbacks: for each callback of the script the attributes, each pickled.
        stops: whether a callback has asked the fit to end.
    """

    fit: int
    epochs: int
    batches: int
    is_finished: bool
    step: int
    recorded_step: int
    recorded_epochs: int
    logs: Any
    values: Sequence[Sequence[Any]]
    random: RandomState
    history: tuple[list[int], dict[str, list[Any]]]
    callbacks: Sequence[Mapping[str, bytes]] = field(default_factory=list)
    stops: bool = False


class FitStates:
    """The folder with the states of a script's fits: one file for each fit, with its newest state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, fit: int) -> Path:
        return self._folder / f"fit-{fit:04}.state"

    def write(self, state: FitState) -> Path:
        """Writes a state in place of the fit's earlier one. A process that dies meanwhile leaves the earlier one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self.path(state.fit)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            pickle.dump(state, file, protocol=5)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        return path

    def read(self, fit: int) -> FitState | None:
        """Returns the state of a fit; None if it has none."""
        path = self.path(fit)
        if not path.exists():
            return None
        with path.open("rb") as file:
            state = pickle.load(file)
        assert isinstance(state, FitState)
        return state

    def find_last(self) -> int:
        """Returns the number of the last fit with a state; 0 if there is none."""
        numbers = [int(path.stem.removeprefix("fit-")) for path in self._folder.glob("fit-*.state")]
        return max(numbers, default=0)

    def remove(self) -> None:
        """Removes all states."""
        for path in [*self._folder.glob("fit-*.state"), *self._folder.glob("fit-*.partial")]:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it does not exist, or has other files
            self._folder.rmdir()


# Variables


def list_variables(model: keras.Model) -> list[Any]:
    """Lists the variables that a fit of a model changes: of its layers, metrics and optimizers, also inner ones."""
    variables: list[Any] = [*model.variables, *model.metrics_variables]
    for layer in flatten_layers(model):
        for value in vars(layer).values():
            for optimizer in find_optimizers(value):
                variables += optimizer.variables
    unique: dict[int, Any] = {}
    for variable in variables:
        unique.setdefault(id(variable), variable)
    return list(unique.values())


def find_optimizers(value: Any) -> list[Any]:
    """Returns the optimizers in an attribute of a model: the value itself, or in a list or a dict."""
    if isinstance(value, keras.optimizers.Optimizer):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [each for each in value if isinstance(each, keras.optimizers.Optimizer)]
    return []


def list_copies(variable: Any) -> list[Any]:
    """Returns the copies of a variable on the replicas of this process; the variable itself if it has none."""
    tf_variable = to_tf_variable(variable)
    if isinstance(tf_variable, tf.distribute.DistributedValues):
        return list(tf.distribute.get_strategy().experimental_local_results(tf_variable))
    return [variable]


def read_values(variables: Sequence[Any]) -> list[list[Any]]:
    """Returns the values of the copies of each variable; one value if all copies have the same.

    The moving averages of BatchNormalization and the sums of metrics differ between replicas.
    """
    values = []
    for variable in variables:
        copies = [np.array(keras.ops.convert_to_numpy(copy)) for copy in list_copies(variable)]
        is_same = all(copy.tobytes() == copies[0].tobytes() for copy in copies)
        values.append(copies[:1] if is_same else copies)
    return values


def restore_values(variables: Sequence[Any], values: Sequence[Sequence[Any]]) -> None:
    """Sets the copies of variables to saved values. With another number of replicas, each copy gets the mean.

    Raises StateMismatch if there are others than when they were saved.
    """
    shapes = [tuple(variable.shape) for variable in variables]
    saved_shapes = [copies[0].shape for copies in values]
    if shapes != saved_shapes:
        raise StateMismatch(
            f"the model, its metrics and its optimizers have {len(shapes)} variables, and other ones than the "
            f"{len(saved_shapes)} that were saved; run the command anew"
        )
    for variable, saved in zip(variables, values, strict=True):
        copies = list_copies(variable)
        if len(saved) != len(copies):
            mean = saved[0] if len(saved) == 1 else np.mean(saved, axis=0).astype(saved[0].dtype)
            saved = [mean] * len(copies)
        for copy, value in zip(copies, saved, strict=True):
            copy.assign(value)


# Callbacks


class AttributePickler(pickle.Pickler):
    """Pickles an attribute. Raises PicklingError if it has an object of which the script needs the original."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, LIVE_OBJECTS):
            raise pickle.PicklingError(type(value).__name__)
        return NotImplemented


def read_attributes(callback: Any, before: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the attributes of a callback that can be saved, each pickled.

    Args:
        before: the attributes when the fit began.
    """
    attributes: dict[str, bytes] = {}
    for name, value in vars(callback).items():
        if name in SET_BY_KERAS or is_data(value, before.get(name)):
            continue
        file = io.BytesIO()
        with contextlib.suppress(Exception):  # classes of the script can raise anything
            AttributePickler(file, protocol=5).dump(value)
            attributes[name] = file.getvalue()
    return attributes


def is_data(value: Any, before: Any) -> bool:
    """Returns whether a value is a large array that a callback had before the fit."""
    return value is before and getattr(value, "nbytes", 0) > MAX_UNCHANGED_BYTES


def restore_attributes(callback: Any, attributes: Mapping[str, bytes]) -> None:
    """Sets the saved attributes of a callback. Lists and dicts keep their identity: the script may have them, too."""
    if isinstance(callback, keras.callbacks.CSVLogger):
        return  # it goes on in its file (`continue_files`)
    for name, pickled in attributes.items():
        try:
            value = pickle.loads(pickled)
        except Exception:  # its class is gone, or raises: the callback keeps what it has
            continue
        current = vars(callback).get(name)
        if isinstance(current, list) and isinstance(value, list):
            current[:] = value
        elif isinstance(current, MutableMapping) and type(current) is type(value):
            current.clear()
            current.update(value)
        else:
            setattr(callback, name, value)


def continue_files(callbacks: Sequence[Any]) -> None:
    """Makes callbacks add to the files of an interrupted fit, which they would write anew."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True
