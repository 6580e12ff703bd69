"""Reads columns and samples of a split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from scaleflow.dataset.pipeline.blocks import Blocks
from scaleflow.dataset.pipeline.cache import Transforms, preprocess_arrays
from scaleflow.dataset.pipeline.rows import ArrayRows
from scaleflow.dataset.pipeline.unreadable import refuse_unreadable
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Rows, name_leaves

Array = np.ndarray[Any, Any]


def sample_rows(examples: Rows, count: int, transforms: Transforms) -> Arrays | None:
    """Returns up to `count` examples that are spread over a split, after the preprocessing, without their weights.

    None, if they are neither in memory nor rows of a table.
    """
    if not isinstance(examples, ArrayRows | Blocks):
        return None
    with refuse_unreadable("train", examples):
        inputs, targets, *_ = examples.read_spread(count)
    is_raw = isinstance(examples, Blocks)
    return preprocess_arrays(Arrays(inputs, targets), transforms if is_raw else {})


def open_columns(examples: Rows, names: Sequence[str], key: str) -> Callable[[Array], Mapping[str, Any]]:
    """Returns a function that reads columns of examples, whose indices it gets: [n] int64, ascending.

    Of a table these are any columns of its files, of another dataset inputs with a value each.

    Args:
        examples: a split, before its preprocessing.
        names: of the columns.
        key: the key of the config that names them.

    Returns:
        A function from indices to columns [n], pyarrow's or numpy's.

    Raises:
        ConfigError: if there is no such column.
    """
    if isinstance(examples, Blocks) and isinstance(examples.rows, HasColumns):
        read, keep = examples.rows.open_columns(names, key), examples.keep
        return lambda places: read(places if keep is None else np.flatnonzero(keep)[places])
    single = [name for name, shape in examples.shapes.items() if name and tuple(shape) == ()]
    for name in names:
        if name not in single:
            there_are = f"; there are {', '.join(single)}" if single else ", because its inputs have no names"
            raise ConfigError(f"{key}={name}: the dataset has no input of that name with one value{there_are}")
    return lambda places: {name: name_leaves(examples.read(places)[0])[name] for name in names}


@runtime_checkable
class HasColumns(Protocol):
    """A `RowReader` that can read columns which are no inputs."""

    def open_columns(self, names: Sequence[str], key: str) -> Callable[[Array], Mapping[str, Any]]:
        """Returns a function from rows to columns. Raises ConfigError if a file lacks one."""
