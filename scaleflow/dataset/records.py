"""Streams as the pipeline reads them: records, which are cheap, and the examples that they are decoded to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Outputs, Stream

#: Records that are kept in memory, and a buffer that a stream is shuffled through, are at most so large.
RECORD_BYTES = 256 << 20

#: The size of all is taken from so many.
SAMPLE = 100

#: What a string costs in memory beside its bytes.
STRING_BYTES = 24

READ_BATCH_SIZE = 1024


@dataclass(frozen=True)
class Records(Stream):
    """A stream whose records are in memory, so that any of them can be had by its place.

    Attributes:
        components: the flat components of all records, each [length, ...].
    """

    components: tuple[tf.Tensor, ...] = ()

    def at(self, index: tf.Tensor) -> Any:
        """Traced: the record at a place."""
        flat = [tf.gather(component, index) for component in self.components]
        return tf.nest.pack_sequence_as(self.dataset.element_spec, flat)

    def select(self, places: np.ndarray[Any, Any]) -> Records:
        """Those at some places, in that order."""
        with tf.device("CPU:0"):
            components = tuple(tf.gather(component, places) for component in self.components)
        return make_records(replace(self, length=len(places)), components)


def make_records(stream: Stream, components: tuple[tf.Tensor, ...]) -> Records:
    structure = stream.dataset.element_spec
    dataset = tf.data.Dataset.from_tensor_slices(tf.nest.pack_sequence_as(structure, components))
    return Records(dataset, stream.length, stream.decode, stream.name, (), stream.at_once, components)


def decode(stream: Stream, record: Any) -> Any:
    """Traced: a record as (input, target)."""
    if stream.at_once is None:
        return call_decode(stream, record)
    several = call_decode(stream, tf.nest.map_structure(lambda tensor: tensor[None], record))
    return tf.nest.map_structure(lambda tensor: tensor[0], several)


def call_decode(stream: Stream, record: Any) -> Any:
    """Traced: what `decode` makes of a record, or of as many as it takes at once."""
    if stream.decode is None:
        return record
    return stream.decode(*record) if isinstance(record, tuple) else stream.decode(record)


def decode_records(stream: Stream, dataset: tf.data.Dataset | None = None) -> tf.data.Dataset:
    """The examples (input, target) of a stream's records, or of some, decoded in parallel and in their order."""
    dataset = stream.dataset if dataset is None else dataset
    if stream.decode is None:
        return dataset
    portions = dataset if stream.at_once is None else dataset.batch(stream.at_once)
    examples = portions.map(
        lambda *record: call_decode(stream, to_record(record)), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    return examples if stream.at_once is None else examples.unbatch()


def to_record(arguments: tuple[Any, ...]) -> Any:
    """The record that tf.data has handed over as arguments."""
    return arguments if len(arguments) > 1 else arguments[0]


def check_decoded_targets(stream: Stream, outputs: Outputs) -> Stream:
    """The same stream, decoded with a check that its targets are what their kind allows."""
    if outputs.kind == "regression":
        return stream
    last = outputs.shape[-1] - 1 if outputs.kind == "classification" else 1

    def decode_checked(*record: Any) -> tuple[Any, Any]:
        inputs, target = call_decode(stream, to_record(record))
        within = tf.reduce_all((target >= 0) & (target <= last))
        words = f"its {outputs.kind} target is not from 0 to {last}"
        with tf.control_dependencies([tf.debugging.Assert(within, [words, target])]):
            return inputs, tf.identity(target)

    return replace(stream, decode=decode_checked)


def cache_records(split: str, stream: Stream) -> Stream:
    """The same with its records in memory, where they are small and decoded late.

    Raises:
        ConfigError: if there are fewer than the source says.
    """
    if isinstance(stream, Records) or stream.decode is None or record_bytes(stream) * len(stream) > RECORD_BYTES:
        return stream
    components = read_all(stream)
    if components is None:
        return stream
    found = int(components[0].shape[0])
    if found != len(stream):
        raise ConfigError(f"dataset: the stream of {split!r} holds {found} examples, and the source says {len(stream)}")
    return make_records(stream, components)


def read_all(stream: Stream) -> tuple[tf.Tensor, ...] | None:
    """All records; None where they are larger together than the first ones were."""
    parts: list[list[tf.Tensor]] = []
    size = 0.0
    for batch in stream.dataset.take(len(stream)).batch(READ_BATCH_SIZE):
        flat = tf.nest.flatten(batch)
        size += sum(map(tensor_bytes, flat))
        if size > 2 * RECORD_BYTES:
            return None
        parts.append(flat)
    with tf.device("CPU:0"):
        return tuple(tf.concat(each, axis=0) for each in zip(*parts, strict=True))


def record_bytes(stream: Stream) -> float:
    """About how large a record is; infinite where they differ in shape."""
    spec = tf.nest.flatten(stream.dataset.element_spec)
    if not all(isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined() for s in spec):
        return float("inf")
    if all(s.dtype != tf.string for s in spec):
        return static_bytes(spec)
    sample = [sum(map(tensor_bytes, tf.nest.flatten(record))) for record in stream.dataset.take(SAMPLE)]
    return sum(sample) / max(1, len(sample))


def static_bytes(spec: Any) -> float:
    """The size of one element; infinite where that is not known."""
    flat = tf.nest.flatten(spec)
    if not all(s.shape.is_fully_defined() and s.dtype != tf.string for s in flat):
        return float("inf")
    return float(sum(s.dtype.size * s.shape.num_elements() for s in flat))


def tensor_bytes(tensor: tf.Tensor) -> float:
    if tensor.dtype == tf.string:
        return float(tf.reduce_sum(tf.strings.length(tensor))) + STRING_BYTES * int(tf.size(tensor))
    return float(tensor.dtype.size * int(tf.size(tensor)))
