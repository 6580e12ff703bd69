"""`--explain`: columns that say how much each column of a row contributes to its prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.evaluation.predictions import OutputColumns, to_column
from scaleflow.interfaces import LearnedState, name_leaves
from scaleflow.interfaces.events import Note
from scaleflow.interfaces.formatting import format_number, join_first
from scaleflow.predict.reading import Array
from scaleflow.serving.reasons import (
    TYPICAL,
    count_predictions,
    explain_rows,
    find_explained,
    find_missing_kind,
    find_typical,
    name_reason,
)

if TYPE_CHECKING:
    from scaleflow.predict.chunks import RowModel

#: A model, the devices in words, and notes.
Loaded = tuple["RowModel", str, list[Note]]
Load = Callable[[Path], Loaded]


def check_explained(state: LearnedState, predicted: OutputColumns) -> list[str]:
    """Returns the columns that a prediction is explained by. Raises ConfigError if the model has no such columns."""
    shapes = {name: tuple(each.shape) for name, each in name_leaves(state.inputs).items()}
    if needed := find_missing_kind(shapes, predicted.outputs, state.schema):
        raise ConfigError(f"--explain: needs {needed}; leave it out")
    return list(shapes)


@dataclass(frozen=True)
class ReasonColumns(OutputColumns):
    """The columns of predictions, and their reasons."""

    reasons: tuple[str, ...] = ()

    def convert(self, values: Mapping[str, Array]) -> dict[str, Any]:
        empty = np.zeros(0, np.float32)
        found = super().convert({name: values[name] for name in self.outputs})
        return found | {name: to_column(values.get(name, empty)) for name in self.reasons}


class ExplainingModel:
    """A model that returns reasons, too."""

    def __init__(self, model: RowModel, state: LearnedState, predicted: OutputColumns) -> None:
        self.inputs, self.decode, self.batch_size = model.inputs, model.decode, model.batch_size
        self.explain_failure = model.explain_failure
        dtypes = {name: each.dtype for name, each in name_leaves(state.inputs).items()}
        self._model, self._typical = model, find_typical(state.schema, dtypes)
        (self._output,) = predicted.outputs.items()

    @property
    def note(self) -> str:
        """What the reasons cost, and what they are measured from."""
        shown = [f"{name}={v if isinstance(v, str) else format_number(float(v))}" for name, v in self._typical.items()]
        return (
            f"--explain: {count_predictions(len(self._typical)):,} predictions for each row; {TYPICAL} is that for a "
            f"typical row of the training ({join_first(shown)})"
        )

    def predict(self, arrays: Mapping[str, Array], name: Callable[[int], str]) -> dict[str, Array]:
        """Returns the outputs, and the reasons by the names of their columns."""
        outputs = self._model.predict(arrays, name)
        output, described = self._output
        measure = find_explained(described, outputs[output])
        found = explain_rows(lambda rows: measure(self._model.predict(rows, name)[output]), arrays, self._typical)
        return outputs | {name_reason(column): each.astype(np.float32) for column, each in found.items()}


def load_explaining(
    load: Callable[[Path], tuple[RowModel, str, list[Note]]],
    state: LearnedState,
    predicted: OutputColumns,
    folder: Path,
) -> tuple[RowModel, str, list[Note]]:
    """Loads a model that returns reasons, too, with a note on what they cost; see `load_predictor`."""
    model, devices, notes = load(folder)
    explaining = ExplainingModel(model, state, predicted)
    return explaining, devices, [*notes, Note(explaining.note)]
