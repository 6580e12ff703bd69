"""The columns that the outputs of a model become: in kept predictions and in those of `scaleflow.predict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow

from scaleflow.evaluation.collector import MOST_PROBABILITIES

Array = np.ndarray[Any, Any]


class DescribedOutput(Protocol):
    """One output of a model: `Outputs` of a dataset, or what a logged model says of it.

    Attributes:
        shape: its shape, without the batch dimension.
        kind: as in `Outputs`; None if it is not known.
        names: of the classes, labels or values; None if they have none.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str | None: ...

    @property
    def names(self) -> tuple[str, ...] | None: ...


@dataclass(frozen=True)
class OutputColumns:
    """The columns that the outputs of a model become.

    Attributes:
        outputs: of the model, by name.
        has_all: whether every class gets a column, however many there are.
    """

    outputs: Mapping[str, DescribedOutput]
    has_all: bool = False

    def convert(self, values: Mapping[str, Array]) -> dict[str, Any]:
        """Converts outputs [rows, ...] by name to columns by name.

        classification: `prediction`, the class; `probability`, its probability; `probability_CLASS` of each class.
        binary: the same for two classes. multi_label: `prediction_LABEL`, a boolean, and `probability_LABEL`.
        regression: `prediction`, or `prediction_NAME` for several values. Unknown: `output`. A class without a name is
        its number, counted from 0. With several outputs, names begin with that of the output.
        """
        return {
            f"{name}_{column}" if name else column: array
            for name, described in self.outputs.items()
            for column, array in self._convert_output(described, values[name]).items()
        }

    def make_empty(self) -> dict[str, Any]:
        """Returns the columns without values."""
        return self.convert({name: np.zeros((0, *each.shape), np.float32) for name, each in self.outputs.items()})

    def make_schema(self) -> Any:
        """Returns the names and the types of the columns."""
        return pyarrow.schema([(name, array.type) for name, array in self.make_empty().items()])

    def _convert_output(self, described: DescribedOutput, values: Array) -> dict[str, Any]:
        if described.kind == "classification":
            return self._convert_classes(described, compute_softmax(values))
        chances = compute_sigmoid(values)
        if described.kind == "binary" and described.shape in ((), (1,)):
            chance = chances.reshape(len(values))
            return self._convert_classes(described, np.stack([1 - chance, chance], axis=-1))
        if described.kind in ("binary", "multi_label"):
            likely = spread("prediction", chances >= 0.5, described.names)
            return {**likely, **spread("probability", chances, described.names)}
        return spread("prediction" if described.kind else "output", values, described.names)

    def _convert_classes(self, described: DescribedOutput, chances: Array) -> dict[str, Any]:
        """Converts probabilities [rows, ..., classes]."""
        names = described.names
        columns = convert_best(chances.argmax(axis=-1), chances.max(axis=-1), names)
        count = chances.shape[-1]
        if chances.ndim == 2 and (self.has_all or count <= MOST_PROBABILITIES):
            columns |= {
                f"probability_{names[n] if names else n}": to_column(np.ascontiguousarray(chances[:, n]))
                for n in range(count)
            }
        return columns


def convert_best(best: Array, chance: Array, names: Sequence[str] | None) -> dict[str, Any]:
    """Returns the columns of the most likely classes, [rows, ...] integers, and their probabilities."""
    prediction = best if names is None else np.array(names, object)[best]
    return {"prediction": to_column(prediction), "probability": to_column(chance)}


def compute_softmax(values: Array) -> Array:
    """Computes probabilities over the last axis, float32."""
    raised = np.exp(values.astype(np.float64) - values.max(axis=-1, keepdims=True))
    chances: Array = raised / raised.sum(axis=-1, keepdims=True)
    return chances.astype(np.float32)


def compute_sigmoid(values: Array) -> Array:
    """Computes probabilities, float32."""
    with np.errstate(over="ignore"):
        return (1 / (1 + np.exp(-values.astype(np.float64)))).astype(np.float32)


def spread(label: str, values: Array, names: Sequence[str] | None) -> dict[str, Any]:
    """Converts values [rows], [rows, k] or [rows, ...] to one column, to k columns, or to one column of lists."""
    if values.ndim == 2 and values.shape[1] > 1:
        return {
            f"{label}_{names[n] if names else n}": to_column(np.ascontiguousarray(values[:, n]))
            for n in range(values.shape[1])
        }
    return {label: to_column(values.reshape(len(values)) if values.ndim == 2 else values)}


def to_column(values: Array) -> Any:
    """Converts values [rows, ...] to a column of pyarrow, whose values are nested lists for more than one dimension."""
    if values.dtype == object:
        column = pyarrow.array(values.ravel().tolist(), pyarrow.string())
    else:
        column = pyarrow.array(values.ravel())
    for size in reversed(values.shape[1:]):
        column = pyarrow.FixedSizeListArray.from_arrays(column, size)
    return column
