"""Follows one call of `fit`: counts its batches, saves its state, and skips what an earlier command has trained.

To skip, Keras's own `fit` runs through the trained epochs with a training function that only reads the batches, while
callbacks are not called. So the data has the state that it had. Then the saved state is restored, and Keras trains.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import keras
import tensorflow as tf

from scaleflow.compat.keras import INITIAL_EPOCH
from scaleflow.features.script.fit_state import (
    FitState,
    FitStates,
    continue_files,
    list_variables,
    read_attributes,
    read_values,
    restore_attributes,
    restore_values,
)
from scaleflow.features.script.random_state import read_random_state, restore_random_state
from scaleflow.features.script.recorder import ScriptRecorder
from scaleflow.interfaces.events import CheckpointSaved
from scaleflow.worker.failures import guard

#: Without `checkpoint.every_seconds`, a state is saved after this many seconds at the earliest, and after this many
#: times the seconds that the last save took: so saving takes at most 1 % of the training.
MIN_SECONDS = 10.0
MIN_RATIO = 100.0

#: Methods of Keras's list of callbacks that are not called while a fit skips epochs.
MUTED = (
    *("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end"),
    *("on_train_batch_begin", "on_train_batch_end", "on_test_begin", "on_test_end"),
    *("on_test_batch_begin", "on_test_batch_end", "on_batch_begin", "on_batch_end"),
)


class EpochCounter(Protocol):
    """Counts the epochs that are recorded, and the updates by all fits."""

    epochs: int

    def count_all_steps(self) -> int: ...


class StateSaver:
    """Saves the states of a script's fits, and knows those of earlier commands.

    Args:
        folder: the folder of the states; None: nothing is saved.
        every_seconds: the seconds between two saves; None: as often as saving takes at most 1 % of the time.
        is_resumed: whether the states of an earlier command count. If not, they are removed.

    Attributes:
        last_fit: the number of the last fit that an earlier command has saved; 0: none.
    """

    def __init__(self, folder: Path | None, every_seconds: float | None, is_resumed: bool) -> None:
        self._states = None if folder is None else FitStates(folder)
        self._every_seconds = every_seconds
        self.last_fit = 0
        if self._states is not None:
            if is_resumed:
                self.last_fit = self._states.find_last()
            else:
                self._states.remove()
        self._next_save = 0.0
        self.wait()

    @property
    def is_used(self) -> bool:
        return self._states is not None

    def is_due(self) -> bool:
        """Returns whether the next state must be saved now."""
        return time.monotonic() >= self._next_save and self.is_used

    def find(self, fit: int) -> FitState | None:
        """Returns the state of a fit that an earlier command has saved; None if there is none."""
        return self._states.read(fit) if self._states is not None and fit <= self.last_fit else None

    def find_last_step(self) -> int:
        """Returns the number of updates of the last state; 0 without one."""
        state = self.find(self.last_fit)
        return 0 if state is None else state.step

    def save(self, make_state: Callable[[], FitState], recorder: ScriptRecorder) -> None:
        """Saves a state, unless nothing is saved.

        If that fails, a note says so, the script continues, and nothing is saved from then on.
        """
        if self._states is None:
            return
        began = time.monotonic()
        is_saved = False
        with guard("the state that resume needs", recorder.emit):
            state = make_state()
            path = self._states.write(state)
            recorder.send(CheckpointSaved(state.step, str(path)))
            is_saved = True
        if not is_saved:
            self._states = None
        self.wait(time.monotonic() - began)

    def wait(self, seconds: float = 0.0) -> None:
        """Sets the time of the next save, after one that took `seconds`."""
        pause = self._every_seconds
        if pause is None:
            pause = max(MIN_SECONDS, MIN_RATIO * seconds)
        self._next_save = time.monotonic() + pause

    def remove(self) -> None:
        """Removes all states: the run is finished."""
        if self._states is not None:
            self._states.remove()


class FitProgress:
    """Follows a fit.

    Args:
        model: the model that is fitted.
        data: the arguments of the fit that are data: `x`, `validation_data`.
        callbacks: the callbacks of the script.
        history: Keras's callback with the history.
        saver: saves the states.
        recorder: records the run.
        is_stop_asked: returns whether the run is asked to stop. It is called after each batch.

    Attributes:
        epochs: the number of complete epochs.
        batches: the number of calls of the training function in the current epoch.
        is_cut: whether the fit ends within an epoch, because the run is asked to stop.
    """

    def __init__(
        self,
        model: Any,
        data: Mapping[str, Any],
        callbacks: Sequence[Any],
        history: keras.callbacks.History,
        saver: StateSaver,
        recorder: ScriptRecorder,
        is_stop_asked: Callable[[], bool],
    ) -> None:
        self._model = model
        self._callbacks = callbacks
        self._attributes = [dict(vars(callback)) for callback in callbacks]
        self._history = history
        self._saver = saver
        self._recorder = recorder
        self._is_stop_asked = is_stop_asked
        self._is_data_from_python = any(is_python_source(value) for value in data.values())
        self._is_array = all(is_array_source(value) for value in data.values())
        self._fit = recorder.phase
        self._saved = saver.find(self._fit)
        self._train: Callable[[Any], Any] | None = None  # Keras's training function
        self._test: Any = None
        self._mutes = contextlib.ExitStack()
        self._logs: Any = {}
        self._is_skipping = False
        self._is_built = False
        self.epochs = 0
        self.batches = 0
        self.is_cut = False
        self._counter: EpochCounter | None = None

    @property
    def is_skipping(self) -> bool:
        """Whether the fit skips what an earlier command has trained."""
        return self._is_skipping

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Follows the fit that runs inside the `with` block."""
        if self._saved is not None and self._saved.is_finished:
            self._begin_skipping()
        elif self._saved is not None:
            continue_files(self._callbacks)
        try:
            yield
            if self._is_skipping:
                self._restore()
            elif not self.is_cut and self._saver.is_used:
                self._saver.save(lambda: self._make_state(is_finished=True), self._recorder)
        finally:
            self._mutes.close()
            if self._train is not None:
                self._model.train_function = self._train

    def begin(self, counter: EpochCounter) -> None:
        """Takes the place of Keras's training function. Call it when the training begins, after all callbacks.

        `counter` counts the epochs and updates of the fit.
        """
        self._counter = counter
        if self._saved is not None and not self._is_skipping:
            self._begin_skipping()
        self.keep_place()

    def keep_place(self) -> None:
        """Takes the place of Keras's training function again, if a callback has made another one."""
        if self._model.train_function != self._run_batch:
            self._train = self._model.train_function
            self._model.train_function = self._run_batch

    def end_epoch(self, must_save: bool) -> None:
        """Counts an epoch, and saves the state if it must, or if that is due. Call it after all callbacks."""
        self.epochs += 1
        self.batches = 0
        if must_save or self._saver.is_due():
            self.save()

    def save(self) -> None:
        """Saves the state."""
        if self._saver.is_used:
            self._saver.save(self._make_state, self._recorder)

    # Training ---------------------------------------------------------------------------------

    def _run_batch(self, iterator: Any) -> Any:
        """Trains on the next batches as Keras's training function does, or skips them."""
        return self._skip_batch(iterator) if self._is_skipping else self.train_batch(iterator)

    def train_batch(self, iterator: Any) -> Any:
        """Trains on the next batches, and saves the state if that is due. Returns what Keras's function returns."""
        assert self._train is not None
        logs = self._train(iterator)
        self.batches += 1
        self._logs = logs
        if self._is_stop_asked():
            self.is_cut = True
            self._model.stop_training = True
            self.save()
        elif self._saver.is_due():
            self.save()
        return logs

    def _make_state(self, is_finished: bool = False) -> FitState:
        attributes = []
        for callback, before in zip(self._callbacks, self._attributes, strict=True):
            attributes.append(read_attributes(callback, before))
        history = self._history
        return FitState(
            fit=self._fit,
            epochs=self.epochs,
            batches=self.batches,
            is_finished=is_finished,
            step=self._recorder.step if self._counter is None else self._counter.count_all_steps(),
            recorded_step=self._recorder.step,
            recorded_epochs=0 if self._counter is None else self._counter.epochs,
            logs=keras.tree.map_structure(to_number, self._logs),
            values=read_values(list_variables(self._model)),
            random=read_random_state(),
            history=(list(history.epoch), {name: list(values) for name, values in history.history.items()}),
            callbacks=attributes,
            stops=bool(self._model.stop_training) and not self.is_cut,
        )

    # Skipping ---------------------------------------------------------------------------------

    def _begin_skipping(self) -> None:
        self._is_skipping = True
        setattr(self._model, INITIAL_EPOCH, None)  # BackupAndRestore has another position
        for name in MUTED:
            replace_method(keras.callbacks.CallbackList, name, ignore, self._mutes)
        replace_method(keras.callbacks.CallbackList, "on_epoch_end", self._skip_epoch_end, self._mutes)
        assert self._saved is not None
        if self._saved.is_finished:
            replace_method(keras.callbacks.CallbackList, "on_train_begin", self._skip_train_begin, self._mutes)
        self._test = self._model.test_function
        self._model.test_function = self._skip_test_batch

    def _skip_train_begin(self, *arguments: Any, **named: Any) -> None:
        self.keep_place()

    def _skip_batch(self, iterator: Any) -> Any:
        """Reads the next batches. The first ones are trained on: that builds the model, the metrics and the optimizer,
        whose values are restored later.
        """
        saved = self._saved
        assert saved is not None
        if self._is_built:
            skip_batches(iterator, self._model.steps_per_execution)
        else:
            assert self._train is not None
            self._train(iterator)
            self._is_built = True
        self.batches += 1
        if saved.is_finished:
            if self._is_array:  # the data of a later fit does not depend on how much of it was read
                self._model.stop_training = True
            return {}
        if (self.epochs, self.batches) == (saved.epochs, saved.batches):
            self._restore()
            return saved.logs
        return {}

    def _skip_test_batch(self, iterator: Any) -> Any:
        if not self._is_array:
            skip_batches(iterator, self._model.steps_per_execution)
        return {}

    def _skip_epoch_end(self, *arguments: Any, **named: Any) -> None:
        saved = self._saved
        assert saved is not None
        self.epochs += 1
        self.batches = 0
        if saved.is_finished:
            if self.epochs >= saved.epochs:
                self._model.stop_training = True
        elif (self.epochs, 0) == (saved.epochs, saved.batches):
            self._restore()

    def _restore(self) -> None:
        """Restores the saved state. From now on Keras trains, and callbacks are called."""
        saved = self._saved
        assert saved is not None
        self._is_skipping = False
        self._mutes.close()
        self._model.test_function = self._test
        restore_values(list_variables(self._model), saved.values)
        for callback, attributes in zip(self._callbacks, saved.callbacks, strict=False):
            restore_attributes(callback, attributes)
        self._history.epoch = list(saved.history[0])
        self._history.history = dict(saved.history[1])
        self._model.stop_training = saved.stops
        self._logs = saved.logs
        self.epochs = saved.epochs
        self.batches = saved.batches
        if self._counter is not None:
            self._counter.epochs = saved.recorded_epochs
        restore_random_state(saved.random, self._is_data_from_python and not saved.is_finished)
        self._recorder.step = saved.recorded_step
        if self._fit == self._saver.last_fit:
            self._recorder.is_silent = False


