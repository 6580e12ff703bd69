"""Feeds of a coordinator, whose workers take batches in any order and at any time.

From memory, every worker holds the arrays and is told positions; of a stream, which only the coordinator
reads, it is sent the batches themselves. So every example is used once an epoch, whichever worker takes it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from scaleflow.dataset.feeds import ArrayFeed, FileFeed, StreamFeed, slice_micro_batch
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Batching

#: Protocol Buffers' limit, less what else is in the message that takes the arrays to a worker.
LARGEST_BYTES = (2 << 30) - (16 << 20)


class ParameterServerArrayFeed(ArrayFeed):
    """Arrays that each worker holds, also one that is started again."""

    def __init__(
        self,
        arrays: Arrays,
        batching: Batching,
        strategy: tf.distribute.Strategy,
        shuffle_seed: int | None,
        threads: int | None = None,
    ) -> None:
        size = arrays.inputs.nbytes + arrays.targets.nbytes
        if size > LARGEST_BYTES:
            raise ConfigError(
                f"strategy=parameter_server: the training split's {size / 2**30:.1f} GiB in memory are more than the "
                "2 GiB a worker can be sent at once; use dataset.limit, a dataset that streams, or another strategy"
            )
        super().__init__(arrays, batching, strategy, shuffle_seed, threads)
        self.ahead = False  # the variables come over the network: what there is to gain is little

    def _hold(self, arrays: Arrays) -> Any:
        """An iterator on each worker that gives (inputs, targets), whole and without a copy, every time."""

        def whole() -> tf.data.Dataset:
            return tf.data.Dataset.from_tensors((tf.constant(arrays.inputs), tf.constant(arrays.targets))).repeat()

        coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        return iter(coordinator.create_per_worker_dataset(whole))

    def fetch(self, opened: Any) -> Any:
        return next(opened)

    def worker_argument(self, opened: Any, first: int, steps: int) -> Any:
        return opened


class ParameterServerFeed:
    """Batches that the coordinator reads: each portion of steps is sent its own."""

    batching: Batching

    def worker_argument(self, opened: Any, first: int, steps: int) -> Any:
        """(the first step, inputs [steps, share, ...], targets, mask); of no steps, one that is not used."""
        elements = [next(opened) for _ in range(max(1, steps))]
        return tf.constant(first, tf.int64), *(tf.stack(tensors) for tensors in zip(*elements, strict=True))

    def fetch(self, opened: Any) -> Any:
        return opened

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        first, *tensors = fetched
        return slice_micro_batch([t[step - first] for t in tensors], self.batching.batch_size, index)


class ParameterServerStreamFeed(ParameterServerFeed, StreamFeed):
    """A stream that the coordinator reads."""


class ParameterServerFileFeed(ParameterServerFeed, FileFeed):
    """Arrays in a file that the coordinator reads."""
