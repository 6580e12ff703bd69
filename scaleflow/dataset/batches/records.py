"""Streams as records, which are cheap to read and to store, and a function that decodes them."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.unreadable import FAILURES, UnreadableExample, operation_message
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    DivisionKeys,
    Outputs,
    OutputStructure,
    Rows,
    Stream,
    label_leaf,
    map_leaves,
    name_leaves,
)

#: Maximum size of the records held in memory, and of a shuffle buffer.
RECORD_BYTES = 256 << 20

#: The average size of records is estimated from this many.
SAMPLE = 100

#: Memory that a string takes in addition to its bytes.
STRING_BYTES = 24

READ_BATCH_SIZE = 1024

#: Records that are decoded at once, to find unreadable ones.
DECODE_BATCH_SIZE = 16

#: `dataset.cache=auto` caches a split in memory up to this size, and up to a quarter of the available memory.
AUTO_BYTES = 1 << 30

#: A digest of a stream that is not in memory covers this many examples.
DIGESTED = 32

#: A name of an example that has its file and the number of its row.
NUMBERED = re.compile(r"(.*), (?:row|record|example) (\d+)", re.DOTALL)

#: Time limit for reading records that are not in memory again, for their names, in seconds.
NAMING_SECONDS = 5.0

#: Time limit for reading targets, in seconds.
TARGET_SECONDS = 5.0

Array = np.ndarray[Any, Any]

#: Number of files that are read in parallel.
INTERLEAVED = 8

#: Number of consecutive records that are read from a file.
BLOCK = 16

#: Maximum number of batches that are read ahead.
PREFETCHED = 16

#: Maximum size of batches that are read ahead.
PREFETCH_BYTES = 1 << 28


def reading_options(threads: int | None = None) -> tf.data.Options:
    """Returns the options of tf.data: a deterministic order, no tuning, and the size of a thread pool if it is set.

    Every dataset that is iterated has them. At its end, an iterator often waits for the thread that tunes: with
    TensorFlow 2.21, an epoch of 0.8 s took 1.3 s.
    """
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    options.autotune.initial_parallelism = os.cpu_count() or 1  # what AUTOTUNE means then; TensorFlow's default is 16
    if threads is not None:
        options.threading.private_threadpool_size = threads
    return options


def prefetch(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Reads batches ahead, up to a size. Without tuning, `AUTOTUNE` would mean up to half of the memory."""
    size = static_bytes(batches.element_spec)
    return batches.prefetch(max(2, min(PREFETCHED, int(PREFETCH_BYTES / max(size, 1)))))


def decode(stream: Stream, record: Any) -> Any:
    """Decodes a record to an example. Traced."""
    if stream.at_once is None:
        return call_decode(stream, record)
    batch = call_decode(stream, tf.nest.map_structure(lambda tensor: tensor[None], record))
    return tf.nest.map_structure(lambda tensor: tensor[0], batch)


def call_decode(stream: Stream, record: Any) -> Any:
    """Calls `Stream.decode` with a record, or with a batch of records if the stream has `at_once`. Traced."""
    if stream.decode is None:
        return record
    return stream.decode(*record) if isinstance(record, tuple) else stream.decode(record)


def decode_records(stream: Stream, dataset: tf.data.Dataset | None = None) -> tf.data.Dataset:
    """Decodes the records of a stream, or of `dataset`, to examples, in parallel and in order."""
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


