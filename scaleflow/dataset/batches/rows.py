"""Rows of arrays: examples in memory or in mapped files, which are accessed by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.records import (
    DIGESTED,
    StreamRows,
    draw_places,
    reading_options,
    spread_evenly,
)
from scaleflow.dataset.batches.value_checks import check_cached_targets, check_ids, check_targets, check_weights
from scaleflow.interfaces import (
    Arrays,
    Examples,
    InputStructure,
    OutputStructure,
    Rows,
    Stream,
    map_leaves,
    name_leaves,
)

#: Arrays up to this size are digested whole: a core takes 2 s for it.
WHOLE_BYTES = 2 << 30

#: A sample of larger arrays has this size.
SAMPLE_BYTES = 64 << 20

#: The `covers` of a digest of all values.
ALL_VALUES = "all"

BATCH = 1024

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ArrayRows(Arrays, Rows):
    """Examples in memory, or in memory-mapped files."""

    is_random_access: ClassVar[bool] = True

    @property
    def spec(self) -> tuple[Any, ...]:
        return tuple(map_leaves(lambda array: tf.TensorSpec(array.shape[1:], array.dtype), part) for part in self.parts)

    @property
    def place(self) -> Literal["memory", "file"]:
        for part in self.parts:
            for array in name_leaves(part).values():
                if isinstance(array, np.memmap):
                    return "file"
        return "memory"

    def select(self, chosen: Array) -> ArrayRows:
        numbered = self if self.rows is not None else replace(self, rows=np.arange(len(self)))
        return numbered.map(lambda array: array[chosen])

    def limit(self, count: int) -> Self:
        return self.map(lambda array: array[:count])

    def repeat(self, times: int) -> ArrayRows:
        return self.map(lambda array: np.concatenate([array] * times))

    def map_targets(self, convert: Callable[[Any], Any]) -> ArrayRows:
        with tf.device("CPU:0"):
            targets = convert(map_leaves(tf.convert_to_tensor, self.targets))
        return replace(self, targets=map_leaves(np.asarray, targets))

    def read(self, places: Array) -> tuple[Any, ...]:
        return tuple(map_leaves(lambda array: np.asarray(array[places]), part) for part in self.parts)

    def stream(self) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(self.parts).with_options(reading_options())

    def read_first(self, count: int) -> Any:
        return map_leaves(lambda array: np.array(array[:count]), self.inputs)

    def read_spread(self, count: int, reads_all: bool = False) -> tuple[Array, tuple[Any, ...]]:
        places = draw_places(len(self), count)
        return places, self.read(places)

    def iterate(self, pick: Callable[..., Any]) -> Iterator[Any]:
        for first in range(0, len(self), BATCH):
            yield pick(*self.read(slice(first, first + BATCH)))  # type: ignore[arg-type]

    def read_to_learn(self, name: str) -> Iterator[Array]:
        inputs = name_leaves(self.inputs)[name]
        return (inputs[first : first + BATCH] for first in range(0, len(self), BATCH))

    def read_cheap_targets(self) -> tuple[Any, Array | None]:
        return self.targets, self.weights

    def read_to_digest(self) -> tuple[str, Iterator[tuple[Any, ...]]]:
        if self.nbytes <= WHOLE_BYTES:
            return ALL_VALUES, iter([self.parts])
        bytes_per_example = max(1, self.nbytes // len(self))
        places = spread_evenly(len(self), max(DIGESTED, SAMPLE_BYTES // bytes_per_example))
        return f"a sample of {len(places)} examples", iter([self.read(places)])

    def locate(self, places: Array) -> tuple[None, Array]:
        return None, places if self.rows is None else self.rows[places]

    def check_targets(self, outputs: OutputStructure, split: str = "") -> ArrayRows:
        for name, described in name_leaves(outputs).items():
            check_targets(described, split, name, targets=name_leaves(self.targets)[name])
        return self

    def check_cached(self, inputs: InputStructure, split: str) -> None:
        check_ids(inputs, split, self.inputs)
        check_cached_targets(split, self.targets)
        if self.weights is not None:
            check_weights(split, self.weights)


def to_rows(examples: Examples | Rows) -> Rows:
    """Returns the examples of a source as `Rows`. Rows are returned unchanged."""
    if isinstance(examples, ArrayRows | StreamRows):
        return examples
    if isinstance(examples, Arrays):
        rows = ArrayRows(**{field.name: getattr(examples, field.name) for field in fields(Arrays)})
        weights = None if rows.weights is None else rows.weights.astype(np.float32)
        return replace(rows, weights=weights)
    stream = StreamRows(**{field.name: getattr(examples, field.name) for field in fields(Stream)})
    return replace(stream, dataset=stream.dataset.with_options(reading_options()))
