"""What trains in which epoch, if `model.freeze` changes during the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from scaleflow.interfaces import FreezePhase
from scaleflow.training.forward_backward import to_tf_variable

#: The name in a checkpoint of the updates before the first one of each variable.
STARTS = "training/starts"

#: The start of a variable that has not begun to train.
NOT_BEGUN = -1


class FreezePhases:
    """The phases of one run, and which one the model is in.

    Outside of training, all that trains in any phase is trainable, as the optimizer's state is of these variables.

    Args:
        model: trainable as after `model.list_freeze_phases`.
        phases: by their first epoch, the first of which is 0.

    Attributes:
        variables: what trains in any phase.
        parameters: a phase's first epoch -> how many numbers train in it.
    """

    def __init__(self, model: keras.Model, phases: Sequence[FreezePhase]) -> None:
        self._phases = phases
        self.variables = list(model.trainable_variables)
        self.parameters = {phase.epoch: self._count_parameters(phase) for phase in phases}
        self._outside = [(part, part.trainable) for part, _ in phases[0].trainable]
        self._starts = np.full(len(self.variables), NOT_BEGUN, np.int64)
        self._places = {id(to_tf_variable(variable)): index for index, variable in enumerate(self.variables)}
        self._traced: tuple[int, ...] | None = None

    @property
    def largest(self) -> int:
        """The first epoch of the phase in which the most numbers train."""
        return max(self.parameters, key=lambda epoch: self.parameters[epoch])

    def begin(self, epoch: int, updates: int) -> bool:
        """Makes what trains in an epoch trainable. `updates` is the number of optimizer updates so far.

        Returns:
            Whether the training step must be traced again.
        """
        phase = [phase for phase in self._phases if phase.epoch <= epoch][-1]
        self._set(phase.trainable)
        trained = np.array([variable.trainable for variable in self.variables])
        self._starts[trained & (self._starts == NOT_BEGUN)] = updates
        before, self._traced = self._traced, (phase.epoch, *self._starts[trained].tolist())
        return before != self._traced

    def end(self) -> None:
        """Makes all that trains in any phase trainable."""
        self._set(self._outside)

    def find_start(self, variable: Any) -> int:
        """Returns the number of updates before the first one of a variable."""
        return int(self._starts[self._places[id(to_tf_variable(variable))]])

    def read_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Returns what a checkpoint needs."""
        return {STARTS: self._starts.copy()}

    def restore(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Restores what `read_state` returned."""
        self._starts[:] = values[STARTS]

    def _count_parameters(self, phase: FreezePhase) -> int:
        ids = {id(part) for part, is_trained in phase.trainable if is_trained}
        return sum(math.prod(variable.shape) for variable in self.variables if id(variable) in ids)

    def _set(self, trainable: Sequence[tuple[Any, bool]]) -> None:
        for part, is_trained in trainable:
            part._trainable = is_trained  # the setter of a layer would change what is inside it
