"""Splits as the compiled loop reads them: from a position (epoch, step) to a padded batch.

The order of examples is a pure function of (seed, epoch), the place in it one of (step, replica): so
the same global batch holds the same examples on any number of replicas, and a run can go on from
any step without having kept an iterator.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.cache import Transform, batch_spec, preprocess_batches
from scaleflow.dataset.shuffle import Mine, ShuffledOrder, shuffle_position
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Batching, Examples, Stream

#: Up to this size the next batch is read while a step computes, on cores that the small operations of such a
#: step leave idle (measured: 1.07x). Copying a larger one takes cores from the step itself (0.95x).
READ_AHEAD_BYTES = 1 << 20


class ArrayFeed:
    """Examples in memory, gathered by index inside the compiled step.

    Each replica holds the arrays on its device, so that nothing is copied in a step.
    """

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
        self.ahead = batching.accumulate == 1 and self._share_bytes(arrays) <= READ_AHEAD_BYTES
        self._seed = shuffle_seed
        self._strategy = strategy
        self._options = tf_data_options(threads)
        self._arrays = self._hold(arrays)

    def _hold(self, arrays: Arrays) -> Any:
        return copy_to_replicas(self._strategy, arrays)

    def _share_bytes(self, arrays: Arrays) -> int:
        """The size of one replica's share of a global batch."""
        return self.batching.share * (arrays.inputs.nbytes + arrays.targets.nbytes) // len(arrays)

    def reorder(self, seed: int) -> ArrayFeed:
        """The same examples in the order of another seed; what is in memory is there once."""
        other = copy.copy(self)
        other._seed = seed
        return other

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
        arrays = self._on_host()

        def batch(place: tf.Tensor) -> Any:
            epoch, step = place // steps_per_epoch, place % steps_per_epoch
            return self._gather(arrays, epoch, step * self.batching.global_size, self.batching.global_size)

        dataset = tf.data.Dataset.range(epochs * steps_per_epoch)
        batches = dataset.map(batch, num_parallel_calls=tf.data.AUTOTUNE)
        return batches.prefetch(tf.data.AUTOTUNE).with_options(self._options)

    def _on_host(self) -> Any:
        """The arrays in the host's memory."""
        with tf.device("CPU"):
            return tuple(tf.identity(self._strategy.experimental_local_results(each)[0]) for each in self._arrays)

    def _gather(
        self, arrays: Any, epoch: tf.Tensor, first: tf.Tensor, size: int
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The examples at `size` places of an epoch's order from `first` on: (inputs, targets, mask)."""
        position = first + tf.range(size, dtype=tf.int64)
        mask = tf.ones([size])
        if self.examples % self.batching.global_size:  # there is a partial batch
            mask = tf.cast(position < self.examples, tf.float32)
        position %= self.examples  # the padding, and what is read ahead: the first ones of the epoch once more
        if self._seed is not None:
            position = shuffle_position(position, self._seed, epoch, self.examples)
        return *self._take(arrays, position), mask

    def _take(self, arrays: Any, position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        inputs, targets = arrays
        return tf.gather(inputs, position), tf.gather(targets, position)


class HostArrayFeed(ArrayFeed):
    """The same batches, put together on the host.

    For a TPU, since XLA, which compiles its step, knows no `index_shuffle`, and for arrays that are too large for a
    device's memory.

    An element is one replica's share of one global batch: (inputs, targets, mask).
    """

    def __init__(
        self,
        arrays: Arrays,
        batching: Batching,
        strategy: tf.distribute.Strategy,
        shuffle_seed: int | None,
        threads: int | None = None,
    ) -> None:
        super().__init__(arrays, batching, strategy, shuffle_seed, threads)
        self.ahead = False  # tf.data reads ahead itself

    def _hold(self, arrays: Arrays) -> Any:
        with tf.device("CPU:0"):
            return tf.constant(arrays.inputs), tf.constant(arrays.targets)

    def open(self, epoch: int, step: int) -> Any:
        """A distributed iterator over the rest of the epoch."""
        replicas, share = self.batching.replicas, self.batching.share
        numbers = tf.data.Dataset.range(step * replicas, self.batching.steps(self.examples) * replicas)
        this_epoch = tf.constant(epoch, tf.int64)

        def share_at(number: tf.Tensor) -> Any:
            return self._gather(self._arrays, this_epoch, number * share, share)

        def make_worker_dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
            mine = worker_positions(1, context)
            own = numbers if mine is None else numbers.filter(mine)
            shares = own.map(share_at, num_parallel_calls=tf.data.AUTOTUNE)
            return shares.prefetch(tf.data.AUTOTUNE).with_options(self._options)

        return iter(self._strategy.distribute_datasets_from_function(make_worker_dataset))

    def fetch(self, opened: Any) -> Any:
        return next(opened)

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return slice_micro_batch(fetched, self.batching.batch_size, index)


class FileFeed(HostArrayFeed):
    """The same batches from arrays in a file, of which memory holds what is being read."""

    def _hold(self, arrays: Arrays) -> Any:
        return arrays

    def _on_host(self) -> Any:
        return self._arrays

    def _take(self, arrays: Any, position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        both = (arrays.inputs, arrays.targets)
        taken = tf.numpy_function(
            lambda places: tuple(np.asarray(array[places]) for array in both),
            [position],
            [array.dtype for array in both],
            stateful=False,
        )
        inputs, targets = (
            tf.ensure_shape(t, [*position.shape, *a.shape[1:]]) for t, a in zip(taken, both, strict=True)
        )
        return inputs, targets


def check_static_shapes(examples: Examples, transform: Transform | None = None) -> None:
    """Refuses what a TPU can't take: text, and shapes that differ from one example to the next."""
    if isinstance(examples, Stream):
        specs = [(spec.dtype, spec.shape) for spec in batch_spec(examples, transform)]
    else:
        arrays = (examples.inputs, examples.targets)
        specs = [(tf.as_dtype(array.dtype), tf.TensorShape(array.shape[1:])) for array in arrays]
    for name, (dtype, shape) in zip(("inputs", "targets"), specs, strict=False):
        if dtype == tf.string or not shape.is_fully_defined():
            found = "are text" if dtype == tf.string else f"have the shape {shape}"
            raise ConfigError(
                f"strategy=tpu with a dataset whose {name} {found}: a TPU takes numbers of one shape that is known "
                "beforehand; make them so in the dataset, or use strategy=mirrored"
            )


def copy_to_replicas(strategy: tf.distribute.Strategy, arrays: Arrays) -> Any:
    """(inputs, targets) as constants on each replica's device."""
    devices = replica_devices(strategy)  # this worker's; the replicas are numbered over all of them

    def place(array: np.ndarray[Any, Any]) -> Any:
        def value(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
            with tf.device(devices[context.replica_id_in_sync_group % len(devices)]):
                return tf.constant(array)

        return strategy.experimental_distribute_values_from_function(value)

    return place(arrays.inputs), place(arrays.targets)


def replica_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """The devices of this worker's replicas; for the default strategy TensorFlow's choice, the first."""
    try:
        return tuple(strategy.extended.worker_devices)
    except RuntimeError:  # the default strategy has none
        return ("",)


class StreamFeed:
    """Examples that are read as they come, batched and padded by tf.data.

    An element is one replica's share of one global batch: (inputs, targets, mask).

    Args:
        stream: what is read.
        batching: how a global batch is divided.
        strategy: whose replicas read.
        shuffle_seed: reshuffles every epoch; None keeps the order.
        transform: the preprocessing of its inputs.
        buffer, threads: `dataset.shuffle` and `dataset.threads`.
    """

    def __init__(
        self,
        stream: Stream,
        batching: Batching,
        strategy: tf.distribute.Strategy,
        shuffle_seed: int | None,
        transform: Transform | None = None,
        buffer: int | None = None,
        threads: int | None = None,
    ) -> None:
        self.examples = len(stream)
        self.batching = batching
        self.ahead = False  # tf.data reads ahead itself
        self._stream = stream
        self._buffer = buffer
        self._order = ShuffledOrder(stream, shuffle_seed, buffer)
        self._strategy = strategy
        self._transform = transform
        self._options = tf_data_options(threads)

    def reorder(self, seed: int) -> StreamFeed:
        """The same examples in the order of another seed."""
        other = copy.copy(self)
        other._order = ShuffledOrder(self._stream, seed, self._buffer)
        return other

    def open(self, epoch: int, step: int) -> Any:
        """A distributed iterator over the rest of the epoch."""
        size, share, replicas = self.batching.global_size, self.batching.share, self.batching.replicas
        steps = self.batching.steps(self.examples)
        numbers = tf.data.Dataset.range(step * replicas, steps * replicas)

        def make_worker_dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
            is_mine = worker_positions(1, context)
            own = numbers if is_mine is None else numbers.filter(is_mine)
            examples = self._order.examples(epoch, step * size, steps * size, worker_positions(share, context))
            return self._shares(examples, own, share).prefetch(tf.data.AUTOTUNE).with_options(self._options)

        return iter(self._strategy.distribute_datasets_from_function(make_worker_dataset))

    def batches(self, epochs: int, steps_per_epoch: int) -> tf.data.Dataset:
        size, steps = self.batching.global_size, self.batching.steps(self.examples)

        def batches_of(epoch: tf.Tensor) -> tf.data.Dataset:
            examples = self._order.examples(epoch, 0, steps * size)
            return self._shares(examples, tf.data.Dataset.range(steps), size).take(steps_per_epoch)

        dataset = tf.data.Dataset.range(epochs).flat_map(batches_of)
        return dataset.prefetch(tf.data.AUTOTUNE).with_options(self._options)

    def _shares(self, examples: tf.data.Dataset, numbers: tf.data.Dataset, share: int) -> tf.data.Dataset:
        """Batches of `share` examples with their mask, which is 0 for padding.

        The padding repeats real examples: one of zeros could make a model's loss NaN, and NaN x 0 is NaN.

        Args:
            examples: padded to whole batches.
            numbers: the place of each batch among all batches of the epoch.
            share: examples in a batch.
        """

        def masked(batch: Any, number: tf.Tensor) -> Any:
            is_real = number * share + tf.range(share, dtype=tf.int64) < self.examples
            return *batch, tf.cast(is_real, tf.float32)

        batches = preprocess_batches(examples.batch(share, drop_remainder=True), self._transform)
        both = tf.data.Dataset.zip(batches, numbers)
        return both.map(masked, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def fetch(self, opened: Any) -> Any:
        return next(opened)

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return slice_micro_batch(fetched, self.batching.batch_size, index)


def slice_micro_batch(fetched: Any, size: int, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """One micro-batch of a replica's share: (inputs, targets, mask)."""

    def part(tensor: tf.Tensor) -> tf.Tensor:
        rest = tensor.shape[1:]  # of a `tensor[first : first + size]` in a loop XLA does not see that its size is fixed
        return tf.slice(tensor, [index * size, *[0] * rest.rank], [size, *(-1 if n is None else n for n in rest)])

    inputs, targets, mask = (part(tensor) for tensor in fetched)
    return inputs, targets, mask


def tf_data_options(threads: int | None) -> tf.data.Options:
    """How tf.data works: in an order that is always the same, with so many threads of its own."""
    chosen = tf.data.Options()
    chosen.deterministic = True
    if threads is not None:
        chosen.threading.private_threadpool_size = threads
    return chosen


def worker_positions(share: int, context: tf.distribute.InputContext) -> Mine | None:
    """Which places of an epoch's order are those of one worker's replicas; None where it is alone."""
    workers, worker = context.num_input_pipelines, context.input_pipeline_id
    local = context.num_replicas_in_sync // workers
    return None if workers == 1 else lambda place: (place // (share * local)) % workers == worker
