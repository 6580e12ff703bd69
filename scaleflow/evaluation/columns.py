"""The columns that the outputs of a model become: in kept predictions and in those of `scaleflow.predict`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow

from scaleflow.serving.answers import Array, Outputs, divide_columns, make_logit_columns, make_prediction_columns


@dataclass(frozen=True)
class OutputColumns:
    """The columns that the outputs of a model become.

    Attributes:
        outputs: of the model, by name.
        has_all: whether every class gets a column, however many there are.
        has_logits: whether logits get columns, too.
    """

    outputs: Outputs
    has_all: bool = False
    has_logits: bool = False

    def convert(self, values: dict[str, Array]) -> dict[str, Any]:
        """Converts outputs [rows, ...] by name to columns by name, as `serving/answers.py` says."""
        values = {name: np.asarray(each, self.outputs[name].dtype) for name, each in values.items()}
        columns = make_prediction_columns(self.outputs, values, self.has_all)
        if self.has_logits:
            columns |= make_logit_columns(self.outputs, values)
        return {name: to_column(each) for name, each in columns.items()}

    def make_empty(self) -> dict[str, Any]:
        """Returns the columns without values."""
        return self.convert({name: np.zeros((0, *each.shape)) for name, each in self.outputs.items()})

    def make_schema(self) -> Any:
        """Returns the names and the types of the columns."""
        return pyarrow.schema([(name, array.type) for name, array in self.make_empty().items()])


def convert_best(best: Array, chance: Array, names: Sequence[str] | None) -> dict[str, Any]:
    """Returns the columns of the most likely classes, [rows, ...] integers, and their probabilities."""
    prediction = best if names is None else np.array(names, object)[best]
    return {"prediction": to_column(prediction), "probability": to_column(chance)}


def spread(label: str, values: Array, names: Sequence[str] | None) -> dict[str, Any]:
    """Converts values [rows], [rows, k] or [rows, ...] to one column, to k columns, or to one column of lists."""
    return {name: to_column(each) for name, each in divide_columns(label, values, names).items()}


def to_column(values: Array) -> Any:
    """Converts values [rows, ...] to a column of pyarrow, whose values are nested lists for more than one dimension."""
    if values.dtype == object:
        column = pyarrow.array(values.ravel().tolist(), pyarrow.string())
    else:
        column = pyarrow.array(values.ravel())
    for size in reversed(values.shape[1:]):
        column = pyarrow.FixedSizeListArray.from_arrays(column, size)
    return column