def concatenate_batches(batches: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Returns the parts of examples (input, target, ...) with the arrays of all batches, [n, ...]."""
    parts = []
    for structures in zip(*batches, strict=True):  # the same part of each batch
        parts.append(map_leaves(lambda *arrays: np.concatenate(arrays), *structures))
    return tuple(parts)


def stack_records(records: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Returns the parts of examples (input, target, ...) with the values of all records, [n, ...]."""
    parts = []
    for structures in zip(*records, strict=True):  # the same part of each record
        parts.append(map_leaves(lambda *values: stack_values(values), *structures))
    return tuple(parts)


def check_decoded_targets(stream: StreamRows, outputs: OutputStructure) -> StreamRows:
    """Returns the stream with a check that decoded targets are valid for their kind, and weights not negative."""
    limited = {}
    for name, described in name_leaves(outputs).items():
        last = largest_target(described)
        if last is not None:
            limited[name] = (described, last)

    def decode_checked(*record: Any) -> tuple[Any, ...]:
        inputs, targets, *weights = call_decode(stream, to_record(record))
        checks = []
        for name, target in name_leaves(targets).items():
            if name in limited:
                described, last = limited[name]
                is_valid = (target >= 0) & (target <= last)
                if described.ignore is not None:
                    is_valid |= target == described.ignore
                message = f"its {described.kind} {label_leaf('target', name)} is not between 0 and {last}"
                checks.append(tf.debugging.Assert(tf.reduce_all(is_valid), [message, target]))
        for weight in weights:
            is_valid = (tf.cast(weight, tf.float32) >= 0) & (tf.cast(weight, tf.float32) < np.inf)
            checks.append(
                tf.debugging.Assert(tf.reduce_all(is_valid), ["its weight is negative, infinite or NaN", weight])
            )
        with tf.control_dependencies(checks):
            return inputs, *tf.nest.map_structure(tf.identity, (targets, *weights))

    return replace(stream, decode=decode_checked) if limited or stream.is_weighted else stream


def largest_target(outputs: Outputs) -> int | None:
    """Returns the largest valid target; None if any value is valid."""
    if outputs.kind == "regression":
        return None
    return outputs.shape[-1] - 1 if outputs.kind == "classification" else 1


def cache_records(split: str, stream: StreamRows) -> StreamRows:
    """Returns the stream with its records in memory, if they are small and have a `decode`.

    Raises ConfigError if there are fewer records than the source says.
    """
    if stream.is_random_access or stream.decode is None or record_bytes(stream) * len(stream) > RECORD_BYTES:
        return stream
    components = read_all(stream)
    if components is None:
        return stream
    count = int(components[0].shape[0])
    if count != len(stream):
        raise ConfigError(f"dataset: the stream of {split!r} holds {count} examples, but the source says {len(stream)}")
    return make_records(stream, components)


def read_all(stream: Stream) -> tuple[tf.Tensor, ...] | None:
    """Reads all records. Returns None if they exceed twice `RECORD_BYTES`."""
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
    """Estimates the size of a record. It is infinite if shapes are not static."""
    spec = tf.nest.flatten(stream.dataset.element_spec)
    if not all(isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined() for s in spec):
        return float("inf")
    if all(s.dtype != tf.string for s in spec):
        return static_bytes(spec)
    sample = [sum(map(tensor_bytes, tf.nest.flatten(record))) for record in stream.dataset.take(SAMPLE)]
    return sum(sample) / max(1, len(sample))


def static_bytes(spec: Any) -> float:
    """Returns the size of one element. It is infinite if shapes are not static."""
    flat = tf.nest.flatten(spec)
    if not all(s.shape.is_fully_defined() and s.dtype != tf.string for s in flat):
        return float("inf")
    return float(sum(s.dtype.size * s.shape.num_elements() for s in flat))


def tensor_bytes(tensor: tf.Tensor) -> float:
    if tensor.dtype == tf.string:
        return float(tf.reduce_sum(tf.strings.length(tensor))) + STRING_BYTES * int(tf.size(tensor))
    return float(tensor.dtype.size * int(tf.size(tensor)))


def interleave_files(files: Sequence[str], records: Any) -> tf.data.Dataset:
    """Reads the records of several files in parallel, always in the same order.

    `records` maps (index of the file int64, path) to a dataset of its records. Traced.
    """
    numbered = tf.data.Dataset.from_tensor_slices(
        (tf.range(len(files), dtype=tf.int64), tf.constant(list(files), tf.string))
    )
    return numbered.interleave(
        records,
        cycle_length=min(INTERLEAVED, len(files)),
        block_length=BLOCK,
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
    return draw(records, count, held_out, seeds=(seed, 0x7E57), is_held_out=split == "test"), size


def draw(
    records: tf.data.Dataset, count: int, held_out: int, seeds: tuple[int, int], is_held_out: bool
) -> tf.data.Dataset:
    """Draws `held_out` of `count` records with the seeds. Returns these records, or all others, in order.

    The records have fixed shapes and are the same at each iteration.
    """
    max_index = tf.constant(max(count - 1, 1), tf.int64)
    seed = tf.constant(seeds, tf.int64)

    def chosen(portion: tf.Tensor, *record: Any) -> Any:
        indices = portion * BLOCK + tf.range(tf.shape(tf.nest.flatten(record)[0], tf.int64)[0])
        is_drawn = tf.random.experimental.index_shuffle(indices, seed, max_index) < held_out
        is_selected = is_drawn if is_held_out else tf.logical_not(is_drawn)
        return tf.nest.map_structure(lambda component: tf.boolean_mask(component, is_selected), to_record(record))

    blocks = records.batch(BLOCK).enumerate().map(lambda portion, *record: chosen(portion, *record))
    size = held_out if is_held_out else count - held_out
    return blocks.unbatch().apply(tf.data.experimental.assert_cardinality(size))


@dataclass(frozen=True)
class StreamRows(Stream, Rows):
    """A stream whose records are read in order, again at each use.

    `varies` says whether its examples differ at each reading (`dataset/batches/varying.py`).
    """

    is_random_access: ClassVar[bool] = False
    auto_bytes: ClassVar[int] = AUTO_BYTES
    malformed: ClassVar[Sequence[str]] = ()
    is_whole: ClassVar[bool] = True
    varies: bool = False

    @property
    def spec(self) -> tuple[Any, ...]:
        return decode_records(self).element_spec  # type: ignore[no-any-return]

    @property
    def kept_together(self) -> int:
        """The number of examples whose total size decides about `dataset.cache=auto`."""
        return len(self)

    def select(self, chosen: Array) -> Self:
        keep = to_mask(chosen, len(self))
        dataset = number_records(self, keep).map(lambda _, *record: to_record(record))
        return replace(self, dataset=dataset, length=int(np.count_nonzero(keep)), **self.cut_keys(keep))

    def cut_keys(self, chosen: Any) -> dict[str, Any]:
        """Returns the values that divide the chosen examples. `chosen` has indices, a slice or a mask."""
        return vars(DivisionKeys.of(self).select(chosen))

    def limit(self, count: int) -> Self:
        keys = self.cut_keys(slice(count))
        return replace(self, dataset=self.dataset.take(count), length=min(count, len(self)), **keys)

    def repeat(self, times: int) -> StreamRows:
        keys = self.cut_keys(np.tile(np.arange(len(self)), times))
        return replace(self, dataset=self.dataset.cache().repeat(times), length=times * len(self), **keys)

    def check_targets(self, outputs: OutputStructure, split: str = "") -> StreamRows:
        return check_decoded_targets(self, outputs)

    def map_targets(self, convert: Callable[[Any], Any]) -> StreamRows:
        def decode_converted(*record: Any) -> tuple[Any, ...]:
            inputs, targets, *weights = call_decode(self, to_record(record))
            return inputs, convert(targets), *weights

        return replace(self, decode=decode_converted)

    def batch(self, size: int, pick: Callable[..., Any] | None = None) -> tf.data.Dataset:
        """Returns all examples in batches, or the parts that `pick` takes of them."""
        records = self.dataset.take(len(self))
        if pick is None:
            return self.stream().batch(size)
        if self.decode is None and static_bytes(self.dataset.element_spec) < float("inf"):
            return records.batch(size).map(pick)
        batches = records if self.decode is None or self.at_once is None else records.batch(self.at_once)
        picked = batches.map(
            lambda *record: pick(*call_decode(self, to_record(record))), num_parallel_calls=tf.data.AUTOTUNE
        )
        return picked.batch(size) if batches is records else picked

    def stream(self) -> tf.data.Dataset:
        return decode_records(self, self.dataset.take(len(self)))

    def iterate(self, pick: Callable[..., Any]) -> Iterator[Any]:
        yield from prefetch(self.batch(READ_BATCH_SIZE, pick)).as_numpy_iterator()

    def read_to_learn(self, name: str) -> Iterator[Array]:
        return self.iterate(lambda inputs, *_: name_leaves(inputs)[name])

    def read(self, places: Array) -> tuple[Any, ...]:
        chosen = self if len(places) == len(self) else self.select(places)
        batches = list(chosen.batch(READ_BATCH_SIZE).as_numpy_iterator())
        return concatenate_batches(batches)

    def read_first(self, count: int) -> Any:
        first = [x for x, *_ in decode_records(self, self.dataset.take(count)).as_numpy_iterator()]

        def stack(*values: Any) -> Any:
            shapes = list(dict.fromkeys(map(np.shape, values)))
            if len(shapes) > 1:
                raise ConfigError(
                    f"dataset: inputs of 'train' have the shapes {shapes[0]} and {shapes[1]}, expected one shape; pad "
                    "those that are shorter"
                )
            return np.stack(values)

        return map_leaves(stack, *first)

    def read_spread(self, count: int, reads_all: bool = False) -> tuple[Array, tuple[Any, ...]]:
        places = draw_places(len(self), count) if reads_all else np.arange(min(count, len(self)))
        return places, (self if reads_all else self.limit(len(places))).read(places)

    def read_cheap_targets(self) -> tuple[Any, Array | None] | None:
        return None

    def read_to_digest(self) -> tuple[str, Iterator[tuple[Any, ...]]]:
        first = decode_records(self, self.dataset.take(DIGESTED))
        records = [] if self.varies else list(read_readable(first, DIGESTED))
        if records:
            parts = stack_records(records)
        else:
            parts = tf.nest.map_structure(
                lambda spec: np.empty([0, *(size or 0 for size in spec.shape)], spec.dtype.as_numpy_dtype), self.spec
            )
        covers = (
            "no values, because they differ at each reading" if self.varies else f"a sample of {len(records)} examples"
        )
        return covers, iter([parts])

    def locate(self, places: Array) -> tuple[list[str | None] | None, Array | None]:
        specs = tf.nest.flatten(self.dataset.element_spec)
        if self.name is None or not all(spec.shape.is_fully_defined() for spec in specs):
            return None, None
        names: list[str] = []
        chosen = self if len(places) == len(self) else self.select(places)
        deadline = time.monotonic() + NAMING_SECONDS
        for batch in chosen.dataset.take(len(places)).batch(READ_BATCH_SIZE).as_numpy_iterator():
            components = batch if isinstance(batch, tuple) else (batch,)
            names += [self.name(*values) for values in zip(*components, strict=True)]
            if time.monotonic() > deadline and not self.is_random_access:
                break
        if len(names) < len(places):
            return None, None
        matches = [(name, NUMBERED.fullmatch(name)) for name in names]
        files = [match[1] if match else name for name, match in matches]
        rows = [int(match[2]) if match else 0 for _, match in matches]
        numbers: Any = np.ma.array(rows, mask=[not match for _, match in matches])
        return files, None if numbers.mask.all() else numbers

    def name_rows(self, places: Sequence[int]) -> list[str]:
        if self.name is None:
            return super().name_rows(places)
        records = self._read_records(places)
        return [name_record(self, place, record) for place, record in zip(places, records, strict=True)]

    def find_unreadable(self) -> Iterator[int]:
        """Yields the indices of the records that cannot be decoded. It decodes in parallel."""
        good = np.zeros(len(self), bool)
        for indices, _ in () if self.at_once is None else readable_batches(self).as_numpy_iterator():
            good[indices] = True
        if good.all():
            return
        numbered = number_records(self, ~good) if good.any() else self.dataset.take(len(self)).enumerate()
        readable = (int(index) for index, _ in self._keep_readable(numbered).as_numpy_iterator())
        following = next(readable, None)
        for place in np.flatnonzero(~good):
            if place != following:
                yield int(place)
            else:
                following = next(readable, None)

    def describe_unreadable(self, places: Sequence[int]) -> list[UnreadableExample]:
        """Returns the errors of records that cannot be decoded, by their ascending indices."""
        records = self._read_records(places)
        return [describe_record(self, place, record) for place, record in zip(places, records, strict=False)]

    def _read_records(self, places: Sequence[int]) -> list[Any]:
        wanted = tf.constant(sorted(places), tf.int64)
        matches = self.dataset.enumerate().filter(lambda place, *_: tf.reduce_any(tf.equal(place, wanted)))
        return [record for _, record in matches.take(len(places))]

    def _keep_readable(self, numbered: tf.data.Dataset) -> tf.data.Dataset:
        """Returns (index, a little of it as text) of the numbered records that can be decoded, in order.

        Errors before the decoding are raised.
        """

        def alone(place: tf.Tensor, record: Any) -> tf.data.Dataset:
            one = tf.data.Dataset.from_tensors((place, record))
            return one.map(functools.partial(place_if_read, self)).ignore_errors()

        parallel = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}
        return numbered.interleave(alone, cycle_length=DECODE_BATCH_SIZE, **parallel)


@dataclass(frozen=True)
class Records(StreamRows):
    """A stream whose records are all in memory, for access by index.

    `components` has the flat components of all records, each [length, ...].
    """

    is_random_access: ClassVar[bool] = True
    components: tuple[tf.Tensor, ...] = ()

    @property
    def records(self) -> list[Array]:
        return [values.numpy() for values in self.components]

    def at(self, index: tf.Tensor) -> Any:
        flat = [tf.gather(component, index) for component in self.components]
        return tf.nest.pack_sequence_as(self.dataset.element_spec, flat)

    def select(self, chosen: Array) -> Self:
        places = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        with tf.device("CPU:0"):
            components = tuple(tf.gather(component, places) for component in self.components)
        dataset = make_records(self, components).dataset
        keys = self.cut_keys(places)
        return replace(self, dataset=dataset, length=len(places), faults=(), components=components, **keys)

    def limit(self, count: int) -> Self:
        return self.select(np.arange(min(count, len(self))))

    def repeat(self, times: int) -> Records:
        return self.select(np.tile(np.arange(len(self)), times))

    def read_spread(self, count: int, reads_all: bool = False) -> tuple[Array, tuple[Any, ...]]:
        return super().read_spread(count, reads_all=True)

    def read_cheap_targets(self) -> tuple[Any, Array | None] | None:
        deadline = time.monotonic() + TARGET_SECONDS
        batches = []
        try:
            for batch in self.iterate(lambda _, *rest: rest):  # a file that only the inputs come from is not read
                batches.append(batch)
                if time.monotonic() > deadline:
                    return None
        except tf.errors.OpError:  # training reports bad examples
            return None
        targets, *weights = concatenate_batches(batches)
        return targets, weights[0] if weights else None

    def read_to_digest(self) -> tuple[str, Iterator[tuple[Any, ...]]]:
        if len(self) <= DIGESTED:
            return super().read_to_digest()
        return self.select(spread_evenly(len(self), DIGESTED)).read_to_digest()

    def _read_records(self, places: Sequence[int]) -> list[Any]:
        return [self.at(tf.constant(place)) for place in places]

    def _keep_readable(self, numbered: tf.data.Dataset) -> tf.data.Dataset:
        parallel = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}
        return numbered.map(functools.partial(place_if_read, self), **parallel).ignore_errors()  # only this can fail


