"""Whether the rows of a table are distributed as in training, on a sample of them. No TensorFlow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from scaleflow.data_checks.drift import HINT, DataFinding, DriftCounter, expand_input, to_texts_array
from scaleflow.interfaces import LearnedState, name_leaves

#: The most rows of a chunk that are compared.
MOST_ROWS = 2048

Array = np.ndarray[Any, Any]


class DriftWatch:
    """Compares the inputs of a model with the schema that its run learned.

    Args:
        state: what the run learned; None, or without a schema: nothing is known.
        counted: columns whose unknown categories others count, all of them.
    """

    def __init__(self, state: LearnedState | None, counted: Collection[str]) -> None:
        self._counter = None if state is None or not state.schema else DriftCounter(state.schema)
        self._inputs = {} if state is None else name_leaves(state.inputs)
        self._counted = counted
        self.rows = 0

    def add(self, inputs: Mapping[str, Array]) -> None:
        """Adds rows, [n, ...] by the name of the input; numbers, or texts ("" is missing)."""
        rows = len(next(iter(inputs.values()), ()))
        if self._counter is None or not rows:
            return
        taken = slice(None, None, -(-rows // MOST_ROWS))
        for name, values in inputs.items():
            if name in self._inputs:
                for column, each in expand_input(name, self._inputs[name], values[taken]).items():
                    self._counter.add(column, to_texts_array(each) if each.dtype.kind in "OSU" else each)
        self.rows += len(range(rows)[taken])

    def find(self) -> list[DataFinding]:
        """Returns what differs: drift, and categories that nobody else counts."""
        found = [] if self._counter is None else list(self._counter.find())
        return [
            each
            for each in found
            if (each.level != HINT or each.rule == "unseen")
            and not (each.rule == "unseen" and set(each.columns) & set(self._counted))
        ]
