"""Text as numbers, one to a word: Keras's TextVectorization, its vocabulary learned from the training split."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import keras
import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Standardize

#: Padding and unknown words are numbers, too.
SPECIAL = 2


class Text:
    """Preprocesses a text, a string of shape (), to the numbers of its first words.

    0 is padding, 1 a word that is not in the vocabulary; the others are numbered by how frequent they are.

    Args:
        vocabulary: so many numbers at most.
        tokens: words of a text that are kept; a shorter one is padded.
        standardize: what is done to it before it is split at white space.

    Raises:
        ConfigError: for sizes that make no sense.
    """

    def __init__(
        self, vocabulary: int = 10_000, tokens: int = 250, standardize: Standardize = "lower_and_strip_punctuation"
    ) -> None:
        check_size("dataset.vocabulary", vocabulary, SPECIAL + 1)
        check_size("dataset.tokens", tokens, 1)
        if standardize not in get_args(Standardize):
            raise ConfigError(f"dataset.standardize={standardize}: expected one of {', '.join(get_args(Standardize))}")
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._standardize = None if standardize == "none" else standardize

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> list[str]:
        """The most frequent words, the most frequent one first."""
        layer = self._layer(max_tokens=self._vocabulary)
        for batch in batches:
            layer.update_state(batch)
        layer.finalize_state()
        return [str(word) for word in layer.get_vocabulary(include_special_tokens=False)]

    def features(self, learned: Any) -> Inputs:
        """[tokens] int32, below the size of what was learned."""
        return Inputs(shape=(self._tokens,), dtype="int32", vocabulary=len(learned) + SPECIAL)

    def layer(self, learned: Any) -> keras.Layer:
        """Texts [b] -> [b, tokens] int32."""
        raw = keras.Input((), dtype="string", name="text")
        numbers = self._layer(vocabulary=learned)(raw)
        return keras.Model(raw, keras.ops.cast(numbers, "int32"), name="text")

    def _layer(self, **options: Any) -> keras.Layer:
        return keras.layers.TextVectorization(
            standardize=self._standardize, output_sequence_length=self._tokens, **options
        )


def check_size(key: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key}={value}: expected an integer, at least {least}")
