"""What every worker has to decide alike, though each has measured something else."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf


class WorkerSync:
    """Makes one of the workers' durations and stop signals.

    The steps of the next call follow from the last call's duration, and a stop ends the loop: workers
    that decided for themselves would wait for each other in different collectives, for ever.

    Args:
        strategy: whose workers agree.
        workers: how many there are.
        should_stop: whether this one was.
    """

    def __init__(self, strategy: tf.distribute.Strategy, workers: int, should_stop: Callable[[], bool]) -> None:
        self._strategy = strategy
        self._workers = workers
        self._told_to_stop = should_stop

    def __call__(self, seconds: float) -> tuple[float, bool]:
        """Gives (the mean duration, whether any worker was told to stop); all workers have to call it."""
        stop = self._told_to_stop()
        if self._workers == 1:
            return seconds, stop
        mean, told = self._sum(tf.constant([seconds, float(stop)])).numpy() / self._strategy.num_replicas_in_sync
        return float(mean), told > 0

    def any(self, said: bool) -> bool:
        """Whether any worker says so; all have to call it."""
        return said if self._workers == 1 else float(self._sum(tf.constant(float(said)))) > 0

    def is_same(self, text: str) -> bool:
        """Whether every worker gave the same text; all have to call it, and all get the same answer."""
        if self._workers == 1:
            return True
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        replicas = self._strategy.num_replicas_in_sync
        differs = int(self._sum(tf.constant(number, tf.int64))) != number * replicas
        return int(self._sum(tf.constant(differs, tf.int64))) == 0  # the mean may equal one of them

    def all(self, found: bool) -> bool:
        """Whether every worker has found so; all have to call it."""
        if self._workers == 1:
            return found
        return int(self._sum(tf.constant(int(not found), tf.int64))) == 0

    def from_chief(self, make: Callable[[], str]) -> str:
        """The text that the chief makes, on every worker; all have to call it, the others wait."""
        if self._workers == 1:
            return make()
        own = make().encode() if self._strategy.extended.should_save_summary else b""
        local = self._strategy.num_replicas_in_sync // self._workers
        length = int(self._sum(tf.constant(len(own), tf.int64))) // local
        numbers = np.zeros(length, np.float32)  # a byte to a number: what is summed over each device's replica is exact
        numbers[: len(own)] = np.frombuffer(own, np.uint8)
        summed = self._sum(tf.constant(numbers)).numpy() / local
        return bytes(summed.astype(np.uint8)).decode()

    def leave(self) -> None:
        """Leaves the others; all have to call it, as their last word.

        Who leaves right behind a collective may take the last part of its result away from a slower
        worker. Who has passed this one knows that every worker has the result of the one before, and
        it does not matter whether this one itself reaches them all.
        """
        with contextlib.suppress(tf.errors.OpError):
            self(0.0)

    @tf.function(autograph=False, reduce_retracing=True)
    def _sum(self, values: tf.Tensor) -> tf.Tensor:
        each = self._strategy.run(tf.identity, args=(values,))
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, each, axis=None)
