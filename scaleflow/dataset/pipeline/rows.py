"""Arrays by the indices of their examples, and the rows of any split that a source gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import tensorflow as tf

from scaleflow.dataset.pipeline.records import DIGESTED, StreamRows, check_single_values, spread_evenly
from scaleflow.interfaces import Arrays, Examples, Rows, Stream, map_leaves, name_leaves

#: Arrays are digested whole up to this size: a core takes 2 s for it. Of larger ones, so many bytes are a sample.
WHOLE_BYTES = 2 << 30
SAMPLE_BYTES = 64 << 20

#: What a digest covers if it is of all values of the split.
ALL_VALUES = "all"

BATCH = 1024

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ArrayRows(Arrays):
    """Examples in memory, or in memory-mapped files."""

    is_random_access: ClassVar[bool] = True
    is_spread: ClassVar[bool] = True
    paths: ClassVar[tuple[str, ...]] = ()

    @property
    def drawn_together(self) -> int:
        return len(self)

    @property
    def is_weighted(self) -> bool:
        return self.weights is not None

    @property
    def shapes(self) -> Mapping[str, Any]:
        return {name: each.shape[1:] for name, each in name_leaves(self.inputs).items()}

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

    def read_first(self, count: int) -> Any:
        return map_leaves(lambda array: np.array(array[:count]), self.inputs)

    def read_spread(self, count: int, reads_all: bool = False) -> tuple[Any, ...]:
        return self.read(spread_evenly(len(self), count))

    def iterate(self, pick: Callable[..., Any]) -> Iterator[Any]:
        for first in range(0, len(self), BATCH):
            yield pick(*self.read(slice(first, first + BATCH)))  # type: ignore[arg-type]

    def read_to_learn(self, name: str) -> Iterator[Array]:
        inputs = name_leaves(self.inputs)[name]
        return (inputs[first : first + BATCH] for first in range(0, len(self), BATCH))

    def recall(self, what: str, options: Any, learn: Callable[[], Any]) -> Any:
        return learn()

    def open_columns(self, names: Sequence[str], key: str) -> Callable[[Array], Mapping[str, Any]]:
        check_single_values(names, self.shapes, key)
        return lambda places: {name: name_leaves(self.read(places)[0])[name] for name in names}

    def read_cheap_targets(self) -> tuple[Any, Array | None]:
        return self.targets, self.weights

    def read_to_digest(self) -> tuple[str, Iterator[tuple[Any, ...]]]:
        if self.nbytes <= WHOLE_BYTES:
            return ALL_VALUES, iter([self.parts])
        places = spread_evenly(len(self), max(DIGESTED, SAMPLE_BYTES // max(1, self.nbytes // len(self))))
        return f"a sample of {len(places)} examples", iter([self.read(places)])

    def locate(self, places: Array) -> tuple[None, Array]:
        return None, places if self.rows is None else self.rows[places]

    def name_rows(self, places: Sequence[int]) -> list[str]:
        return [f"example {place}" for place in places]

    def find_first_unreadable(self) -> None:
        return None


def to_rows(examples: Examples | Rows) -> Rows:
    """Returns the examples of a source by their indices; rows are returned as they are."""
    if isinstance(examples, ArrayRows | StreamRows):
        return examples
    if isinstance(examples, Arrays):
        weights = None if examples.weights is None else examples.weights.astype(np.float32)
        return ArrayRows(**{**{each.name: getattr(examples, each.name) for each in fields(Arrays)}, "weights": weights})
    return StreamRows(**{each.name: getattr(examples, each.name) for each in fields(Stream)})
