"""From a split to its feed."""

from __future__ import annotations

import tensorflow as tf

from scaleflow.dataset.feeds import ArrayFeed, HostArrayFeed, StreamFeed, check_fixed
from scaleflow.dataset.scheduled import ScheduledArrays, ScheduledStream
from scaleflow.interfaces import Arrays, Batching, Examples, Feed


def feed(
    examples: Examples, batching: Batching, strategy: tf.distribute.Strategy, shuffle_seed: int | None = None
) -> Feed:
    """The feed of one split.

    Args:
        examples: the split.
        batching: how a global batch is divided.
        strategy: whose replicas read; a parameter server strategy's workers are sent portions by the coordinator.
        shuffle_seed: reshuffles every epoch; None keeps the order.

    Raises:
        Refusal: if the examples are of a kind, or too many, for the strategy.
    """
    if isinstance(strategy, tf.distribute.TPUStrategy):
        check_fixed(examples)
        if isinstance(examples, Arrays):
            return HostArrayFeed(examples, batching, strategy, shuffle_seed)
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        if isinstance(examples, Arrays):
            return ScheduledArrays(examples, batching, strategy, shuffle_seed)
        here = tf.distribute.get_strategy()  # it is this process that reads
        return ScheduledStream(examples, batching, here, shuffle_seed)
    if isinstance(examples, Arrays):
        return ArrayFeed(examples, batching, strategy, shuffle_seed)
    return StreamFeed(examples, batching, strategy, shuffle_seed)
