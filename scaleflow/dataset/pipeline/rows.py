"""Arrays by the indices of their examples, and the rows of any split that a source gives."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import tensorflow as tf

from scaleflow.dataset.pipeline.contract import check_cached_targets, check_ids, check_targets, check_weights
from scaleflow.dataset.pipeline.records import DIGESTED, StreamRows, spread_evenly
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

#: Arrays are digested whole up to this size: a core takes 2 s for it. Of larger ones, so many bytes are a sample.
WHOLE_BYTES = 2 << 30
SAMPLE_BYTES = 64 << 20

#: What a digest covers if it is of all values of the split.
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
        arrays = (array for part in self.parts for array in name_leaves(part).values())
        return "file" if any(isinstance(array, np.memmap) for array in arrays) else "memory"

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
        return tf.data.Dataset.from_tensor_slices(self.parts)

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

    def read_cheap_targets(self) -> tuple[Any, Array | None]:
        return self.targets, self.weights

    def read_to_digest(self) -> tuple[str, Iterator[tuple[Any, ...]]]:
        if self.nbytes <= WHOLE_BYTES:
            return ALL_VALUES, iter([self.parts])
        places = spread_evenly(len(self), max(DIGESTED, SAMPLE_BYTES // max(1, self.nbytes // len(self))))
        return f"a sample of {len(places)} examples", iter([self.read(places)])

    def locate(self, places: Array) -> tuple[None, Array]:
        return None, places if self.rows is None else self.rows[places]

    def check_targets(self, outputs: OutputStructure, split: str = "") -> ArrayRows:
        for name, each in name_leaves(outputs).items():
            check_targets(each, split, name, name_leaves(self.targets)[name])
        return self

    def check_cached(self, inputs: InputStructure, split: str) -> None:
        check_ids(inputs, split, self.inputs)
        check_cached_targets(split, self.targets)
        if self.weights is not None:
            check_weights(split, self.weights)


def to_rows(examples: Examples | Rows) -> Rows:
    """Returns the examples of a source by their indices; rows are returned as they are."""
    if isinstance(examples, ArrayRows | StreamRows):
        return examples
    if isinstance(examples, Arrays):
        weights = None if examples.weights is None else examples.weights.astype(np.float32)
        return ArrayRows(**{**{each.name: getattr(examples, each.name) for each in fields(Arrays)}, "weights": weights})
    return StreamRows(**{each.name: getattr(examples, each.name) for each in fields(Stream)})


#: What a digest covers if it is of all records of a stream, before they are decoded.
ALL_RECORDS = "all records"


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a split."""

    examples: int  # their number
    digest: str  # 16 hexadecimal digits: a hash of the split's name and size, and of what `covers` says
    #: (dtype, shape of one example), or a dict of them by name
    inputs: Any
    targets: Any
    #: `all`, `all records` (of a stream, before they are decoded) or `a sample of 32 examples`, spread evenly over the
    #: split (of a stream whose records are not in memory, its first ones)
    covers: str = ALL_VALUES
    paths: tuple[str, ...] = ()  # the files that the split is read from, as far as the source says


def fingerprint_split(split: str, examples: Rows, outputs: OutputStructure | None = None) -> Fingerprint:
    """Computes the fingerprint of a split from its raw examples in memory, or from a sample without unreadable ones.

    The names of the classes in `outputs` count: targets are numbers, which stay the same if a class is renamed.
    """
    covers, portions = examples.read_to_digest()
    digest = hashlib.blake2b(f"{split} {len(examples)}".encode(), digest_size=8)
    names = {} if outputs is None else {name: each.names for name, each in name_leaves(outputs).items() if each.names}
    digest.update(repr(names).encode())
    specs: list[Any] = []
    for parts in portions:
        for name, values in (named for part in parts for named in name_leaves(part).items()):
            digest.update(f"{name} {dtype_name(values)} {values.shape}".encode())
            update_digest(digest, values)
        specs = specs or [
            {name: describe_values(each) for name, each in name_leaves(part).items()} for part in parts[:2]
        ]
    contents = [values for values in examples.records if not are_paths(values)]
    covers = ALL_RECORDS if contents and len(contents) == len(examples.records) else covers
    for values in contents:
        update_digest(digest, values)
    inputs, targets = (each.get("", each) for each in specs)
    return Fingerprint(len(examples), digest.hexdigest(), inputs, targets, covers, examples.paths)


def are_paths(values: Array) -> bool:
    """Returns whether texts are paths of files, whose names do not count: the folder of the data can be moved."""
    return dtype_name(values) == "string" and values.size > 0 and os.path.isfile(values.flat[0])  # noqa: PTH113


def describe_values(values: Array) -> tuple[str, Sequence[int]]:
    return dtype_name(values), list(values.shape[1:])


def dtype_name(values: Array) -> str:
    return "string" if values.dtype.kind in "OSU" else values.dtype.name


def update_digest(digest: hashlib.blake2b, values: Array) -> None:
    """Adds all values. Texts that are `str` and `bytes` count the same."""
    if dtype_name(values) != "string":
        digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        return
    texts = [text if isinstance(text, bytes) else str(text).encode() for text in values.ravel().tolist()]
    digest.update(np.fromiter(map(len, texts), np.int64, len(texts)).data)
    digest.update(b"".join(texts))
