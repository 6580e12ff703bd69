"""The user's callbacks in a session: their hooks, their values, and notes about their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from scaleflow.interfaces.events import Event, MetricsLogged, Note
from scaleflow.training.callbacks import Callbacks
from scaleflow.training.engine import Engine
from scaleflow.training.length import Length


class UserHooks:
    """Calls the user's callbacks, and reports the values of user code.

    Attributes:
        values: the last values that callbacks and other user code have reported, by name.
    """

    def __init__(
        self, callbacks: Sequence[Any], engine: Engine, length: Length, emit: Callable[[Event], object]
    ) -> None:
        self.values: dict[str, float] = {}
        self._callbacks = Callbacks(callbacks, engine, length.epochs, steps=length.steps_per_epoch)
        self._engine = engine
        self._emit = emit
        self._doubts: list[str] = []

    @property
    def has_callbacks(self) -> bool:
        return len(self._callbacks) > 0

    @property
    def want_end(self) -> bool:
        """Whether a callback has asked for the end of the run."""
        return self._callbacks.wants_end

    def call(self, hook: str, *arguments: Any, updates: Callable[[], int], is_repeated: bool = False) -> None:
        """Calls a hook of all callbacks, and reports the values that they add to its logs.

        Args:
            updates: returns the number of optimizer updates so far.
            is_repeated: whether the restored state already contains the changes of the hook. Then it is restored again.
        """
        if not self.has_callbacks:
            return
        tensors: Mapping[str, Any] = {}
        host: Mapping[str, Any] = {}
        arrays: Mapping[str, Any] = {}
        if is_repeated:
            tensors = self._engine.read_state()
            host, arrays = self._callbacks.read_state()
        added = self._callbacks.call_hook(hook, *arguments)
        if added:
            self.report_values(added, updates())
        if is_repeated:
            self._engine.restore(tensors)
            self._callbacks.restore(host, arrays)

    def report_values(self, values: Mapping[str, float], updates: int) -> None:
        """Reports values of user code at a number of optimizer updates."""
        self.values.update(values)
        self._emit(MetricsLogged(updates, dict(values)))

    def report_doubts(self) -> None:
        """Emits a note about attributes of callbacks that a checkpoint does not hold, once for each attribute."""
        doubts = [doubt for doubt in self._callbacks.list_doubts() if doubt not in self._doubts]
        if doubts:
            self._doubts += doubts
            self._emit(
                Note(
                    f"training.callbacks: checkpoints do not hold {', '.join(doubts)}: a resumed run has what the "
                    "constructor makes; give the class get_state and set_state"
                )
            )

    def read_state(self) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        """Returns what a checkpoint keeps: values for `Snapshot.host`, and the arrays of the callbacks by name."""
        host, arrays = self._callbacks.read_state()
        self.report_doubts()
        return {**host, "own_values": self.values}, arrays

    def restore(self, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Restores what `read_state` returned."""
        self.values = dict(host["own_values"])
        self._callbacks.restore(host, arrays)