def to_mask(chosen: Sequence[int] | Array, length: int) -> Array:
    """Returns the chosen examples as a mask, [length] bool. They may be indices or a mask already."""
    if isinstance(chosen, np.ndarray) and chosen.dtype == bool:
        return chosen
    mask = np.zeros(length, bool)
    mask[chosen] = True
    return mask


def place_if_read(stream: Stream, place: tf.Tensor, record: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the index of a record, and a little of its decoded example. Traced."""
    return place, extract_text(decode(stream, record))


def make_records(stream: Stream, components: tuple[tf.Tensor, ...]) -> Records:
    structure = stream.dataset.element_spec
    parts = tf.nest.pack_sequence_as(structure, components)
    dataset = tf.data.Dataset.from_tensor_slices(parts).with_options(reading_options())
    options = stream.length, stream.decode, stream.name, (), stream.at_once
    varies = isinstance(stream, StreamRows) and stream.varies
    return Records(dataset, *options, components=components, varies=varies, **vars(DivisionKeys.of(stream)))


def readable_batches(stream: Stream) -> tf.data.Dataset:
    """Returns (indices [b], a little of each as text) of the batches of records that can be decoded as a whole."""

    def places_if_read(places: tf.Tensor, records: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return places, extract_text(call_decode(stream, records))

    batches = stream.dataset.take(len(stream)).enumerate().batch(stream.at_once)
    return batches.map(places_if_read, num_parallel_calls=tf.data.AUTOTUNE).ignore_errors()


def extract_text(example: Any) -> tf.Tensor:
    """Returns a little of an example, as text: tf.data would prune a decoding whose result is not used."""
    first = [tf.reshape(tensor, [-1])[:1] for tensor in tf.nest.flatten(example)]
    texts = [value if value.dtype == tf.string else tf.strings.as_string(value) for value in first]
    return tf.strings.reduce_join(tf.concat(texts, axis=0))


def number_records(stream: Stream, wanted: np.ndarray[Any, Any]) -> tf.data.Dataset:
    """Returns (index, record) of the records that `wanted`, [length] bool, selects."""
    keep = tf.constant(wanted)
    numbered = stream.dataset.take(len(stream)).enumerate()
    if stream.at_once is None:
        return numbered.filter(lambda place, *_: tf.gather(keep, place))

    def is_kept(places: tf.Tensor, records: Any) -> Any:
        is_kept = tf.gather(keep, places)
        return tf.nest.map_structure(lambda tensor: tf.boolean_mask(tensor, is_kept), (places, records))

    return numbered.batch(stream.at_once).map(is_kept).unbatch()  # a call per small record would take longer


def name_record(stream: Stream, place: int, record: Any) -> str:
    values = tf.nest.map_structure(lambda tensor: tensor.numpy(), record)
    arguments = values if isinstance(values, tuple) else (values,)
    return f"example {place}" if stream.name is None else stream.name(*arguments)


def describe_record(stream: Stream, place: int, record: Any) -> UnreadableExample:
    name = name_record(stream, place, record)
    alone = tf.data.Dataset.from_tensors(record).map(lambda *parts: decode(stream, to_record(parts)))
    try:
        for _ in alone:
            pass
    except FAILURES as error:
        return UnreadableExample(place, name, operation_message(error))
    return UnreadableExample(place, name, "it cannot be read")


def read_readable(dataset: tf.data.Dataset, count: int) -> Iterator[Any]:
    """Yields the readable ones of the first `count` elements, as numpy values. Other checks report the rest.

    `ignore_errors` would not end if every further call fails, as after an error of a generator.
    """
    elements = dataset.as_numpy_iterator()
    for _ in range(count):
        try:
            yield next(elements)
        except StopIteration:
            return
        except tf.errors.OpError:
            continue


def spread_evenly(length: int, count: int) -> Array:
    """Returns up to `count` indices, spread evenly from the first to the last."""
    return np.unique(np.linspace(0, length - 1, min(length, count)).astype(np.int64))


def draw_places(length: int, count: int) -> Array:
    """Returns up to `count` indices in ascending order, drawn at random, so that neighbours are among them."""
    return np.sort(np.random.default_rng(0).choice(length, min(length, count), replace=False))


def stack_values(values: Sequence[Any]) -> Array:
    """Stacks values to [n, ...]. Examples that differ in shape are flattened and concatenated."""
    if len({np.shape(value) for value in values}) == 1:
        return np.asarray(values)
    return np.concatenate([np.ravel(value) for value in values])
