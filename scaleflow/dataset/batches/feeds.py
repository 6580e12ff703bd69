"""Feeds: map a position (epoch, step) in a split to a padded batch, for the compiled training loop.

The order of examples is a pure function of (seed, epoch), and the position in it one of (step, replica). So a global
batch holds the same examples on any number of replicas, and a run can resume at any step without a saved iterator.

An epoch that is shorter than a stream (`training.steps_per_epoch`) continues at the end of the last one, because
otherwise each epoch would read the beginning of the stream. Its order is a function of (seed, pass), and a pass reads
the whole stream once.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.blocks import SLAB, BlockOrder, Blocks, read_slabs
from scaleflow.dataset.batches.orders import Permutation, shuffle_position
from scaleflow.dataset.batches.preprocessing import Transforms, batch_spec, preprocess_batches
from scaleflow.dataset.batches.records import (
    RECORD_BYTES,
    Records,
    StreamRows,
    decode_records,
    prefetch,
    reading_options,
    record_bytes,
    to_record,
)
from scaleflow.dataset.batches.rows import to_rows
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Batching, Examples, Feed, Rows, Stream, label_leaf, name_leaves

#: Size of the shuffle buffer in records, if the size of a record is unknown.
SHUFFLE_BUFFER = 10_000

#: Number of records in memory that are gathered in one call.
GATHER_BATCH_SIZE = 256

#: Position in the epoch's order [] int64 -> whether this worker reads it.
IsOwn = Callable[[tf.Tensor], tf.Tensor]


class ShuffledOrder:
    """A stream's examples in the order of an epoch.

    Records in memory are accessed by index: a worker reads only its own, and a run can start at any position
    immediately. A worker reads all records of any other stream, and decodes its own.

    Args:
        stream: the records.
        seed: reshuffles every epoch. None keeps the order.
        buffer: size of the shuffle buffer in records, for streams that are not in memory. None means as many as fit in
            `RECORD_BYTES`.
        drawn: which records in memory an epoch has.
    """

    def __init__(self, stream: Stream, seed: int | None, buffer: int | None, drawn: Permutation) -> None:
        self._stream = stream
        self._drawn = drawn
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
        stream = cast(Records, self._stream)
        seed = self._seed
        drawn = self._drawn

        def gather(place: tf.Tensor) -> Any:
            place %= len(drawn)
            return stream.at(place if seed is None else drawn.find(place, seed, epoch))

        positions = tf.data.Dataset.range(first, last)
        worker_positions = positions if is_own is None else positions.filter(is_own)
        return worker_positions.batch(GATHER_BATCH_SIZE).map(gather).unbatch()

    def _read_through_buffer(
        self, epoch: tf.Tensor, first: tf.Tensor, last: int, is_own: IsOwn | None
    ) -> tf.data.Dataset:
        count = len(self._stream)
        padding = self._stream.dataset.take(count).repeat().take(last - count)
        dataset = self._shuffle_records(epoch).concatenate(padding).skip(first)
        return keep_own(dataset, first, is_own)

    def examples_onward(self, first: tf.Tensor, is_own: IsOwn | None = None) -> tf.data.Dataset:
        """Returns the examples (input, target) from a position on, without an end.

        Positions count over all passes. Each pass reads the whole stream in another order.
        """
        count = len(self._stream)
        passes = tf.data.Dataset.range(first // count, tf.int64.max)
        records = passes.flat_map(self._shuffle_records).skip(first % count)
        return decode_records(self._stream, keep_own(records, first, is_own))

    def _shuffle_records(self, epoch: tf.Tensor) -> tf.data.Dataset:
        """Returns all records in the order of an epoch, or of a pass. Traced."""
        count = len(self._stream)
        dataset = self._stream.dataset.take(count).apply(tf.data.experimental.assert_cardinality(count))
        if self._seed is None:
            return dataset
        seed = shuffle_position(tf.constant(0, tf.int64), self._seed, epoch, count=2**31)  # a single number
        with replace_global_seed():
            return dataset.shuffle(self._buffer, seed=seed, reshuffle_each_iteration=False)


def keep_own(dataset: tf.data.Dataset, first: tf.Tensor, is_own: IsOwn | None) -> tf.data.Dataset:
    """Returns the records that this worker reads; `first` is the position of the first one."""
    if is_own is None:
        return dataset
    numbered = dataset.enumerate(start=first).filter(lambda place, *_: is_own(place))
    return numbered.map(lambda _, *record: to_record(record))


@contextlib.contextmanager
def replace_global_seed() -> Iterator[None]:
    """Keeps operations of a graph from using the global seed in this context.

    If that is 0, TensorFlow compares the operation's own seed with 0 in Python, which fails for a tensor of a graph.
    """
    graph = tf.compat.v1.get_default_graph()
    before = graph.seed
    graph.seed = 1
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


#: A replica's share of a batch up to this size is read while the previous step computes: small steps leave cores
#: idle (measured: 1.07x as fast). To copy a larger one takes cores from the step (0.95x).
READ_AHEAD_BYTES = 1 << 20


class ArrayFeed:
    """Gathers examples by index inside the compiled step, from arrays that each replica holds on its device."""

    is_indexed = True
    continues = False
    _can_read_ahead = True

    def __init__(
        self,
        arrays: Arrays,
        batching: Batching,
        strategy: tf.distribute.Strategy,
        shuffle_seed: int | None,
        threads: int | None = None,
    ) -> None:
        self.examples = len(arrays)
        self.batching = batching
        share_bytes = batching.share * arrays.nbytes // len(arrays)
        self.ahead = self._can_read_ahead and batching.accumulate == 1 and share_bytes <= READ_AHEAD_BYTES
        self._seed = shuffle_seed
        self._strategy = strategy
        self._options = reading_options(threads)
        self._datasets: dict[int, Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]] = {}
        self._columns = Columns(arrays.parts)
        self._arrays = self._hold(arrays)
        self._drawn = Permutation(len(arrays))
        #: The indices of the examples from a position of the epoch on, and that position. None: they are computed.
        self._listed: tuple[tf.Tensor, tf.Tensor] | None = None

    def _hold(self, arrays: Arrays) -> Any:
        """Copies the arrays' parts, as `Columns` joins them, to the devices of this worker's replicas."""
        devices = replica_devices(self._strategy)

        def distribute(array: np.ndarray[Any, Any]) -> Any:
            def copy_to_replica(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
                with tf.device(devices[context.replica_id_in_sync_group % len(devices)]):  # ids count over all workers
                    return tf.constant(array)

            return self._strategy.experimental_distribute_values_from_function(copy_to_replica)

        return [distribute(array) for array in self._columns.join(arrays.parts)]

    def reorder(self, seed: int | None, drawn: Permutation | None = None) -> ArrayFeed:
        """Returns a feed with the same arrays, in the order of another seed or with other examples in its epochs."""
        other = copy.copy(self)
        other._seed = seed
        other._drawn = drawn or self._drawn
        other._datasets = {}
        other.examples = len(other._drawn)
        return other

    def open(self, epoch: int, step: int) -> Any:
        return self._arrays

    def fetch(self, opened: Any) -> Any:
        return opened

    def list_indices(self, epoch: tf.Tensor, first: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        size = self.batching.global_size
        positions = first * size + tf.range(steps * size)
        return tf.cast(self._find_indices(epoch, positions), tf.int32)

    def with_indices(self, indices: tf.Tensor, first: tf.Tensor) -> ArrayFeed:
        other = copy.copy(self)
        other._listed = indices, first * self.batching.global_size
        return other

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[Any, ...]:
        size = self.batching.batch_size
        first = step * self.batching.global_size + tf.cast(replica, tf.int64) * self.batching.share + index * size
        return self._gather(fetched, epoch, first, size=size)

    def batches(self, epochs: int, steps_per_epoch: int) -> tf.data.Dataset:
        arrays = self._on_host()

        def batch(place: tf.Tensor) -> Any:
            epoch = place // steps_per_epoch
            step = place % steps_per_epoch
            return self._gather(arrays, epoch, step * self.batching.global_size, size=self.batching.global_size)

        dataset = tf.data.Dataset.range(epochs * steps_per_epoch)
        batches = dataset.map(batch, num_parallel_calls=tf.data.AUTOTUNE)
        return prefetch(batches).with_options(self._options)

    def _on_host(self) -> Any:

        def copy_to_host(values: Any) -> tf.Tensor:
            return tf.identity(self._strategy.experimental_local_results(values)[0])

        with tf.device("CPU"):
            return tf.nest.map_structure(copy_to_host, self._arrays)

    def _gather(self, arrays: Any, epoch: tf.Tensor, first: tf.Tensor, size: int) -> tuple[Any, ...]:
        """Returns the examples at `size` positions of an epoch's order from `first` on, as `Feed.micro_batch` does."""
        position = first + tf.range(size, dtype=tf.int64)
        mask = tf.ones([size])
        if self.examples % self.batching.global_size:  # the last batch is partial
            mask = tf.cast(position < self.examples, tf.float32)
        if self._listed is None:
            indices = self._find_indices(epoch, position)
        else:
            listed, start = self._listed
            # A gather of the row, because XLA would compile a slice again for each start.
            indices = tf.gather(tf.reshape(listed, [-1, size]), (first - start) // size)
        return add_mask(self._take(arrays, indices), mask)

    def _find_indices(self, epoch: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Returns the indices of the examples at these positions of an epoch's order."""
        positions %= self.examples  # padding and read-ahead repeat the epoch's first examples
        return positions if self._seed is None else self._drawn.find(positions, self._seed, epoch)

    def _take(self, arrays: Any, position: tf.Tensor) -> Any:
        return self._columns.divide([tf.gather(array, position) for array in arrays])


class Columns:
    """Joins arrays of one dtype and shape, such as the columns of a table, so that one operation gathers all of them.

    To gather a thousand columns with an operation each took longer than to train a small network (measured).

    Args:
        parts: a structure of arrays [n, ...].
    """

    def __init__(self, parts: Any) -> None:
        self._structure = parts = tf.nest.map_structure(lambda array: array[:0], parts)
        groups: dict[Any, list[int]] = {}
        for number, array in enumerate(tf.nest.flatten(parts)):
            own = () if array.ndim in (1, 2) and array.dtype.kind not in "OSU" else (number,)
            groups.setdefault((array.dtype.str, array.shape[1:], *own), []).append(number)
        self._groups = list(groups.values())

    def join(self, parts: Any) -> Iterator[np.ndarray[Any, Any]]:
        """Yields the arrays of each group as one: numbers [n] as [n, k], rows [n, width] as [n, k * width]."""
        flat = tf.nest.flatten(parts)
        for group in self._groups:
            arrays = [flat[number] for number in group]
            join = np.stack if arrays[0].ndim == 1 else np.concatenate
            yield arrays[0] if len(group) == 1 else join(arrays, axis=1)

    def divide(self, joined: Sequence[tf.Tensor]) -> Any:
        """Divides joined rows into the structure of the parts. It is the reverse of `join`."""
        flat: dict[int, tf.Tensor] = {}
        ranks = [array.ndim for array in tf.nest.flatten(self._structure)]
        for group, tensor in zip(self._groups, joined, strict=True):
            if len(group) == 1:
                divided = [tensor]
            elif ranks[group[0]] == 1:
                divided = tf.unstack(tensor, axis=1)
            else:  # XLA sees that a model which concatenates all of them needs no copy
                divided = tf.split(tensor, len(group), axis=1)
            flat |= zip(group, divided, strict=True)
        return tf.nest.pack_sequence_as(self._structure, [flat[number] for number in range(len(flat))])


class SharesFeed:
    """Base of feeds whose batches are built on the host by tf.data, which also reads ahead.

    An element is one replica's share of one global batch, in the form that `Feed.micro_batch` returns.
    """

    examples: int
    batching: Batching
    is_indexed = False
    continues = False
    _strategy: tf.distribute.Strategy
    _options: tf.data.Options
    _datasets: dict[int, Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]]  # by the worker's index

    def open(self, epoch: int, step: int) -> Any:
        """Returns an iterator over the rest of the epoch, distributed if there are several devices."""
        position = tf.constant(epoch, tf.int64), tf.constant(step, tf.int64)

        def make_worker_dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
            worker = context.input_pipeline_id
            if worker not in self._datasets:
                self._datasets[worker] = self._trace_dataset(context)
            return self._datasets[worker](*position)

        if is_one_cpu(self._strategy):  # a distributed iterator copies to the device, and takes 0.1 s more to make
            return iter(make_worker_dataset(tf.distribute.InputContext()))
        return iter(self._strategy.distribute_datasets_from_function(make_worker_dataset))

    def _trace_dataset(self, context: tf.distribute.InputContext) -> Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]:
        """Returns a function (epoch, step) -> a worker's shares.

        Python traces the pipeline once. To trace it for each epoch took longer than to read the first images.
        """
        replicas = self.batching.replicas
        is_mine = worker_positions(1, context)

        @tf.function(autograph=False)
        def make_dataset(epoch: tf.Tensor, step: tf.Tensor) -> tf.data.Dataset:
            numbers = tf.data.Dataset.range(step * replicas, self.batching.steps(self.examples) * replicas)
            worker_numbers = numbers if is_mine is None else numbers.filter(is_mine)
            shares = self._read_shares(epoch, step, worker_numbers, context=context)
            return prefetch(shares).with_options(self._options)

        return make_dataset  # type: ignore[no-any-return]

    def _read_shares(
        self, epoch: tf.Tensor, step: tf.Tensor, numbers: tf.data.Dataset, context: tf.distribute.InputContext
    ) -> tf.data.Dataset:
        """Returns a worker's shares from a step on. `numbers` are their indices in the epoch. Traced."""
        raise NotImplementedError

    def fetch(self, opened: Any) -> Any:
        return next(opened)

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[Any, ...]:
        if self.batching.accumulate == 1:
            return tuple(fetched)
        return slice_micro_batch(fetched, self.batching.batch_size, index)


