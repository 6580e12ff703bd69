"""The compiled evaluation of a split, every example once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from scaleflow.interfaces import Feed, Objective
from scaleflow.training.repeat import repeat
from scaleflow.training.tally import Tally


class Evaluation:
    """Evaluates one model under one strategy; compiled once for each split.

    Args:
        strategy: whose replicas work.
        forward: from inputs to outputs.
        objective: what is watched.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, forward: Callable[[tf.Tensor], tf.Tensor], objective: Objective
    ) -> None:
        self._strategy = strategy
        self._forward = forward
        self._loss = objective.loss
        self._tally = Tally(objective)
        self._functions: dict[int, Any] = {}

    def trace(self, feed: Feed) -> None:
        """Compiles for a feed without running anything."""
        count = tf.constant(0, tf.int64)
        self._function(feed).get_concrete_function(feed.open(0, 0), count)

    def __call__(self, feed: Feed) -> Mapping[str, float]:
        """The loss and metrics over a whole split."""
        steps = feed.batching.steps(feed.examples)
        sums = self._function(feed)(feed.open(0, 0), tf.constant(steps, tf.int64))
        return self._tally.means(sums.numpy(), feed.examples)

    def _function(self, feed: Feed) -> Any:
        if id(feed) not in self._functions:
            self._functions[id(feed)] = self._compile(feed)
        return self._functions[id(feed)]

    def _compile(self, feed: Feed) -> Any:
        @tf.function(autograph=False)
        def evaluate(opened: Any, steps: tf.Tensor) -> tf.Tensor:
            def batch(step: tf.Tensor, sums: tf.Tensor) -> Any:
                return (self._strategy.run(self._step, args=(feed, feed.fetch(opened), step, sums)),)

            start = self._strategy.run(lambda: tf.zeros([self._tally.size], tf.float64))
            (sums,) = repeat(batch, tf.constant(0, tf.int64), steps, (start,))
            return self._strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)

        return evaluate

    def _step(self, feed: Feed, fetched: Any, step: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
        """One batch, in a replica; gives what it carries on."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        first = tf.constant(0, tf.int64)
        inputs, targets, mask = feed.micro_batch(fetched, first, step, replica, first)
        outputs = self._forward(inputs)
        loss = tf.reduce_sum(self._loss(targets, outputs) * mask)
        return sums + tf.cast(self._tally.of(targets, outputs, loss, mask), sums.dtype)
