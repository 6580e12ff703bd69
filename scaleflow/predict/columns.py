"""Which columns of a table a model's inputs are read from. No TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pyarrow import types

from scaleflow.errors import ConfigError
from scaleflow.interfaces.formatting import join_first
from scaleflow.tracking.saved_models import ModelInput

#: The most columns that a message names.
MOST_NAMED = 20

Array = np.ndarray[Any, Any]


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
    first = schema.field(columns[0]).type if len(columns) == 1 else None
    if first is not None and (is_list(first) or (described.is_picture and is_picture(first))):
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
    if described.is_picture:
        return "pictures (the bytes of JPEG, PNG, BMP or GIF files)"
    kind = "text" if described.dtype in ("object", "string") else str(described.dtype)
    return f"an array of shape {described.shape}, {kind}" if described.shape else f"one value, {kind}"


def check_type(name: str, type_: Any, described: ModelInput) -> None:
    """Raises ConfigError if no value of a column's type can be a value of the input."""
    if described.is_picture and is_picture(type_):
        return
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


def is_picture(type_: Any) -> bool:
    """Returns whether a column may have encoded pictures: their bytes, alone or as `datasets` keeps them."""
    if types.is_struct(type_):
        return bool(type_.get_field_index("bytes") >= 0)
    return bool(types.is_binary(type_) or types.is_large_binary(type_))


def is_list(type_: Any) -> bool:
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_))


def format_columns(names: Sequence[str]) -> str:
    return join_first(names, MOST_NAMED)