class HostArrayFeed(SharesFeed, ArrayFeed):
    """Gathers examples from arrays in the host's memory.

    It is used for TPUs, because XLA does not implement `index_shuffle`, and for arrays that are too large for a device.
    """

    _can_read_ahead = False  # tf.data does

    def _hold(self, arrays: Arrays) -> Any:
        with tf.device("CPU:0"):
            return [tf.constant(array) for array in self._columns.join(arrays.parts)]

    def _read_shares(
        self, epoch: tf.Tensor, step: tf.Tensor, numbers: tf.data.Dataset, context: tf.distribute.InputContext
    ) -> tf.data.Dataset:
        share = self.batching.share

        def share_at(number: tf.Tensor) -> Any:
            return self._gather(self._arrays, epoch, number * share, size=share)

        return numbers.map(share_at, num_parallel_calls=tf.data.AUTOTUNE)


class FileFeed(HostArrayFeed):
    """Builds the batches from memory-mapped arrays, so that memory holds only the current rows."""

    def _hold(self, arrays: Arrays) -> Any:
        return arrays.parts

    def _on_host(self) -> Any:
        return self._arrays

    def _take(self, arrays: Any, position: tf.Tensor) -> Any:
        flat = tf.nest.flatten(arrays)
        gathered = tf.numpy_function(
            lambda places: tuple(gather_rows(array, places) for array in flat),
            [position],
            [tf.string if array.dtype.kind in "SU" else array.dtype for array in flat],
            stateful=False,
        )
        shaped = [tf.ensure_shape(t, [*position.shape, *a.shape[1:]]) for t, a in zip(gathered, flat, strict=True)]
        return tf.nest.pack_sequence_as(arrays, shaped)


