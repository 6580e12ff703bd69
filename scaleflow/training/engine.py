"""What an engine and the host's half of training know of each other: the engine drives, the host watches."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import keras
import numpy as np

from scaleflow.interfaces import Feed


class Host(Protocol):
    """The host's half of a run, to be told of each call and epoch."""

    @property
    def epochs(self) -> int:
        """How many the run has, if nothing ends it before."""

    @property
    def epoch(self) -> int:
        """The one that the next step is in, from 0: where the run begins, or goes on."""

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def step(self) -> int:
        """Updates of the whole run so far."""

    @property
    def first(self) -> int:
        """The next step's place in its epoch, from 0."""

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins, counted from 0."""

    def next_steps(self) -> int:
        """How many steps the next call takes; 0 where the epoch or the run is over."""

    def trace_call(self) -> AbstractContextManager[bool]:
        """Around a call, whose result has to be there at the end; gives whether it is to be of a single step."""

    def end_call(self, steps: int, means: Mapping[str, float], seconds: float, waited: float = 0.0) -> None:
        """A call has taken so many steps in so many seconds; `means` are those over the epoch so far.

        Args:
            waited: seconds before the call in which the epoch's input was started.
        """

    def end_epoch(self) -> bool:
        """An epoch is over; gives whether another one follows."""


class Engine(Protocol):
    """What trains and evaluates one model under one strategy."""

    @property
    def loss_scale(self) -> float | None:
        """The dynamic loss scale, where there is one."""

    @property
    def flops_per_example(self) -> float | None:
        """Operations that a step computes for an example, once it is traced; None where they can't be counted."""

    def run(self, feed: Feed, host: Host) -> None:
        """Trains until the host says that it is enough."""

    @property
    def model(self) -> keras.Model:
        """What is trained."""

    def trace(self, train: Feed, *others: Feed | None) -> None:
        """Compiles for these feeds without running anything, so that a model's faults show early."""

    def evaluate(self, feed: Feed) -> Mapping[str, float]:
        """The loss and metrics over a whole split, every example once."""

    def read_confusion(self, feed: Feed) -> np.ndarray[Any, Any] | None:
        """Of a split's last evaluation: how many examples of each class (row) were taken for each (column)."""

    def gather_model(self) -> keras.Model:
        """The model with the weights of now, in this process and in one piece."""

    def count_updates(self, done: int) -> int:
        """The optimizer's updates after so many steps were taken."""

    def read_state(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Copies of all variables, and of the sums of the epoch so far. All workers have to call it."""

    def restore(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Puts back what `state` gave, under whatever strategy that was."""

    def set_rate_factor(self, factor: float, held: float) -> None:
        """From now on the learning rate is `factor` times what the config says.

        Args:
            factor: this.
            held: the factor that is in the state that was put back, where the rate is part of it.
        """

    def restore_model(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """The same for the model alone."""
