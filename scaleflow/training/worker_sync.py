"""Decisions that all workers must make alike, from values that differ between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf

#: Bytes that `WorkerSync.gather` sends at once.
GATHERED = 1 << 22


class WorkerSync:
    """Combines the workers' durations and stop signals. All workers must make the same calls, in the same order.

    The next call's number of steps depends on the last call's duration, and a stop ends the loop. Workers that decide
    alone would wait for each other in different collectives forever.

    Args:
        strategy: the strategy of the workers.
        workers: the number of workers.
        should_stop: returns whether this worker received a stop signal.
    """

    def __init__(self, strategy: tf.distribute.Strategy, workers: int, should_stop: Callable[[], bool]) -> None:
        self._strategy = strategy
        self._workers = workers
        self._should_stop = should_stop

    def __call__(self, seconds: float) -> tuple[float, bool]:
        """Returns (the mean duration in seconds, whether any worker received a stop signal)."""
        stop = self._should_stop()
        if self._workers == 1:
            return seconds, stop
        mean, stops = self._sum(tf.constant([seconds, float(stop)])).numpy() / self._strategy.num_replicas_in_sync
        return float(mean), stops > 0

    def any(self, found: bool) -> bool:
        """Returns whether the argument is true on any worker."""
        return not self.all(not found)

    def is_same(self, text: str) -> bool:
        """Returns whether all workers gave the same text; all get the same answer."""
        return self.all(self.from_chief(lambda: text) == text)

    def all(self, found: bool) -> bool:
        """Returns whether the argument is true on all workers."""
        if self._workers == 1:
            return found
        return int(self._sum(tf.constant(int(not found), tf.int64))) == 0

    def from_chief(self, make: Callable[[], str]) -> str:
        """Returns the text that the chief makes, on every worker."""
        if self._workers == 1:
            return make()
        data = make().encode() if self._strategy.extended.should_save_summary else b""
        local_replicas = self._strategy.num_replicas_in_sync // self._workers
        length = int(self._sum(tf.constant(len(data), tf.int64))) // local_replicas
        if not length:  # three workers that sum an empty tensor crash
            return ""
        numbers = np.zeros(length, np.float32)  # one byte per number, so that sums over the replicas are exact
        numbers[: len(data)] = np.frombuffer(data, np.uint8)
        summed = self._sum(tf.constant(numbers)).numpy() / local_replicas
        return bytes(summed.astype(np.uint8)).decode()

    def gather(self, content: bytes, worker: int) -> list[bytes]:
        """Returns what each worker gave, on worker 0, the chief; an empty list on the others.

        `worker` is the number of this one. All sum bytes of one worker at a time, in place of which the others have
        zeros, in pieces of `GATHERED`, so that little memory is needed.
        """
        if self._workers == 1:
            return [content]
        local_replicas = self._strategy.num_replicas_in_sync // self._workers
        sizes = np.zeros(self._workers, np.int64)
        sizes[worker] = len(content)
        sizes = self._sum(tf.constant(sizes)).numpy() // local_replicas
        gathered: list[bytes] = []
        for owner, size in enumerate(map(int, sizes)):
            parts = []
            for first in range(0, size, GATHERED):
                numbers = np.zeros(min(GATHERED, size - first), np.float32)  # one byte each, so that sums are exact
                if worker == owner:
                    numbers[:] = np.frombuffer(content, np.uint8, len(numbers), first)
                parts.append((self._sum(tf.constant(numbers)).numpy() / local_replicas).astype(np.uint8).tobytes())
            gathered += [] if worker else [b"".join(parts)]
        return gathered

    def leave(self) -> None:
        """Makes it safe for the process to end; the last call of all workers.

        A worker that ends right after a collective may cut off a slower worker's result of it. After this call, every
        worker has the result of the collective before. Its own result may be lost, so errors are ignored.
        """
        with contextlib.suppress(tf.errors.OpError):
            self(0.0)

    @tf.function(autograph=False, reduce_retracing=True)
    def _sum(self, values: tf.Tensor) -> tf.Tensor:
        each = self._strategy.run(tf.identity, args=(values,))
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, each, axis=None)