def ignore(*arguments: Any, **named: Any) -> None:
    """Does nothing, in place of a method of callbacks."""


def replace_method(kind: type, name: str, function: Callable[..., None], replaced: contextlib.ExitStack) -> None:
    """Replaces a method of a class until the stack is closed."""
    before = getattr(kind, name)

    def call(_: Any, *arguments: Any, **named: Any) -> None:
        function(*arguments, **named)

    setattr(kind, name, call)
    replaced.callback(setattr, kind, name, before)


def skip_batches(iterator: Any, count: int) -> None:
    """Reads batches like a call of Keras's training function. Raises StopIteration if there are none."""
    for number in range(count):
        try:
            next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            if number == 0:
                raise StopIteration from None
            return


def is_python_source(data: Any) -> bool:
    """Returns whether Python code of the script makes the batches: a generator or a PyDataset."""
    return inspect.isgenerator(data) or isinstance(data, keras.utils.PyDataset)


def is_array_source(data: Any) -> bool:
    """Returns whether data consists of arrays, or is None."""
    leaves = keras.tree.flatten(data)
    return all(leaf is None or (hasattr(leaf, "shape") and not isinstance(leaf, tf.data.Dataset)) for leaf in leaves)


def to_number(value: Any) -> Any:
    """Returns the number of a tensor. Keras does the same with the results of a batch."""
    return value.numpy() if hasattr(value, "numpy") else value
