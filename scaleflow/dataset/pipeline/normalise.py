"""Scales inputs to mean 0 and standard deviation 1 in each channel of the training split."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs
from scaleflow.interfaces.data import MOST_ROUNDING
from scaleflow.interfaces.data import ROUNDING as HALF_SPACING

#: A channel with a deviation of at most so much of its mean is a constant, which is not amplified.
ROUNDING = 1e-14


def can_be_normalised(inputs: Inputs) -> bool:
    """Returns whether an input of several is a quantity: floats, or raw values with a `scale`, such as images."""
    return inputs.dtype.startswith(("float", "bfloat")) or inputs.scale is not None


class Normalise:
    """Preprocesses numbers: (x - mean) / deviation, along the last axis.

    It is not an augmentation of the training split: validated, tested and served examples need it, too. So it is a
    part of the saved model.

    Args:
        inputs: raw numbers of any shape.

    Raises:
        ConfigError: for text.
    """

    def __init__(self, inputs: Inputs) -> None:
        if inputs.dtype == "string" or inputs.vocabulary is not None:
            raise ConfigError(
                "dataset.normalise=true: the dataset's inputs are text, which has no mean; remove dataset.normalise"
            )
        self._inputs = inputs

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> dict[str, list[float]]:
        """Returns the mean and the deviation of each channel, over all examples and positions."""
        channels = self._inputs.shape[-1] if self._inputs.shape else 1
        count, mean, squares = 0, np.zeros(channels), np.zeros(channels)
        for batch in batches:
            values = batch.reshape(-1, channels).astype(np.float64)
            batch_mean = values.mean(axis=0)
            delta, total = batch_mean - mean, count + len(values)
            mean = mean + delta * len(values) / total  # Chan, Golub and LeVeque 1979
            squares = squares + ((values - batch_mean) ** 2).sum(axis=0) + delta**2 * count * len(values) / total
            count = total
        deviation = np.sqrt(squares / max(count, 1))
        deviation = np.where(deviation > ROUNDING * np.abs(mean), deviation, 1.0)
        return {"mean": mean.tolist(), "deviation": deviation.tolist()}

    def features(self, learned: Any) -> Inputs:
        """Describes the features: the raw shape, float32, near [-1, 1]."""
        return Inputs(shape=self._inputs.shape, dtype="float32")

    def layer(self, learned: Any) -> keras.Layer:
        """Returns the layer raw inputs [b, ...] -> [b, ...] float32.

        It computes in float64 where float32 would round the inputs before their mean is subtracted.
        """
        mean, deviation = (np.reshape(learned[key], self._inputs.shape[-1:]) for key in ("mean", "deviation"))
        if np.all(np.abs(mean) * HALF_SPACING <= MOST_ROUNDING * deviation) and self._inputs.dtype != "float64":
            scale, offset = (1 / deviation).tolist(), (-mean / deviation).tolist()
            return keras.layers.Rescaling(scale, offset, dtype="float32", name="normalise")
        raw = keras.Input(self._inputs.shape, dtype=self._inputs.dtype)
        features = (keras.ops.cast(raw, "float64") - mean) / deviation
        return keras.Model(raw, keras.ops.cast(features, "float32"), name="normalise")
