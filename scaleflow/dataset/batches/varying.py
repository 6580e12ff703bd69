"""Streams that differ at each reading, such as those with a random augmentation in `tf.data.Dataset.map`.

They are read again in each epoch and not cached, because a cache would keep the first random changes for the whole run.
If only the order of the examples changes, a stream is sorted once, so that all workers and a resumed run share the
order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.matched_source import find_original
from scaleflow.dataset.batches.records import (
    RECORD_BYTES,
    Records,
    StreamRows,
    cache_records,
    decode_records,
    reading_options,
    record_bytes,
    to_record,
)
from scaleflow.dataset.own import OwnSource
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Dataset, Source, Workers
from scaleflow.interfaces.events import Emit, Note

#: Examples that are read twice.
FIRST_EXAMPLES = 16

#: Targets that are read twice if the first ones are all equal, so that they do not show whether the order changes.
FIRST_TARGETS = 1000


@dataclass(frozen=True)
class Variation:
    """The differences between two readings of a stream."""

    records: bool = False  # the records, before they are decoded
    examples: bool = False
    targets: bool = False  # the targets at the same places, or this is not known


def is_own_source(source: Source) -> bool:
    """Returns whether a user's code reads the examples. Other sources always read the same examples."""
    original = find_original(source)
    return isinstance(original, OwnSource) or not type(original).__module__.startswith("scaleflow.dataset.")


def settle_variation(split: str, stream: StreamRows, options: Dataset, workers: Workers, emit: Emit) -> StreamRows:
    """Reads the first examples of a user's stream twice. Returns the stream, with `varies` set, or sorted.

    Raises:
        ConfigError: if examples are chosen by their place, and the example at a place differs at each reading.
    """
    variation = Variation(**json.loads(workers.from_chief(lambda: json.dumps(asdict(find_variation(stream))))))
    if not variation.examples:
        return stream
    if variation.records and variation.targets:
        ordered = sort_records(split, stream, workers)
        if ordered is not None:
            return ordered
        refuse_chosen_places(split, stream, options)
    how = "They are read again in each epoch and are not cached, and a resumed run does not repeat them"
    if split == "test":
        how = "The figures of the test hold for one reading"
    emit(Note(f"dataset: examples of {split!r} differ at each reading, such as by a random augmentation. {how}"))
    settled = replace(stream, varies=True)
    return settled if variation.records else cache_records(split, settled)


def find_variation(stream: StreamRows) -> Variation:
    """Compares two readings of the first examples.

    One iterator makes both readings. Random operations that follow TensorFlow's global seed, which a run sets, begin
    anew in each iterator.
    """
    try:
        first, second = read_twice(lambda: decode_records(stream, stream.dataset.take(FIRST_EXAMPLES)))
        if not differ(first, second):
            return Variation()
        records = differ(*read_twice(lambda: stream.dataset.take(FIRST_EXAMPLES)))
        pairs = [[example[1:] for example in reading] for reading in (first, second)]
        if len({encode(target) for target in pairs[0]}) == 1 and not differ(*pairs):
            pairs = read_twice(lambda: stream.batch(1, lambda _, *rest: rest).take(FIRST_TARGETS))
        is_known = len({encode(target) for target in pairs[0]}) > 1
        return Variation(records, True, targets=differ(*pairs) or not is_known)
    except Exception:  # another check reports examples that cannot be read
        return Variation()


def read_twice(make: Callable[[], tf.data.Dataset]) -> list[list[Any]]:
    """Returns the elements of two readings as numpy values."""
    readings: list[list[Any]] = [[], []]
    for number, element in iterate_twice(make):
        readings[number].append(element)
    return readings


def iterate_twice(make: Callable[[], tf.data.Dataset]) -> Iterator[tuple[int, Any]]:
    """Yields (number of the reading, 0 or 1, element as numpy values) of two readings by one iterator."""
    twice = tf.data.Dataset.range(2).flat_map(
        lambda number: tf.data.Dataset.zip(tf.data.Dataset.from_tensors(number).repeat(), make())
    )
    for number, element in twice.with_options(reading_options()).as_numpy_iterator():
        yield int(number), element


def differ(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return [encode(element) for element in first] != [encode(element) for element in second]


def encode(element: Any) -> bytes:
    """Returns a digest of an element, which is a structure of numpy values."""
    digest = hashlib.blake2b(digest_size=16)
    for value in tf.nest.flatten(element):
        array = np.asarray(value)
        digest.update(f"{array.dtype.str} {array.shape} ".encode())
        digest.update(repr(array.tolist()).encode() if array.dtype.kind in "OSU" else array.tobytes())
    return digest.digest()


def sort_records(split: str, stream: StreamRows, workers: Workers) -> Records | None:
    """Returns the records in memory in an order that depends on their contents only.

    Returns None if they are too many, or if they differ in more than their order.
    """
    if record_bytes(stream) * len(stream) > RECORD_BYTES:
        return None
    digests: list[list[bytes]] = [[], []]
    for number, record in iterate_twice(lambda: stream.dataset.take(len(stream))):
        digests[number].append(encode(record))
    if not workers.all(sorted(digests[0]) == sorted(digests[1])):
        return None
    decoded = stream if stream.decode is not None else replace(stream, decode=lambda *record: to_record(record))
    cached = cache_records(split, decoded)
    if not isinstance(cached, Records):
        return None
    columns = cached.records
    order = sorted(range(len(cached)), key=lambda row: encode([column[row] for column in columns]))
    return cached.select(np.array(order))


def refuse_chosen_places(split: str, stream: StreamRows, options: Dataset) -> None:
    """Raises ConfigError if something chooses examples by their place in the split."""
    is_divided = any(keys is not None for keys in (stream.groups, stream.times, stream.strata))
    key = "dataset.split" if is_divided else ""
    if split != "train":
        key = "the evaluation"
    elif options.held_out_fold is not None:
        key = f"dataset.fold={options.fold}"
    elif options.validation is not None and options.validation_split is None:
        key = f"dataset.validation={options.validation}"
    elif options.on_bad_example == "skip":
        key = "dataset.on_bad_example=skip"
    if not key:
        return
    advice = ", or give the dataset a split 'validation' and name it in dataset.validation" if split == "train" else ""
    raise ConfigError(
        f"dataset: at each reading the examples of {split!r} have another order or other targets, and {key} needs the "
        f"same example at the same place; do not shuffle the dataset (scaleflow does){advice}"
    )
