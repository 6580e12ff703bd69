"""Feeds for a parameter server coordinator, whose workers take batches in any order and at any time.

Arrays in memory are copied to each worker, which then receives only positions. Streams and memory-mapped arrays are
read by the coordinator, which sends the batches. So each example is used once per epoch, whichever worker takes it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from scaleflow.dataset.feeds import ArrayFeed, FileFeed, StreamFeed, slice_micro_batch
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Batching

#: Protocol Buffers' limit, less room for the rest of the message that sends the arrays to a worker.
LARGEST_BYTES = (2 << 30) - (16 << 20)


class ParameterServerArrayFeed(ArrayFeed):
    """Arrays that each worker holds, also after a restart."""

    _can_read_ahead = False  # little to gain: the variables come over the network

    def _hold(self, arrays: Arrays) -> Any:
        """Returns an iterator per worker that always yields the whole (inputs, targets), without a copy."""
        size = arrays.inputs.nbytes + arrays.targets.nbytes
        if size > LARGEST_BYTES:
            raise ConfigError(
                f"strategy=parameter_server: the training split's {size / 2**30:.1f} GiB in memory are more than the "
                "2 GiB a worker can be sent at once; use dataset.limit, a dataset that streams, or another strategy"
            )

        def whole() -> tf.data.Dataset:
            return tf.data.Dataset.from_tensors((tf.constant(arrays.inputs), tf.constant(arrays.targets))).repeat()

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
        """Returns (first step, inputs [steps, share, ...], targets, mask); for 0 steps, one step that is not used."""
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
    """Memory-mapped arrays that the coordinator reads."""
