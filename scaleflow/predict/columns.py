"""Which columns of a table a model's inputs are read from, and which columns its outputs become. No TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow
from pyarrow import types

from scaleflow.errors import ConfigError
from scaleflow.tracking.saved_models import ModelInput, ModelOutput

#: The most classes that get a column each, unless the user asks for them.
MOST_PROBABILITIES = 20

#: The most columns that a message names.
MOST_NAMED = 20

Array = np.ndarray[Any, Any]


# ---------------------------------------------------------------------------------------------
# Inputs
# ---------------------------------------------------------------------------------------------


def match_columns(
    inputs: Mapping[str, ModelInput], schema: Any, selected: Sequence[str], target: str | None
) -> dict[str, list[str]]:
    """Returns the columns of each input.

    An input with a name is read from the column of that name. An input without one is read from several columns with a
    value each, in order, or from one column of lists.

    Args:
        inputs: of the model.
        schema: of the table.
        selected: the columns that the user names, in the order of the model's values; empty: all but the target.
        target: the target that the model was trained on, if it is known.

    Raises:
        ConfigError: if columns are missing, or cannot be what the model takes.
    """
    if "" not in inputs:
        if selected:
            raise ConfigError(
                f"--columns: this model takes columns by name: {format_columns(list(inputs))}; leave it out"
            )
        if missing := [name for name in inputs if name not in schema.names]:
            raise ConfigError(
                f"--input: there is no column {format_columns(missing)}, which the model takes; the table has "
                f"{format_columns(schema.names)}"
            )
        for name, described in inputs.items():
            check_type(name, schema.field(name).type, described)
        return {name: [name] for name in inputs}
    if missing := [name for name in selected if name not in schema.names]:
        raise ConfigError(
            f"--columns {format_columns(missing)}: there is no such column; the table has "
            f"{format_columns(schema.names)}"
        )
    columns = list(selected) or [name for name in schema.names if name != target]
    described = inputs[""]
    count = math.prod(described.shape)
    if len(columns) == 1 and is_list(schema.field(columns[0]).type):
        check_type(columns[0], schema.field(columns[0]).type, described)
    elif len(columns) == count:
        for name in columns:
            check_type(name, schema.field(name).type, ModelInput((), described.dtype))
    else:
        raise ConfigError(
            f"--input: the model takes {describe_model_input(described)}: {count:,} column"
            f"{'s' if count != 1 else ''} with a value each, or one column of lists; the table has {len(columns)}: "
            f"{format_columns(columns)}; name those of the model, in its order, with --columns"
        )
    return {"": columns}


def describe_model_input(described: ModelInput) -> str:
    """Returns an input in words, such as `an array of shape (8, 8, 1), float32`."""
    kind = "text" if described.dtype in ("object", "string") else str(described.dtype)
    return f"an array of shape {described.shape}, {kind}" if described.shape else f"one value, {kind}"


def check_type(name: str, type_: Any, described: ModelInput) -> None:
    """Raises ConfigError if no value of a column's type can be a value of the input."""
    inner = type_
    while is_list(inner):
        inner = inner.value_type
    if is_list(type_) and not described.shape:
        problem = "the model takes one value of each row"
    elif math.prod(described.shape) != 1 and not is_list(type_):
        problem = f"the model takes a list, {describe_model_input(described)}"
    elif types.is_nested(inner) or types.is_binary(inner) or types.is_large_binary(inner):
        problem = "the model takes numbers, texts or dates"
    else:
        return
    raise ConfigError(f"--input: the column {name} has the type {type_}, and {problem}")


def is_list(type_: Any) -> bool:
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_))


def format_columns(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


# ---------------------------------------------------------------------------------------------
# Outputs
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputColumns:
    """The columns that the outputs of a model become.

    Attributes:
        outputs: of the model, by name.
        has_all: whether every class gets a column, however many there are.
    """

    outputs: Mapping[str, ModelOutput]
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

    def _convert_output(self, described: ModelOutput, values: Array) -> dict[str, Any]:
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

    def _convert_classes(self, described: ModelOutput, chances: Array) -> dict[str, Any]:
        """Converts probabilities [rows, ..., classes]."""
        best, names = chances.argmax(axis=-1), described.names
        columns = {
            "prediction": to_column(best if names is None else np.array(names, object)[best]),
            "probability": to_column(chances.max(axis=-1)),
        }
        count = chances.shape[-1]
        if chances.ndim == 2 and (self.has_all or count <= MOST_PROBABILITIES):
            columns |= {
                f"probability_{names[n] if names else n}": to_column(np.ascontiguousarray(chances[:, n]))
                for n in range(count)
            }
        return columns


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
