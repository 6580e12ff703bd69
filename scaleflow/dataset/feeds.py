"""Splits as the compiled loop reads them: from a position (epoch, step) to a padded batch.

The order of examples is a pure function of (seed, epoch), the place in it one of (step, replica): so
the same global batch holds the same examples on any number of replicas, and a run can go on from
any step without having kept an iterator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.errors import Refusal
from scaleflow.interfaces import Arrays, Batching, Examples, Stream

#: A stream is shuffled through a buffer of so many examples: all of them where they are fewer.
SHUFFLE_BUFFER = 10_000

#: Up to this size the next batch is read while a step computes, on cores that the small operations of such a
#: step leave idle (measured: 1.07x). Copying a larger one takes cores from the step itself (0.95x).
READ_AHEAD_BYTES = 1 << 20


class ArrayFeed:
    """Examples in memory, gathered by index inside the compiled step.

    Each replica holds the arrays on its device, so that nothing is copied in a step.
    """

    def __init__(
        self, arrays: Arrays, batching: Batching, strategy: tf.distribute.Strategy, shuffle_seed: int | None
    ) -> None:
        self.examples = len(arrays)
        self.batching = batching
        self.ahead = batching.accumulate == 1 and self._share_bytes(arrays) <= READ_AHEAD_BYTES
        self._seed = shuffle_seed
        self._strategy = strategy
        self._arrays = self._hold(arrays)

    def _hold(self, arrays: Arrays) -> Any:
        return on_every_replica(self._strategy, arrays)

    def _share_bytes(self, arrays: Arrays) -> int:
        """The size of one replica's share of a global batch."""
        return self.batching.share * (arrays.inputs.nbytes + arrays.targets.nbytes) // len(arrays)

    def open(self, epoch: int, step: int) -> Any:
        return self._arrays

    def fetch(self, opened: Any) -> Any:
        return opened

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        size = self.batching.batch_size
        first = step * self.batching.global_size + tf.cast(replica, tf.int64) * self.batching.share + index * size
        return self._gather(fetched, epoch, first, size)

    def batches(self, epochs: int, steps_per_epoch: int) -> tf.data.Dataset:
        with tf.device("CPU"):
            arrays = tuple(tf.identity(self._strategy.experimental_local_results(each)[0]) for each in self._arrays)

        def batch(place: tf.Tensor) -> Any:
            epoch, step = place // steps_per_epoch, place % steps_per_epoch
            return self._gather(arrays, epoch, step * self.batching.global_size, self.batching.global_size)

        dataset = tf.data.Dataset.range(epochs * steps_per_epoch)
        return dataset.map(batch, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)

    def _gather(
        self, arrays: Any, epoch: tf.Tensor, first: tf.Tensor, size: int
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The examples at `size` places of an epoch's order from `first` on: (inputs, targets, mask)."""
        inputs, targets = arrays
        position = first + tf.range(size, dtype=tf.int64)
        mask = tf.ones([size])
        if self.examples % self.batching.global_size:  # there is a partial batch
            mask = tf.cast(position < self.examples, tf.float32)
        position = tf.minimum(position, self.examples - 1)
        if self._seed is not None:
            seed = tf.stack([tf.constant(self._seed, tf.int64), epoch])
            last = tf.constant(self.examples - 1, tf.int64)
            position = tf.random.experimental.index_shuffle(position, seed, last)
        return tf.gather(inputs, position), tf.gather(targets, position), mask


class HostArrayFeed(ArrayFeed):
    """The same batches, put together on the host: XLA, which compiles a TPU's step, knows no `index_shuffle`.

    An element is one replica's share of one global batch: (inputs, targets, mask).
    """

    def __init__(
        self, arrays: Arrays, batching: Batching, strategy: tf.distribute.Strategy, shuffle_seed: int | None
    ) -> None:
        super().__init__(arrays, batching, strategy, shuffle_seed)
        self.ahead = False  # tf.data reads ahead itself

    def _hold(self, arrays: Arrays) -> Any:
        return tf.constant(arrays.inputs), tf.constant(arrays.targets)

    def open(self, epoch: int, step: int) -> Any:
        """A distributed iterator over the rest of the epoch."""
        replicas, share = self.batching.replicas, self.batching.share
        numbers = tf.data.Dataset.range(step * replicas, self.batching.steps(self.examples) * replicas)
        this_epoch = tf.constant(epoch, tf.int64)
        shares = numbers.map(
            lambda number: self._gather(self._arrays, this_epoch, number * share, share),
            num_parallel_calls=tf.data.AUTOTUNE,
        )

        def of_this_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return shares_of_worker(shares, context).prefetch(tf.data.AUTOTUNE)

        return iter(self._strategy.distribute_datasets_from_function(of_this_worker))

    def fetch(self, opened: Any) -> Any:
        return next(opened)

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return part_of_share(fetched, self.batching.batch_size, index)


def check_fixed(examples: Examples) -> None:
    """Refuses what a TPU can't take: text, and shapes that differ from one example to the next."""
    if isinstance(examples, Stream):
        specs = [(spec.dtype, spec.shape) for spec in examples.dataset.element_spec]
    else:
        arrays = (examples.inputs, examples.targets)
        specs = [(tf.as_dtype(array.dtype), tf.TensorShape(array.shape[1:])) for array in arrays]
    for name, (dtype, shape) in zip(("inputs", "targets"), specs, strict=False):
        if dtype == tf.string or not shape.is_fully_defined():
            found = "are text" if dtype == tf.string else f"have the shape {shape}"
            raise Refusal(
                f"strategy=tpu with a dataset whose {name} {found}: a TPU takes numbers of one shape that is known "
                "beforehand; make them so in the dataset, or use strategy=mirrored"
            )


def on_every_replica(strategy: tf.distribute.Strategy, arrays: Arrays) -> Any:
    """(inputs, targets) as constants on each replica's device."""
    devices = devices_of(strategy)  # this worker's; the replicas are numbered over all of them

    def place(array: np.ndarray[Any, Any]) -> Any:
        def value(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
            with tf.device(devices[context.replica_id_in_sync_group % len(devices)]):
                return tf.constant(array)

        return strategy.experimental_distribute_values_from_function(value)

    return place(arrays.inputs), place(arrays.targets)


def devices_of(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """The devices of this worker's replicas; for the default strategy TensorFlow's choice, the first."""
    try:
        return tuple(strategy.extended.worker_devices)
    except RuntimeError:  # the default strategy has none
        return ("",)


class StreamFeed:
    """Examples that are read as they come, batched and padded by tf.data.

    An element is one replica's share of one global batch: (inputs, targets, mask).
    """

    def __init__(
        self, stream: Stream, batching: Batching, strategy: tf.distribute.Strategy, shuffle_seed: int | None
    ) -> None:
        self.examples = len(stream)
        self.batching = batching
        self.ahead = False  # tf.data reads ahead itself
        self._stream = stream
        self._seed = shuffle_seed
        self._strategy = strategy

    def open(self, epoch: int, step: int) -> Any:
        """A distributed iterator over the rest of the epoch."""
        dataset = self._shuffled(self._shuffle_seed(epoch)).take(self.examples).skip(step * self.batching.global_size)
        shares = (self.batching.steps(self.examples) - step) * self.batching.replicas
        padded = padded_shares(dataset, self._stream.dataset, self.batching.share, shares)

        def of_this_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return shares_of_worker(padded, context).prefetch(tf.data.AUTOTUNE)

        return iter(self._strategy.distribute_datasets_from_function(of_this_worker))

    def batches(self, epochs: int, steps_per_epoch: int) -> tf.data.Dataset:
        seeds = tf.constant([self._shuffle_seed(epoch) for epoch in range(epochs)], tf.int64)
        steps = self.batching.steps(self.examples)

        def batches_of(epoch: tf.Tensor) -> tf.data.Dataset:
            dataset = self._shuffled(seeds[epoch]).take(self.examples)
            return padded_shares(dataset, self._stream.dataset, self.batching.global_size, steps).take(steps_per_epoch)

        return tf.data.Dataset.range(epochs).flat_map(batches_of).prefetch(tf.data.AUTOTUNE)

    def _shuffle_seed(self, epoch: int) -> int:
        return 0 if self._seed is None else int(np.random.default_rng([self._seed, epoch]).integers(2**31))

    def _shuffled(self, seed: int | tf.Tensor) -> tf.data.Dataset:
        if self._seed is None:
            return self._stream.dataset
        buffer = min(self.examples, SHUFFLE_BUFFER)
        return self._stream.dataset.shuffle(buffer, seed=seed, reshuffle_each_iteration=False)

    def fetch(self, opened: Any) -> Any:
        return next(opened)

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return part_of_share(fetched, self.batching.batch_size, index)


def part_of_share(fetched: Any, size: int, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """One micro-batch of a replica's share: (inputs, targets, mask)."""

    def part(tensor: tf.Tensor) -> tf.Tensor:
        rest = tensor.shape[1:]  # of a `tensor[first : first + size]` in a loop XLA does not see that its size is fixed
        return tf.slice(tensor, [index * size, *[0] * rest.rank], [size, *(-1 if n is None else n for n in rest)])

    inputs, targets, mask = (part(tensor) for tensor in fetched)
    return inputs, targets, mask


def padded_shares(dataset: tf.data.Dataset, unshuffled: tf.data.Dataset, share: int, shares: int) -> tf.data.Dataset:
    """Exactly `shares` batches of `share` examples with their mask; what the data does not fill is padding.

    The padding repeats real examples: one of zeros could make a model's loss NaN, and NaN x 0 is NaN.
    """
    real = dataset.batch(share).map(lambda x, y: pad(x, y, share), num_parallel_calls=tf.data.AUTOTUNE)
    one = unshuffled.take(1).repeat(share).batch(share, drop_remainder=True)
    padding = one.map(lambda x, y: (x, y, tf.zeros([share]))).cache().repeat()
    return real.concatenate(padding).take(shares)


def shares_of_worker(shares: tf.data.Dataset, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Of the replicas' shares, step by step, those of one worker's replicas."""
    workers, worker = context.num_input_pipelines, context.input_pipeline_id
    if workers == 1:
        return shares
    local = context.num_replicas_in_sync // workers
    mine = shares.enumerate().filter(lambda index, share: (index // local) % workers == worker)
    return mine.map(lambda index, share: share)


def pad(inputs: tf.Tensor, targets: tf.Tensor, share: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """A batch of at most `share` examples as one of `share`, and which of them are real."""
    count = tf.shape(inputs)[0]
    place = tf.range(share)
    real = tf.minimum(place, count - 1)
    inputs, targets = tf.cond(
        tf.equal(count, share), lambda: (inputs, targets), lambda: (tf.gather(inputs, real), tf.gather(targets, real))
    )
    return keep_size(inputs, share), keep_size(targets, share), tf.cast(place < count, tf.float32)


def keep_size(tensor: tf.Tensor, size: int) -> tf.Tensor:
    """The same tensor with its batch dimension known, which slicing by a tensor loses."""
    return tf.ensure_shape(tensor, [size, *tensor.shape[1:]])
