"""Examples of row numbers for an embedding, and optimizers that update all rows of it."""

from __future__ import annotations

import keras
import numpy as np

from scaleflow.interfaces import Arrays, Inputs, Outputs
from scaleflow.optimizer.lazy_adam import LazyAdam


class Ids:
    """Row numbers, of which the low ones are frequent: every batch has many of them several times.

    Args:
        rows: of the table.
        tokens: row numbers of an example.
        examples: of the training split; the test split has a quarter as many.
    """

    splits = ("train", "test")

    def __init__(self, rows: int = 4000, tokens: int = 4, examples: int = 256) -> None:
        self.inputs = Inputs((tokens,), "int32", vocabulary=rows)
        self.outputs = Outputs("binary", (1,))
        self._examples = examples

    def load(self, split: str) -> Arrays:
        random = np.random.default_rng(split == "test")
        count = self._examples // (4 if split == "test" else 1)
        assert self.inputs.vocabulary is not None
        shares = random.random((count, *self.inputs.shape)) ** 4
        ids = (1 + shares * (self.inputs.vocabulary - 1)).astype(np.int32)
        return Arrays(ids, (ids[:, :1] > self.inputs.vocabulary // 16).astype(np.float32))  # about half of them


def build_normalized(inputs: Inputs, outputs: Outputs, **unused: object) -> keras.Model:
    """The mean of embeddings, normalized over all replicas."""
    raw = keras.Input(inputs.shape, dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(inputs.vocabulary, 8, name="words")(raw))
    x = keras.layers.BatchNormalization(synchronized=True)(x)
    return keras.Model(raw, keras.layers.Dense(1)(x))


@keras.saving.register_keras_serializable("tests")
class DenseSGD(keras.optimizers.SGD):  # type: ignore[misc]  # keras has no types
    """SGD as a user's own class, which gets dense gradients."""


@keras.saving.register_keras_serializable("tests")
class DenseLazyAdam(LazyAdam):
    """LazyAdam as a user's own class, which gets dense gradients, and leaves rows alone all the same."""


@keras.saving.register_keras_serializable("tests")
class DenseAdagrad(keras.optimizers.Adagrad):  # type: ignore[misc]  # keras has no types
    """Adagrad as a user's own class, which gets dense gradients."""
