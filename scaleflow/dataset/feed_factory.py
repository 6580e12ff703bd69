"""From a split to its feed."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from scaleflow.dataset.cache import Transform
from scaleflow.dataset.feeds import ArrayFeed, FileFeed, HostArrayFeed, StreamFeed, check_static_shapes
from scaleflow.dataset.parameter_server_feeds import (
    ParameterServerArrayFeed,
    ParameterServerFileFeed,
    ParameterServerStreamFeed,
)
from scaleflow.interfaces import Arrays, Batching, Examples, Feed

#: The part of a device's memory up to which a split that is in memory is copied to each device.
DEVICE_SHARE = 0.25


def make_feed(
    examples: Examples,
    batching: Batching,
    strategy: tf.distribute.Strategy,
    shuffle_seed: int | None = None,
    *,
    transform: Transform | None = None,
    buffer: int | None = None,
    threads: int | None = None,
    device_bytes: float | None = None,
) -> Feed:
    """The feed of one split.

    Args:
        examples: the split.
        batching: how a global batch is divided.
        strategy: whose replicas read; a parameter server strategy's workers are sent portions by the coordinator.
        shuffle_seed: reshuffles every epoch; None keeps the order.
        transform: the preprocessing of a stream's inputs; that of arrays is done already.
        buffer, threads: `dataset.shuffle`, of a stream, and `dataset.threads`.
        device_bytes: the memory of the smallest device; None if it is the host's.

    Raises:
        ConfigError: if the examples are of a kind, or too many, for the strategy.
    """
    if isinstance(strategy, tf.distribute.TPUStrategy):
        check_static_shapes(examples, transform)
    if isinstance(examples, Arrays):
        return make_array_feed(examples, batching, strategy, shuffle_seed, threads, device_bytes)
    chosen = (shuffle_seed, transform, buffer, threads)
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        here = tf.distribute.get_strategy()  # it is this process that reads
        return ParameterServerStreamFeed(examples, batching, here, *chosen)
    return StreamFeed(examples, batching, strategy, *chosen)


def make_array_feed(
    arrays: Arrays,
    batching: Batching,
    strategy: tf.distribute.Strategy,
    shuffle_seed: int | None,
    threads: int | None,
    device_bytes: float | None,
) -> Feed:
    """The feed of a split in memory, or in a file."""
    size = arrays.inputs.nbytes + arrays.targets.nbytes
    has_room = device_bytes is None or size <= device_bytes * DEVICE_SHARE
    is_file = isinstance(arrays.inputs, np.memmap)
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        if is_file:
            return ParameterServerFileFeed(arrays, batching, tf.distribute.get_strategy(), shuffle_seed, threads)
        return ParameterServerArrayFeed(arrays, batching, strategy, shuffle_seed)
    if is_file:
        return FileFeed(arrays, batching, strategy, shuffle_seed, threads)
    if isinstance(strategy, tf.distribute.TPUStrategy) or not has_room:
        return HostArrayFeed(arrays, batching, strategy, shuffle_seed, threads)
    return ArrayFeed(arrays, batching, strategy, shuffle_seed, threads)