def gather_rows(array: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns rows of an array, text as objects."""
    rows = np.asarray(array[places])
    return rows.astype(object) if rows.dtype.kind in "SU" else rows


def check_static_shapes(examples: Rows | Examples, transforms: Transforms | None = None) -> None:
    """Rejects examples that a TPU cannot take: text, and shapes that are not static."""
    parts = batch_spec(to_rows(examples), transforms or {})
    for what, part in zip(("inputs", "targets", "weights"), parts, strict=False):
        for name, spec in name_leaves(part).items():
            if spec.dtype == tf.string or not spec.shape.is_fully_defined():
                problem = "are text" if spec.dtype == tf.string else f"have the shape {spec.shape}"
                raise ConfigError(
                    f"strategy=tpu with a dataset whose {label_leaf(what, name)} {problem}: a TPU needs numbers of "
                    "one fixed shape; change the dataset, or use strategy=mirrored"
                )


def replica_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the devices of this worker's replicas; one "" (TensorFlow chooses) for the default strategy."""
    try:
        return tuple(strategy.extended.worker_devices)
    except RuntimeError:  # the default strategy has none
        return ("",)


def is_one_cpu(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether the strategy has a single replica, which computes on the CPU."""
    return isinstance(strategy, tf.distribute.OneDeviceStrategy) and "CPU" in replica_devices(strategy)[0].upper()


class StreamFeed(SharesFeed):
    """Reads examples from a stream, and batches and pads them with tf.data. `make_feed` describes the arguments."""

    ahead = False  # tf.data reads ahead

    def __init__(
        self,
        stream: Stream,
        batching: Batching,
        strategy: tf.distribute.Strategy,
        shuffle_seed: int | None,
        transforms: Transforms | None = None,
        buffer: int | None = None,
        threads: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.examples = len(stream)
        self.batching = batching
        self._stream = stream
        self._buffer = buffer
        self._drawn = Permutation(len(stream))
        self._order = self._make_order(shuffle_seed)
        self._steps_per_epoch = steps_per_epoch or batching.steps(len(stream))
        is_shortened = self._steps_per_epoch < batching.steps(len(stream))
        rows = to_rows(stream)
        self._is_shortened = is_shortened and not rows.is_random_access
        self._varies = isinstance(rows, StreamRows) and rows.varies
        self.continues = shuffle_seed is not None and (self._is_shortened or self._varies)
        self._strategy = strategy
        self._transforms = transforms or {}
        self._options = reading_options(threads)
        self._datasets = {}

    def reorder(self, seed: int | None, drawn: Permutation | None = None) -> StreamFeed:
        """Returns a feed in the order of another seed, or whose epochs have other records in memory."""
        other = copy.copy(self)
        other._drawn = drawn or self._drawn
        other.examples = len(other._drawn)
        other._order = other._make_order(seed)
        other._datasets = {}
        return other

    def _make_order(self, seed: int | None) -> Any:
        return ShuffledOrder(self._stream, seed, self._buffer, drawn=self._drawn)

    def _read_shares(
        self, epoch: tf.Tensor, step: tf.Tensor, numbers: tf.data.Dataset, context: tf.distribute.InputContext
    ) -> tf.data.Dataset:
        size = self.batching.global_size
        share = self.batching.share
        is_own = worker_positions(share, context)
        if self.continues and self._is_shortened:
            first = (epoch * self._steps_per_epoch + step) * size
            return self._full_shares(self._order.examples_onward(first, is_own), share)
        last = self.batching.steps(self.examples) * size
        if not self.continues:
            return self._shares(self._order.examples(epoch, step * size, last, is_own=is_own), numbers, share)
        # One iterator for all epochs: a new one would restart random operations, so each epoch would get equal changes.
        is_mine = worker_positions(1, context)
        replicas = self.batching.replicas
        in_epoch = tf.data.Dataset.range(self.batching.steps(self.examples) * replicas)
        own_numbers = in_epoch if is_mine is None else in_epoch.filter(is_mine)

        def read_epoch(number: tf.Tensor) -> tf.data.Dataset:
            whole = self._order.examples(number, tf.constant(0, tf.int64), last, is_own=is_own)
            return self._shares(whole, own_numbers, share).take(self._steps_per_epoch * own_replicas)

        own_replicas = replicas // context.num_input_pipelines
        epochs = tf.data.Dataset.range(epoch, tf.int64.max)
        return epochs.flat_map(read_epoch).skip(step * own_replicas)

    def batches(self, epochs: int, steps_per_epoch: int) -> tf.data.Dataset:
        if self.continues and self._is_shortened:
            examples = self._order.examples_onward(tf.constant(0, tf.int64))
            batches = self._full_shares(examples, self.batching.global_size).take(epochs * steps_per_epoch)
            return prefetch(batches).with_options(self._options)
        dataset = tf.data.Dataset.range(epochs).flat_map(lambda epoch: self._read_epoch(epoch).take(steps_per_epoch))
        return prefetch(dataset).with_options(self._options)

    def _read_epoch(self, epoch: tf.Tensor) -> tf.data.Dataset:
        """Returns the global batches of an epoch. Traced."""
        size = self.batching.global_size
        steps = self.batching.steps(self.examples)
        return self._shares(self._order.examples(epoch, 0, steps * size), tf.data.Dataset.range(steps), size)

    def _shares(self, examples: tf.data.Dataset, numbers: tf.data.Dataset, share: int) -> tf.data.Dataset:
        """Batches examples, padded to whole batches of `share`, and adds a mask that is 0 for padding.

        Padding repeats real examples: with zeros a model's loss could be NaN, and NaN * 0 is NaN. `numbers` has the
        index of each batch in the epoch.
        """

        def mask_padding(batch: Any, number: tf.Tensor) -> Any:
            is_real = number * share + tf.range(share, dtype=tf.int64) < self.examples
            return add_mask(batch, tf.cast(is_real, tf.float32))

        batches = preprocess_batches(examples.batch(share, drop_remainder=True), self._transforms)
        numbered = tf.data.Dataset.zip(batches, numbers)
        return numbered.map(mask_padding, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def _full_shares(self, examples: tf.data.Dataset, share: int) -> tf.data.Dataset:
        """Batches examples without an end. No batch has padding: it goes on with the next pass."""
        batches = preprocess_batches(examples.batch(share, drop_remainder=True), self._transforms)
        return batches.map(
            lambda *batch: add_mask(batch, tf.ones([share])), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        )


class BlockFeed(StreamFeed):
    """Reads rows from blocks, and preprocesses many of them at once. `make_feed` describes the arguments.

    A global batch has an equal part of each shard, one after the other. So it does not depend on the workers, and a
    worker reads only the shards of its part of the batch.
    """

    _stream: Blocks

    def __init__(self, stream: Blocks, batching: Batching, *options: Any, shards: int = 1, **named: Any) -> None:
        shards = math.gcd(shards, batching.global_size)  # the batch of an evaluation may have another size
        self._shards = shards if stream.blocks >= shards else 1
        super().__init__(stream, batching, *options, **named)

    def _make_order(self, seed: int | None) -> list[BlockOrder]:
        """Returns the order of each shard."""
        return [BlockOrder(self._stream, seed, self._buffer, shard=n, shards=self._shards) for n in range(self._shards)]

    def _read_shares(
        self, epoch: tf.Tensor, step: tf.Tensor, numbers: tf.data.Dataset, context: tf.distribute.InputContext
    ) -> tf.data.Dataset:
        workers = context.num_input_pipelines
        return self._read_slabs(epoch, step, self.batching.share, workers=workers, worker=context.input_pipeline_id)

    def _read_epoch(self, epoch: tf.Tensor) -> tf.data.Dataset:
        return self._read_slabs(epoch, tf.constant(0, tf.int64), self.batching.global_size, workers=1, worker=0)

    def find_places(self, step: int) -> np.ndarray[Any, Any]:
        """Returns the same as the function `find_places`, for shards: each gives an equal part of a batch."""
        size = self.batching.global_size // self._shards
        firsts = np.array([order.first for order in self._order])
        return (firsts[:, None] + step * size + np.arange(size)).ravel()

    @property
    def _slab_steps(self) -> int:
        return max(1, SLAB // self.batching.global_size)

    def _read_slabs(self, epoch: tf.Tensor, step: tf.Tensor, share: int, workers: int, worker: int) -> tf.data.Dataset:
        """Returns a worker's shares of an epoch from a step on. It reads `_slab_steps` of them at once.

        Padding repeats the last row of a shard, with a mask of 0.
        """
        firsts = tf.data.Dataset.range(step, self.batching.steps(self.examples), self._slab_steps)
        size = self.batching.global_size // self._shards  # rows of a shard in a global batch
        local = self.batching.global_size // workers
        places = np.arange(worker * local, (worker + 1) * local)
        parts = [(int(shard), places[places // size == shard] % size) for shard in np.unique(places // size)]

        def read(epoch: int, first: int) -> Any:
            steps = np.arange(first, min(first + self._slab_steps, self.batching.steps(self.examples)))
            rows = [read_shard(epoch, steps, *part) for part in parts]
            if len(rows) == 1:
                return rows[0]
            return tf.nest.map_structure(lambda *arrays: join_by_step(arrays, len(steps)), *rows)

        def read_shard(epoch: int, steps: np.ndarray[Any, Any], shard: int, mine: np.ndarray[Any, Any]) -> Any:
            order = self._order[shard]
            positions = (steps[:, None] * size + mine).ravel()
            rows = order.take(epoch, np.minimum(positions, len(order) - 1))
            return *rows.parts, (positions < len(order)).astype(np.float32)

        spec = *self._stream.rows.spec, tf.TensorSpec([], tf.float32)
        numbers = firsts.map(lambda first: (epoch, first))
        slabs = preprocess_batches(read_slabs(numbers, read, spec), self._transforms)
        return slabs.map(lambda *parts: add_mask(parts[:-1], parts[-1])).rebatch(share, drop_remainder=True)


def find_places(feed: Feed, step: int) -> np.ndarray[Any, Any]:
    """Returns the indices in the split of a batch's examples, [global batch] int64, if the feed does not shuffle.

    The indices of padding have no meaning.
    """
    if isinstance(feed, BlockFeed):
        return feed.find_places(step)
    size = feed.batching.global_size
    return np.arange(step * size, (step + 1) * size)


def join_by_step(arrays: Sequence[np.ndarray[Any, Any]], steps: int) -> np.ndarray[Any, Any]:
    """Joins arrays with rows of the same steps by step: first all rows of the first step."""
    joined = np.concatenate([array.reshape(steps, -1, *array.shape[1:]) for array in arrays], axis=1)
    return joined.reshape(-1, *joined.shape[2:])


def add_mask(parts: Any, mask: tf.Tensor) -> tuple[Any, ...]:
    """Returns (inputs, targets, mask), or with weights that are 0 for padding, from the parts of examples."""
    inputs, targets, *weights = parts
    return inputs, targets, mask, *(tf.cast(values, tf.float32) * mask for values in weights)


def slice_micro_batch(fetched: Any, size: int, index: tf.Tensor) -> tuple[Any, ...]:
    """Returns one micro-batch of a replica's share, in the same form."""

    def part(tensor: tf.Tensor) -> tf.Tensor:
        shape = tensor.shape[1:]  # in a loop, XLA does not infer the static size of `tensor[first : first + size]`
        return tf.slice(tensor, [index * size, *[0] * shape.rank], [size, *(-1 if n is None else n for n in shape)])

    micro_batch: tuple[Any, ...] = tf.nest.map_structure(part, tuple(fetched))
    return micro_batch


def worker_positions(share: int, context: tf.distribute.InputContext) -> IsOwn | None:
    """Returns which positions of an epoch's order one worker's replicas read; None for a single worker."""
    workers = context.num_input_pipelines
    if workers == 1:
        return None
    worker = context.input_pipeline_id
    local_replicas = context.num_replicas_in_sync // workers
    return lambda place: (place // (share * local_replicas)) % workers == worker
