"""Sums of the loss and the metrics over examples, and the means computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.errors import RunError
from scaleflow.interfaces import Objective


class MetricSums:
    """Computes sums [count, loss, *metrics] over examples. Callers accumulate them in float64."""

    def __init__(self, objective: Objective) -> None:
        self._metrics = objective.metrics
        self._finish = objective.finish
        self.names = ("loss", *objective.metrics)

    @property
    def size(self) -> int:
        return 1 + len(self.names)

    def compute(self, targets: tf.Tensor, outputs: tf.Tensor, loss: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        """Computes one batch's sums [count, loss, *metrics], float32.

        Args:
            targets, outputs: [b, ...].
            loss: scalar, summed over the valid examples.
            mask: [b] float32, 1 for valid examples and 0 for padding.
        """
        values = (metric(targets, outputs) for metric in self._metrics.values())
        sums = [tf.reduce_sum(tf.cast(v, tf.float32) * mask) for v in values]
        return tf.stack([tf.reduce_sum(mask), loss, *sums])

    def means(self, sums: np.ndarray[Any, Any], expected: int) -> Mapping[str, float]:
        """Converts sums to means.

        Args:
            sums: [count, loss, *metrics].
            expected: the number of examples according to the dataset's source.

        Raises:
            RunError: if the count is not the expected number.
        """
        count = round(float(sums[0]))
        if count != expected:
            raise RunError(f"the dataset gave {count} examples where its source had promised {expected}")
        return self.finish({name: float(v / sums[0]) for name, v in zip(self.names, sums[1:], strict=True)})

    def finish(self, means: Mapping[str, Any]) -> dict[str, Any]:
        """Converts means (numbers or tensors) to the reported values."""
        return {**means, **{name: finish(means[name]) for name, finish in self._finish.items()}}
