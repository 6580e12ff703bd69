"""Metrics of language models, computed from the mean cross-entropy of a token."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops


class Perplexity(keras.metrics.SparseCategoricalCrossentropy):  # type: ignore[misc]  # keras has no types
    """exp(mean cross-entropy): the number of equally likely tokens that would be as hard to guess.

    Args:
        name: the name of the metric.
        from_logits: whether outputs are logits, not probabilities.
    """

    def __init__(self, name: str = "perplexity", from_logits: bool = False) -> None:
        super().__init__(name=name, from_logits=from_logits)

    def result(self) -> Any:
        return ops.exp(super().result())


class BitsPerToken(keras.metrics.SparseCategoricalCrossentropy):  # type: ignore[misc]  # keras has no types
    """Mean cross-entropy in bits. If tokens are bytes, it is in bits per byte.

    Args:
        name: the name of the metric.
        from_logits: whether outputs are logits, not probabilities.
    """

    def __init__(self, name: str = "bits_per_token", from_logits: bool = False) -> None:
        super().__init__(name=name, from_logits=from_logits)

    def result(self) -> Any:
        return super().result() / math.log(2)
