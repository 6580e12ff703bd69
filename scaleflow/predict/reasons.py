"""`--explain`: columns that say how much each column of a row contributes to its prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scaleflow.errors import ConfigError
from scaleflow.evaluation.predictions import OutputColumns, spread, to_column
from scaleflow.interfaces import LearnedState, name_leaves
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

#: The most values of a layer that get a column each; more are a list.
MOST_COLUMNS = 1000


def check_explained(state: LearnedState, predicted: OutputColumns) -> list[str]:
    """Returns the columns that a prediction is explained by. Raises ConfigError if the model has no such columns."""
    shapes = {name: tuple(each.shape) for name, each in name_leaves(state.inputs).items()}
    if needed := find_missing_kind(shapes, predicted.outputs, state.schema):
        raise ConfigError(f"--explain: needs {needed}; leave it out")
    return list(shapes)


@dataclass(frozen=True)
class ExtendedColumns(OutputColumns):
    """The columns of predictions, and further ones: reasons, the outputs of a layer.

    Attributes:
        more: arrays of no rows of them, by name.
    """

    more: Mapping[str, Array] = field(default_factory=dict)

    def convert(self, values: Mapping[str, Array]) -> dict[str, Any]:
        found = super().convert({name: values[name] for name in self.outputs})
        for name, empty in self.more.items():
            each, is_wide = values.get(name, empty), max(empty.shape) > MOST_COLUMNS
            added = {name: to_column(each)} if is_wide else spread(name, each, None)
            if twice := found.keys() & added.keys():
                raise ConfigError(f"--layer {name}: the predictions have a column {min(twice)}; give the layer's path")
            found |= added
        return found


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
        return outputs | {name_reason(column): each for column, each in found.items()}
