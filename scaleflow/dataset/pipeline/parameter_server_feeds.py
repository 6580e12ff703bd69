"""Feeds for a parameter server coordinator, whose workers take batches in any order and at any time.

Arrays in memory are copied to each worker, which then receives only positions. Streams and memory-mapped arrays are
read by the coordinator, which sends the batches. So each example is used once per epoch, whichever worker takes it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from scaleflow.dataset.pipeline.feeds import ArrayFeed, BlockFeed, FileFeed, StreamFeed, slice_micro_batch
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Batching

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
            return tf.data.Dataset.from_tensors(tf.nest.map_structure(tf.constant, arrays.parts)).repeat()

        coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        return iter(coordinator.create_per_worker_dataset(whole))

    def fetch(self, opened: Any) -> Any:
        return next(opened)

    def worker_argument(self, opened: Any, first: int, steps: int) -> Any:
        return opened


class ParameterServerFeed:
    """The coordinator reads the batches, and sends each worker those of its steps."""

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
