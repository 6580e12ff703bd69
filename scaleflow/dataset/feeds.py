"""Splits as the compiled loop reads them: from a position (epoch, step) to a padded batch.

The order of examples is a pure function of (seed, epoch), the place in it one of (step, replica): so
the same global batch holds the same examples on any number of replicas, and a run can go on from
any step without having kept an iterator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.interfaces import Arrays, Batching, Examples, Feed, Stream

#: A stream is shuffled through a buffer of so many examples: all of them where they are fewer.
SHUFFLE_BUFFER = 10_000


def feed(
    examples: Examples, batching: Batching, strategy: tf.distribute.Strategy, shuffle_seed: int | None = None
) -> Feed:
    """The feed of one split.

    Args:
        examples: the split.
        batching: how a global batch is divided.
        strategy: whose replicas read.
        shuffle_seed: reshuffles every epoch; None keeps the order.
    """
    if isinstance(examples, Arrays):
        return ArrayFeed(examples, batching, strategy, shuffle_seed)
    return StreamFeed(examples, batching, strategy, shuffle_seed)


class ArrayFeed:
    """Examples in memory, gathered by index inside the compiled step.

    Each replica holds the arrays on its device, so that nothing is copied in a step.
    """

    def __init__(
        self, arrays: Arrays, batching: Batching, strategy: tf.distribute.Strategy, shuffle_seed: int | None
    ) -> None:
        self.examples = len(arrays)
        self.batching = batching
        self._seed = shuffle_seed
        self._arrays = on_every_replica(strategy, arrays)

    def open(self, epoch: int, step: int) -> Any:
        return self._arrays

    def fetch(self, opened: Any) -> Any:
        return opened

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        inputs, targets = fetched
        size = self.batching.batch_size
        first = step * self.batching.global_size + tf.cast(replica, tf.int64) * self.batching.share + index * size
        position = first + tf.range(size, dtype=tf.int64)
        mask = tf.cast(position < self.examples, tf.float32)
        position = tf.minimum(position, self.examples - 1)
        if self._seed is not None:
            seed = tf.stack([tf.constant(self._seed, tf.int64), epoch])
            last = tf.constant(self.examples - 1, tf.int64)
            position = tf.random.experimental.index_shuffle(position, seed, last)
        return tf.gather(inputs, position), tf.gather(targets, position), mask


def on_every_replica(strategy: tf.distribute.Strategy, arrays: Arrays) -> Any:
    """(inputs, targets) as constants on each replica's device."""
    devices = strategy.extended.worker_devices

    def place(array: np.ndarray[Any, Any]) -> Any:
        def value(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
            with tf.device(devices[context.replica_id_in_sync_group]):
                return tf.constant(array)

        return strategy.experimental_distribute_values_from_function(value)

    return place(arrays.inputs), place(arrays.targets)


class StreamFeed:
    """Examples that are read as they come, batched and padded by tf.data.

    An element is one replica's share of one global batch: (inputs, targets, mask).
    """

    def __init__(
        self, stream: Stream, batching: Batching, strategy: tf.distribute.Strategy, shuffle_seed: int | None
    ) -> None:
        self.examples = len(stream)
        self.batching = batching
        self._stream = stream
        self._seed = shuffle_seed
        self._strategy = strategy

    def open(self, epoch: int, step: int) -> Any:
        """A distributed iterator over the rest of the epoch."""
        dataset = self._shuffled(epoch).skip(step * self.batching.global_size)
        shares = (self.batching.steps(self.examples) - step) * self.batching.replicas
        shares_dataset = padded_shares(dataset, self.batching.share, shares).prefetch(tf.data.AUTOTUNE)
        return iter(self._strategy.distribute_datasets_from_function(lambda context: shares_dataset))

    def _shuffled(self, epoch: int) -> tf.data.Dataset:
        if self._seed is None:
            return self._stream.dataset
        seed = int(np.random.default_rng([self._seed, epoch]).integers(2**31))
        buffer = min(self.examples, SHUFFLE_BUFFER)
        return self._stream.dataset.shuffle(buffer, seed=seed, reshuffle_each_iteration=False)

    def fetch(self, opened: Any) -> Any:
        return next(opened)

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        size = self.batching.batch_size
        first = index * size
        inputs, targets, mask = (tensor[first : first + size] for tensor in fetched)
        return keep_size(inputs, size), keep_size(targets, size), keep_size(mask, size)


def padded_shares(dataset: tf.data.Dataset, share: int, shares: int) -> tf.data.Dataset:
    """Exactly `shares` batches of `share` examples; what the data does not fill is masked padding."""
    real = dataset.map(lambda x, y: (x, y, 1.0))
    empty = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), dataset.element_spec)
    padding = tf.data.Dataset.from_tensors((*empty, 0.0)).repeat()
    return real.concatenate(padding).batch(share, drop_remainder=True).take(shares)


def keep_size(tensor: tf.Tensor, size: int) -> tf.Tensor:
    """The same tensor with its batch dimension known, which slicing by a tensor loses."""
    return tf.ensure_shape(tensor, [size, *tensor.shape[1:]])
