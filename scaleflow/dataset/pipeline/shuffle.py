"""The order in which a stream's records are read from any position on, and which of them a worker reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import tensorflow as tf

from scaleflow.dataset.pipeline.records import RECORD_BYTES, Records, decode_records, record_bytes, to_record
from scaleflow.dataset.pipeline.rows import to_rows
from scaleflow.interfaces import Stream

#: Size of the shuffle buffer in records, if the size of a record is unknown.
SHUFFLE_BUFFER = 10_000

#: Number of records in memory that are gathered in one call.
GATHER_BATCH_SIZE = 256

#: Position in the epoch's order [] int64 -> whether this worker reads it.
IsOwn = Callable[[tf.Tensor], tf.Tensor]


def shuffle_position(place: tf.Tensor, seed: int, epoch: tf.Tensor | int, count: int) -> tf.Tensor:
    """Returns the index of the example at a position of an epoch's order; the same for arrays and records in memory."""
    seeds = tf.stack([tf.constant(seed, tf.int64), tf.cast(epoch, tf.int64)])
    return tf.random.experimental.index_shuffle(place, seeds, tf.constant(count - 1, tf.int64))


class ShuffledOrder:
    """A stream's examples in the order of an epoch.

    Records in memory are accessed by index: a worker reads only its own, and a run can start at any position
    immediately. Of any other stream, a worker reads all records and decodes its own.

    Args:
        stream: the records.
        seed: reshuffles every epoch; None keeps the order.
        buffer: size of the shuffle buffer in records, for streams that are not in memory; None means as many as fit in
            `RECORD_BYTES`.
    """

    def __init__(self, stream: Stream, seed: int | None, buffer: int | None = None) -> None:
        self._stream = stream
        self._seed = seed
        self._in_memory = to_rows(stream).is_random_access
        self._buffer = 0 if self._in_memory or seed is None else buffer_size(stream, buffer)

    def examples(self, epoch: tf.Tensor, first: tf.Tensor, last: int, is_own: IsOwn | None = None) -> tf.data.Dataset:
        """Returns the examples (input, target) at the positions [first, last) of an epoch.

        Positions after the last example are padding. Records in memory repeat the first ones of the epoch. Any other
        stream repeats its first records unshuffled, so that its buffer is not filled again.
        """
        read_records = self._read_from_memory if self._in_memory else self._read_through_buffer
        return decode_records(self._stream, read_records(epoch, first, last, is_own))

    def _read_from_memory(self, epoch: tf.Tensor, first: tf.Tensor, last: int, is_own: IsOwn | None) -> tf.data.Dataset:
        stream, seed = cast(Records, self._stream), self._seed
        count = len(stream)

        def gather(place: tf.Tensor) -> Any:
            place %= count
            return stream.at(place if seed is None else shuffle_position(place, seed, epoch, count))

        positions = tf.data.Dataset.range(first, last)
        worker_positions = positions if is_own is None else positions.filter(is_own)
        return worker_positions.batch(GATHER_BATCH_SIZE).map(gather).unbatch()

    def _read_through_buffer(
        self, epoch: tf.Tensor, first: tf.Tensor, last: int, is_own: IsOwn | None
    ) -> tf.data.Dataset:
        count = len(self._stream)
        in_order = self._stream.dataset.take(count)
        dataset = in_order.apply(tf.data.experimental.assert_cardinality(count))
        if self._seed is not None:
            seed = epoch_seed(self._seed, epoch)
            with replace_global_seed():
                dataset = dataset.shuffle(self._buffer, seed=seed, reshuffle_each_iteration=False)
        dataset = dataset.concatenate(in_order.repeat().take(last - count)).skip(first)
        if is_own is None:
            return dataset
        numbered = dataset.enumerate(start=first).filter(lambda place, *_: is_own(place))
        return numbered.map(lambda _, *record: to_record(record))


@contextlib.contextmanager
def replace_global_seed() -> Iterator[None]:
    """Has operations of a graph not use the global seed in this context.

    If that is 0, TensorFlow compares the operation's own seed with 0 in Python, which fails for a tensor of a graph.
    """
    graph = tf.compat.v1.get_default_graph()
    before, graph.seed = graph.seed, 1
    try:
        yield
    finally:
        graph.seed = before


def buffer_size(stream: Stream, wanted: int | None) -> int:
    if wanted is not None:
        return min(wanted, len(stream))
    size = record_bytes(stream)
    fitting = SHUFFLE_BUFFER if size == float("inf") else int(RECORD_BYTES / max(size, 1.0))
    return max(1, min(fitting, len(stream)))


def epoch_seed(seed: int, epoch: tf.Tensor | int) -> tf.Tensor:
    """Derives the seed of one epoch for operations that take a single number."""
    return shuffle_position(tf.constant(0, tf.int64), seed, epoch, 2**31)
