"""`--explain`: columns with the contribution of each input column to a row's prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scaleflow.errors import ConfigError
from scaleflow.evaluation.predictions import PredictionColumns, spread, to_column
from scaleflow.features.predict.reading import Array
from scaleflow.interfaces import LearnedState, name_leaves
from scaleflow.interfaces.formatting import format_number, join_first
from scaleflow.serving.reasons import LAYER, TYPICAL, Explainer

if TYPE_CHECKING:
    from scaleflow.features.predict.chunks import RowModel

#: Maximum number of a layer's values that get one column each. More values become one column of lists.
MAX_COLUMNS = 1000


def make_explainer(state: LearnedState, predicted: PredictionColumns) -> Explainer:
    """Returns the explainer of a model's predictions. Raises ConfigError if they cannot be explained."""
    inputs = {}
    for name, described in name_leaves(state.inputs).items():
        inputs[name] = (tuple(described.shape), described.dtype)
    try:
        return Explainer(inputs, predicted.outputs, state.schema)
    except ValueError as error:
        raise ConfigError(f"--explain: needs {error}; leave it out") from error


@dataclass(frozen=True)
class ExtendedColumns(PredictionColumns):
    """The columns of predictions, and further ones: reasons, or a layer's values."""

    extra: Mapping[str, Array] = field(default_factory=dict)  # arrays without rows, by name

    def convert(self, values: Mapping[str, Array]) -> dict[str, Any]:
        columns = super().convert({name: values[name] for name in self.outputs})
        for key, empty in self.extra.items():
            name = key.removeprefix(LAYER)
            array = values.get(key, empty)
            is_wide = max(empty.shape) > MAX_COLUMNS
            added = {name: to_column(array)} if is_wide else spread(name, array, None)
            twice = columns.keys() & added.keys()
            if twice:
                raise ConfigError(f"--layer {name}: the predictions have a column {min(twice)}; give the layer's path")
            columns |= added
        return columns


def describe_cost(explainer: Explainer) -> str:
    """Returns a note with the cost of the reasons, and the typical row that they are measured from."""
    typical_values = []
    for name, value in explainer.typical.items():
        text = value if isinstance(value, str) else format_number(float(value))
        typical_values.append(f"{name}={text}")
    note = f"--explain: {explainer.cost}"
    if typical_values:
        note += f"; {TYPICAL} is that for a typical row of the training ({join_first(typical_values)})"
    return note


class ExplainingModel:
    """A model that returns its outputs and the reasons for them."""

    def __init__(self, model: RowModel, explainer: Explainer) -> None:
        self.inputs = model.inputs
        self.decode = model.decode
        self.batch_size = model.batch_size
        self.explain_failure = model.explain_failure
        self._model = model
        self._explainer = explainer

    def predict(self, arrays: Mapping[str, Array], name: Callable[[int], str]) -> dict[str, Array]:
        """Returns the outputs, and the reasons by column name."""
        outputs = self._model.predict(arrays, name)
        return outputs | self._explainer.explain(lambda rows: self._model.predict(rows, name), arrays, outputs)
