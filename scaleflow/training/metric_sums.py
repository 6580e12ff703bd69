"""What is summed over examples, and the means that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.errors import RunError
from scaleflow.interfaces import Objective


class MetricSums:
    """Sums [count, loss, *metrics] over examples, float64 where they are carried on."""

    def __init__(self, objective: Objective) -> None:
        self._metrics = objective.metrics
        self._finish = objective.finish
        self.names = ("loss", *objective.metrics)

    @property
    def size(self) -> int:
        return 1 + len(self.names)

    def compute(self, targets: tf.Tensor, outputs: tf.Tensor, loss: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        """One batch's sums, float32.

        Args:
            targets, outputs: [b, ...].
            loss: the sum over the examples that count.
            mask: [b] float32, 1 for those.
        """
        values = (metric(targets, outputs) for metric in self._metrics.values())
        sums = [tf.reduce_sum(tf.cast(v, tf.float32) * mask) for v in values]
        return tf.stack([tf.reduce_sum(mask), loss, *sums])

    def means(self, sums: np.ndarray[Any, Any], expected: int) -> Mapping[str, float]:
        """Sums as means, once they are seen to hold as many examples as the source had promised."""
        found = round(float(sums[0]))
        if found != expected:
            raise RunError(f"the dataset gave {found} examples where its source had promised {expected}")
        return self.finish({name: float(v / sums[0]) for name, v in zip(self.names, sums[1:], strict=True)})

    def finish(self, means: Mapping[str, Any]) -> dict[str, Any]:
        """Means, numbers or tensors, as the values that are told."""
        return {**means, **{name: finish(means[name]) for name, finish in self._finish.items()}}
