"""What the tests of feeds share: a process with some replicas, and what a feed gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from scaleflow.interfaces import Arrays, Feed, Hardware

if TYPE_CHECKING:
    import tensorflow as tf

#: Of one global batch: the examples that are not masked, in order, and how many places there were.
Batch = tuple[list[int], int]


def numbered(count: int) -> Arrays:
    """Examples that can be told apart: number i has the input [i, -i] and the target i."""
    numbers = np.arange(count, dtype=np.int32)
    return Arrays(np.stack([numbers, -numbers], axis=1).astype(np.float32), numbers)


def as_stream(arrays: Arrays) -> tf.data.Dataset:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((arrays.inputs, arrays.targets))


def spread_over(replicas: int) -> tf.distribute.Strategy:
    from scaleflow import hardware, strategy

    devices = hardware.configure_devices(Hardware(name="cpu", logical_devices=replicas))
    return strategy.create_strategy("mirrored" if replicas > 1 else "one_device", devices.names)[0]


def reader(strategy: tf.distribute.Strategy, feed: Feed, padding: bool = False) -> Callable[..., list[Batch]]:
    """`read(epoch, first=0)`: the global batches of an epoch from a step on, through one compiled function.

    With `padding` the examples that are masked, instead of the others.
    """
    import tensorflow as tf

    def in_replica(fetched: Any, epoch: tf.Tensor, step: tf.Tensor) -> Any:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        micro = [
            feed.micro_batch(fetched, epoch, step, replica, tf.constant(index, tf.int64))
            for index in range(feed.batching.accumulate)
        ]
        return tuple(tf.concat(parts, axis=0) for parts in zip(*micro, strict=True))

    @tf.function
    def global_batch(opened: Any, epoch: tf.Tensor, step: tf.Tensor) -> Any:
        return strategy.run(in_replica, args=(feed.fetch(opened), epoch, step))

    def read(epoch: int, first: int = 0) -> list[Batch]:
        opened = feed.open(epoch, first)
        steps = range(first, feed.batching.steps(feed.examples))
        return [real_examples(global_batch(opened, *tf.constant([epoch, step], tf.int64))) for step in steps]

    def real_examples(parts: Any) -> Batch:
        inputs, targets, mask = (
            np.concatenate([np.asarray(value) for value in strategy.experimental_local_results(part)]) for part in parts
        )
        real = mask == (0 if padding else 1)
        assert set(np.unique(mask)) <= {0.0, 1.0}
        np.testing.assert_array_equal(inputs[real][:, 0], targets[real])
        np.testing.assert_array_equal(inputs[real][:, 1], -targets[real])
        return [int(number) for number in targets[real]], len(mask)

    return read
