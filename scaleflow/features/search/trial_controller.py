"""The controller of an engine in a trial: decides how many steps to take, and when the trial is over."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scaleflow.training import Length, WorkerSync

#: Number of epochs that no trial reaches.
MANY_EPOCHS = 1_000_000


class TrialController:
    """The `Controller` of one engine in a trial. Subclasses decide its end. `Controller` documents the methods."""

    def __init__(self, length: Length, sync: WorkerSync) -> None:
        self.epochs = MANY_EPOCHS
        self.epoch = 0
        self.step = 0
        self.steps_per_epoch = length.steps_per_epoch
        self.stopped = False  # on request
        self.is_over = False
        self._sync = sync

    @property
    def first(self) -> int:
        return self.step - self.epoch * self.steps_per_epoch

    @property
    def steps_left(self) -> int:
        return 0 if self.is_over else self.steps_per_epoch - self.first

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def next_steps(self) -> int:
        return min(self.steps_left, self.choose_steps())

    def trace_call(self) -> AbstractContextManager[bool]:
        return contextlib.nullcontext(False)

    def end_call(self, steps: int, means: Mapping[str, float], seconds: float, waited: float = 0.0) -> None:
        agreed, self.stopped = self._sync(seconds + waited)
        self.step += steps
        self.is_over = self.stopped or self.record_call(steps, agreed)

    def end_epoch(self) -> bool:
        return not self.is_over

    def choose_steps(self) -> int:
        """Returns the number of steps of the next call."""
        raise NotImplementedError

    def record_call(self, steps: int, seconds: float) -> bool:
        """Records a call. Returns whether the trial is over."""
        raise NotImplementedError
