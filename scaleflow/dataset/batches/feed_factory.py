"""Chooses the feed for a split and a strategy."""

from __future__ import annotations

from typing import Any, cast

import tensorflow as tf

from scaleflow.dataset.batches.blocks import Blocks
from scaleflow.dataset.batches.feeds import (
    ArrayFeed,
    BlockFeed,
    FileFeed,
    HostArrayFeed,
    StreamFeed,
    check_static_shapes,
    slice_micro_batch,
)
from scaleflow.dataset.batches.preprocessing import Transforms
from scaleflow.dataset.batches.records import StreamRows
from scaleflow.dataset.batches.rows import ArrayRows, to_rows
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Batching, Examples, Feed, Rows

#: Protocol Buffers' limit, less room for the rest of the message that sends the arrays to a worker.
LARGEST_BYTES = (2 << 30) - (16 << 20)


class ParameterServerArrayFeed(ArrayFeed):
    """Arrays that each worker holds, also after a restart."""

    _can_read_ahead = False  # little to gain: the variables come over the network

    def _hold(self, arrays: Arrays) -> Any:
        """Returns an iterator per worker that always yields the whole arrays, without a copy."""
        if arrays.nbytes > LARGEST_BYTES:
            raise ConfigError(
                f"strategy=parameter_server: the training split takes {arrays.nbytes / 2**30:.1f} GiB in memory, and "
                "a worker can be sent at most 2 GiB at once; use dataset.limit, a dataset that streams, or another "
                "strategy"
            )

        def whole() -> tf.data.Dataset:
            return tf.data.Dataset.from_tensors(tuple(map(tf.constant, self._columns.join(arrays.parts)))).repeat()

        coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        return iter(coordinator.create_per_worker_dataset(whole))

    def fetch(self, opened: Any) -> Any:
        return next(opened)

    def worker_argument(self, opened: Any, first: int, steps: int) -> Any:
        return opened


class ParameterServerFeed:
    """A feed for parameter servers: the coordinator reads the batches, and sends each worker its steps' batches."""

    batching: Batching

    def worker_argument(self, opened: Any, first: int, steps: int) -> Any:
        """Returns (first step, the shares of the steps, [steps, share, ...]); for 0 steps, one that is not used."""
        shares = [next(opened) for _ in range(max(1, steps))]
        return tf.constant(first, tf.int64), tf.nest.map_structure(lambda *tensors: tf.stack(tensors), *shares)

    def fetch(self, opened: Any) -> Any:
        return opened

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[Any, ...]:
        first, shares = fetched
        share = tf.nest.map_structure(lambda tensor: tensor[step - first], shares)
        return slice_micro_batch(share, self.batching.batch_size, index)


class ParameterServerStreamFeed(ParameterServerFeed, StreamFeed):
    """A stream that the coordinator reads."""


class ParameterServerBlockFeed(ParameterServerFeed, BlockFeed):
    """Rows in blocks that the coordinator reads."""


class ParameterServerFileFeed(ParameterServerFeed, FileFeed):
    """Memory-mapped arrays that the coordinator reads."""


#: A split in memory is copied to each device if it takes at most this fraction of the device's memory.
DEVICE_SHARE = 0.25


def make_feed(
    examples: Rows | Examples,
    batching: Batching,
    strategy: tf.distribute.Strategy,
    shuffle_seed: int | None = None,
    *,
    transforms: Transforms | None = None,
    buffer: int | None = None,
    threads: int | None = None,
    device_bytes: float | None = None,
    shards: int = 1,
    steps_per_epoch: int | None = None,
) -> Feed:
    """Makes the feed of one split.

    Args:
        examples: the split.
        batching: how a global batch is divided.
        strategy: its replicas read. With parameter servers, the coordinator provides the workers' data.
        shuffle_seed: reshuffles every epoch; None keeps the order.
        transforms: preprocessing of a stream's inputs. Arrays are preprocessed already.
        buffer, threads: `dataset.shuffle` (streams only) and `dataset.threads`.
        device_bytes: memory of the smallest device; None if devices use the host's memory.
        shards: `dataset.shards`, which `check_shards` has checked for the training split.
        steps_per_epoch: the steps of a shortened epoch. None: an epoch reads the whole split.

    Raises:
        ConfigError: if the strategy cannot take such examples, or has no room for them.
    """
    if isinstance(strategy, tf.distribute.TPUStrategy):
        check_static_shapes(examples, transforms)
    rows = to_rows(examples)
    is_served = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    reader = tf.distribute.get_strategy() if is_served else strategy  # of parameter servers, only this process reads
    if isinstance(rows, ArrayRows):
        feed = choose_array_feed(rows, strategy, device_bytes)
        holder = strategy if feed is ParameterServerArrayFeed else reader
        return feed(rows, batching, holder, shuffle_seed, threads)
    stream = cast(StreamRows, rows)
    options = (batching, reader, shuffle_seed, transforms, buffer, threads)
    if isinstance(stream, Blocks):
        return (ParameterServerBlockFeed if is_served else BlockFeed)(stream, *options, shards=shards)
    return (ParameterServerStreamFeed if is_served else StreamFeed)(stream, *options, steps_per_epoch=steps_per_epoch)


def choose_array_feed(
    arrays: ArrayRows, strategy: tf.distribute.Strategy, device_bytes: float | None
) -> type[ArrayFeed]:
    """Chooses the feed of arrays by the place that they are in, and by the place that has room for them."""
    is_file = arrays.place == "file"
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return ParameterServerFileFeed if is_file else ParameterServerArrayFeed
    if is_file:
        return FileFeed
    has_room = device_bytes is None or arrays.nbytes <= device_bytes * DEVICE_SHARE
    if isinstance(strategy, tf.distribute.TPUStrategy) or not has_room:
        return HostArrayFeed
    return ArrayFeed
