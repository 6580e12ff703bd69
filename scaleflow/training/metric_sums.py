"""Sums of the loss and the metrics over examples, and the values computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.errors import RunError
from scaleflow.interfaces import Objective

#: The name of what the model adds to the loss of its outputs, among the values of training.
EXTRA = "extra_loss"


class MetricSums:
    """Computes sums [count, loss, *measures] over examples, the weight if there are weights, and the extra loss.

    Callers accumulate them in float64. The extra loss is what the model adds to the loss of its outputs (regularizers,
    `add_loss`). It is reported, and is a part of the reported loss, if the model that was traced adds any.

    Args:
        objective: the loss and the measures.
        evaluates: whether they are for evaluations, which have more measures.
    """

    def __init__(self, objective: Objective, evaluates: bool = False) -> None:
        self._loss = objective.reported_loss or objective.loss
        self._recomputes_loss = objective.reported_loss is not None
        self._measures = (*objective.measures, *(objective.evaluation_measures if evaluates else ()))
        self._is_weighted = objective.is_weighted
        self.names = ("loss", *(name for measure in self._measures for name in measure.names))
        self.size = 3 + sum(measure.size for measure in self._measures) + self._is_weighted
        self._has_extra = False
        #: Plain sums of a batch are exact enough in float32.
        self.dtype = tf.float64 if any(measure.size > 1 for measure in self._measures) else tf.float32

    def compute(
        self,
        targets: Any,
        outputs: Any,
        loss: tf.Tensor | None,
        mask: tf.Tensor,
        weights: tf.Tensor | None = None,
        extra: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Computes one batch's sums [size] of `dtype`.

        Args:
            targets, outputs: tensors [b, ...], or dicts of them.
            loss: the minimised loss, scalar, summed over the valid examples, times their weights if there are any;
                None if it is not known. What is reported is computed from it if it is the same.
            mask: [b] float32, 1 for valid examples and 0 for padding.
            weights: [b] float32, the weights of the examples, 0 for padding; None: 1 for each valid example.
            extra: the extra loss times the number of valid examples of the global batch, this batch's part of it.
        """
        self._has_extra |= extra is not None
        weights = mask if weights is None else weights
        if loss is None or self._recomputes_loss:
            loss = tf.reduce_sum(self._loss(targets, outputs) * weights)
        sums = [measure.sums(targets, outputs, weights) for measure in self._measures]
        sums = [tf.reduce_sum(mask), loss, *sums, *([tf.reduce_sum(weights)] if self._is_weighted else [])]
        sums.append(tf.zeros([]) if extra is None else extra)
        if self.dtype == tf.float32:
            return tf.stack(sums)
        return tf.concat([tf.reshape(tf.cast(each, self.dtype), [-1]) for each in sums], axis=0)

    def means(self, sums: np.ndarray[Any, Any], expected: int) -> Mapping[str, float]:
        """Converts sums to the reported values.

        Args:
            sums: [size].
            expected: the number of examples according to the dataset's source.

        Raises:
            RunError: if the count is not the expected number.
        """
        count = round(float(sums[0]))
        if count != expected:
            raise RunError(f"the dataset yielded {count} examples, but its source promised {expected}")
        total = self._total(sums)
        values = [self.compute_mean_loss(sums)]
        first = 2
        for measure in self._measures:
            values.extend(measure.finish(sums[first : first + measure.size], total))
            first += measure.size
        extra = {EXTRA: float(sums[-1]) / count} if self._has_extra and count else {}
        return {**dict(zip(self.names, values, strict=True)), **extra}

    def compute_mean_loss(self, sums: np.ndarray[Any, Any]) -> float:
        """Returns the mean loss of the examples of sums [size]; NaN if there are none."""
        total = self._total(sums)
        return float(sums[1]) / total + float(sums[-1] / sums[0]) if total else float("nan")

    def restore(self, sums: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns a copy of saved sums. Those of earlier versions have no extra loss."""
        return np.concatenate([sums, np.zeros(self.size - len(sums))])

    def _total(self, sums: np.ndarray[Any, Any]) -> float:
        """Returns the sum of the examples' weights."""
        return float(sums[-2] if self._is_weighted else sums[0])
