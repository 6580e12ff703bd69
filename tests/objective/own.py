"""Losses and metrics of a user, right and wrong ones."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


def margin(targets: Any, outputs: Any, least: float = 1.0) -> Any:
    """How much the true class's logit lacks to be `least` above the mean of all."""
    true = tf.gather(outputs, targets, batch_dims=1)
    return tf.nn.relu(least - true + tf.reduce_mean(outputs, axis=-1))


class Quartic(keras.losses.Loss):  # type: ignore[misc]  # keras has no types
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean((y_true - y_pred) ** 4, axis=-1)


class FocalOfLogits(keras.losses.BinaryFocalCrossentropy):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(from_logits=True)


def whole_batch(targets: Any, outputs: Any) -> Any:
    return tf.reduce_mean(tf.square(targets - outputs))


def relative_to_batch(targets: Any, outputs: Any) -> Any:
    return tf.reduce_mean(tf.square(outputs - tf.reduce_mean(outputs, axis=0)), axis=-1)


def broken(targets: Any, outputs: Any) -> Any:
    raise ValueError("no such thing")


class MeanMargin(keras.metrics.Mean):  # type: ignore[misc]
    """The mean of how far the probability of the true class is above 1/2."""

    def __init__(self, name: str = "mean_margin") -> None:
        super().__init__(name=name)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(tf.gather(y_pred, y_true, batch_dims=1) - 0.5, sample_weight)


class Extremes(keras.metrics.Metric):  # type: ignore[misc]
    """Several results at once: the mean of the smallest and of the largest output."""

    def __init__(self) -> None:
        super().__init__(name="extremes")
        self.sums = self.add_variable((3,), "zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        ones = tf.ones_like(y_pred[:, 0])
        parts = [tf.reduce_min(y_pred, axis=1), tf.reduce_max(y_pred, axis=1), ones]
        self.sums.assign_add(
            [tf.reduce_sum(part * (sample_weight if sample_weight is not None else 1)) for part in parts]
        )

    def result(self) -> dict[str, Any]:
        return {"least": self.sums[0] / self.sums[2], "most": self.sums[1] / self.sums[2]}


class OnlyLargest(keras.metrics.F1Score):  # type: ignore[misc]  # keras has no types
    """Takes no threshold, so it predicts the largest output."""

    def __init__(self) -> None:
        super().__init__(name="only_largest")


class Largest(keras.metrics.Metric):  # type: ignore[misc]
    """Its state is no sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(tf.maximum(self.value, tf.reduce_max(y_pred)))

    def result(self) -> Any:
        return self.value


class Unweighted(keras.metrics.Mean):  # type: ignore[misc]
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(tf.reduce_max(y_pred, axis=-1))


class WithoutWeights(keras.metrics.Mean):  # type: ignore[misc]
    def update_state(self, y_true: Any, y_pred: Any) -> None:
        super().update_state(tf.reduce_max(y_pred, axis=-1))


class Square(keras.metrics.MeanIoU):  # type: ignore[misc]
    def result(self) -> Any:
        return tf.cast(self.total_cm, tf.float32)
