"""Records of streams, which are cheap to read and store, and their decoding to examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Examples, Outputs, OutputStructure, Stream, label_leaf, name_leaves

#: Maximum size of the records held in memory, and of a shuffle buffer.
RECORD_BYTES = 256 << 20

#: Number of records from which the size of all is estimated.
SAMPLE = 100

#: Memory that a string takes in addition to its bytes.
STRING_BYTES = 24

READ_BATCH_SIZE = 1024

#: Number of files that are read in parallel, and of consecutive records from each.
INTERLEAVED, BLOCK = 8, 16


@dataclass(frozen=True)
class Records(Stream):
    """A stream whose records are all in memory, for access by index.

    `components` has the flat components of all records, each [length, ...].
    """

    components: tuple[tf.Tensor, ...] = ()

    def at(self, index: tf.Tensor) -> Any:
        flat = [tf.gather(component, index) for component in self.components]
        return tf.nest.pack_sequence_as(self.dataset.element_spec, flat)

    def select(self, places: np.ndarray[Any, Any]) -> Records:
        with tf.device("CPU:0"):
            components = tuple(tf.gather(component, places) for component in self.components)
        return make_records(replace(self, length=len(places)), components)


def make_records(stream: Stream, components: tuple[tf.Tensor, ...]) -> Records:
    structure = stream.dataset.element_spec
    dataset = tf.data.Dataset.from_tensor_slices(tf.nest.pack_sequence_as(structure, components))
    return Records(dataset, stream.length, stream.decode, stream.name, (), stream.at_once, components)


def decode(stream: Stream, record: Any) -> Any:
    """Decodes a record to an example. Traced."""
    if stream.at_once is None:
        return call_decode(stream, record)
    batch = call_decode(stream, tf.nest.map_structure(lambda tensor: tensor[None], record))
    return tf.nest.map_structure(lambda tensor: tensor[0], batch)


def call_decode(stream: Stream, record: Any) -> Any:
    """Calls `Stream.decode` on a record, or on a batch of them if the stream has `at_once`. Traced."""
    if stream.decode is None:
        return record
    return stream.decode(*record) if isinstance(record, tuple) else stream.decode(record)


def decode_records(stream: Stream, dataset: tf.data.Dataset | None = None) -> tf.data.Dataset:
    """Decodes a stream's records, or those of `dataset`, to examples, in parallel and in their order."""
    dataset = stream.dataset if dataset is None else dataset
    if stream.decode is None:
        return dataset
    batches = dataset if stream.at_once is None else dataset.batch(stream.at_once)
    examples = batches.map(
        lambda *record: call_decode(stream, to_record(record)), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    return examples if stream.at_once is None else examples.unbatch()


def to_record(arguments: tuple[Any, ...]) -> Any:
    """Returns the record that tf.data passes as arguments."""
    return arguments if len(arguments) > 1 else arguments[0]


def check_decoded_targets(stream: Stream, outputs: OutputStructure) -> Stream:
    """Returns the stream with a check that decoded targets are valid for their kind, and weights not negative."""
    limits = {name: (each, largest_target(each)) for name, each in name_leaves(outputs).items()}
    limited = {name: (each, last) for name, (each, last) in limits.items() if last is not None}

    def decode_checked(*record: Any) -> tuple[Any, ...]:
        inputs, targets, *weights = call_decode(stream, to_record(record))
        checks = []
        for name, target in name_leaves(targets).items():
            if name in limited:
                each, last = limited[name]
                is_valid = (target >= 0) & (target <= last)
                if each.ignore is not None:
                    is_valid |= target == each.ignore
                message = f"its {each.kind} {label_leaf('target', name)} is not between 0 and {last}"
                checks.append(tf.debugging.Assert(tf.reduce_all(is_valid), [message, target]))
        for weight in weights:
            is_valid = (tf.cast(weight, tf.float32) >= 0) & (tf.cast(weight, tf.float32) < np.inf)
            checks.append(
                tf.debugging.Assert(tf.reduce_all(is_valid), ["its weight is negative, infinite or NaN", weight])
            )
        with tf.control_dependencies(checks):
            return inputs, *tf.nest.map_structure(tf.identity, (targets, *weights))

    return replace(stream, decode=decode_checked) if limited or has_weights(stream) else stream


def has_weights(examples: Examples) -> bool:
    """Returns whether examples have weights."""
    if isinstance(examples, Arrays):
        return examples.weights is not None
    return len(decode_records(examples).element_spec) == 3


def largest_target(outputs: Outputs) -> int | None:
    """Returns the largest valid target; None if any value is valid."""
    if outputs.kind == "regression":
        return None
    return outputs.shape[-1] - 1 if outputs.kind == "classification" else 1


def cache_records(split: str, stream: Stream) -> Stream:
    """Returns the stream with its records in memory, if they are small and have a `decode`.

    Raises ConfigError if there are fewer records than the source says.
    """
    if isinstance(stream, Records) or stream.decode is None or record_bytes(stream) * len(stream) > RECORD_BYTES:
        return stream
    components = read_all(stream)
    if components is None:
        return stream
    count = int(components[0].shape[0])
    if count != len(stream):
        raise ConfigError(f"dataset: the stream of {split!r} holds {count} examples, but the source says {len(stream)}")
    return make_records(stream, components)


def read_all(stream: Stream) -> tuple[tf.Tensor, ...] | None:
    """Reads all records; returns None if they exceed twice `RECORD_BYTES`."""
    parts: list[list[tf.Tensor]] = []
    size = 0.0
    for batch in stream.dataset.take(len(stream)).batch(READ_BATCH_SIZE):
        flat = tf.nest.flatten(batch)
        size += sum(map(tensor_bytes, flat))
        if size > 2 * RECORD_BYTES:
            return None
        parts.append(flat)
    with tf.device("CPU:0"):
        return tuple(tf.concat(component, axis=0) for component in zip(*parts, strict=True))


def record_bytes(stream: Stream) -> float:
    """Estimates the size of a record; infinite if shapes are not static."""
    spec = tf.nest.flatten(stream.dataset.element_spec)
    if not all(isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined() for s in spec):
        return float("inf")
    if all(s.dtype != tf.string for s in spec):
        return static_bytes(spec)
    sample = [sum(map(tensor_bytes, tf.nest.flatten(record))) for record in stream.dataset.take(SAMPLE)]
    return sum(sample) / max(1, len(sample))


def static_bytes(spec: Any) -> float:
    """Returns the size of one element; infinite if it is not static."""
    flat = tf.nest.flatten(spec)
    if not all(s.shape.is_fully_defined() and s.dtype != tf.string for s in flat):
        return float("inf")
    return float(sum(s.dtype.size * s.shape.num_elements() for s in flat))


def tensor_bytes(tensor: tf.Tensor) -> float:
    if tensor.dtype == tf.string:
        return float(tf.reduce_sum(tf.strings.length(tensor))) + STRING_BYTES * int(tf.size(tensor))
    return float(tensor.dtype.size * int(tf.size(tensor)))


def interleave_files(files: Sequence[str], records: Any, block: int = BLOCK) -> tf.data.Dataset:
    """Reads the records of several files in parallel, `block` consecutive ones of each, always in the same order.

    `records` maps (index of the file int64, path) to a dataset of its records. Traced.
    """
    numbered = tf.data.Dataset.from_tensor_slices(
        (tf.range(len(files), dtype=tf.int64), tf.constant(list(files), tf.string))
    )
    return numbered.interleave(
        records,
        cycle_length=min(INTERLEAVED, len(files)),
        block_length=block,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


def divide_records(
    records: tf.data.Dataset, count: int, split: str, test: float, seed: int
) -> tuple[tf.data.Dataset, int]:
    """Returns the records of one split and their number, if file names denote no splits. `seed` draws the test
    records.
    """
    held_out = round(count * test)
    if not held_out:
        return (records, count) if split == "train" else (records.take(0), 0)
    size = held_out if split == "test" else count - held_out
    return draw(records, count, held_out, (seed, 0x7E57), split == "test"), size


def draw(
    records: tf.data.Dataset, count: int, held_out: int, seeds: tuple[int, int], is_held_out: bool
) -> tf.data.Dataset:
    """Returns the `held_out` of `count` records that the seeds select, or all others, in their order.

    The records have fixed shapes and are the same at each iteration.
    """
    max_index = tf.constant(max(count - 1, 1), tf.int64)
    seed = tf.constant(seeds, tf.int64)

    def chosen(portion: tf.Tensor, *record: Any) -> Any:
        indices = portion * BLOCK + tf.range(tf.shape(tf.nest.flatten(record)[0], tf.int64)[0])
        is_drawn = tf.random.experimental.index_shuffle(indices, seed, max_index) < held_out
        is_selected = is_drawn if is_held_out else tf.logical_not(is_drawn)
        return tf.nest.map_structure(lambda each: tf.boolean_mask(each, is_selected), to_record(record))

    blocks = records.batch(BLOCK).enumerate().map(lambda portion, *record: chosen(portion, *record))
    size = held_out if is_held_out else count - held_out
    return blocks.unbatch().apply(tf.data.experimental.assert_cardinality(size))
