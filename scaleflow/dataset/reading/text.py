"""Preprocessing of text: Keras's TextVectorization with a vocabulary learned from the training split.

Users import it as `scaleflow.dataset.Text`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import keras
import numpy as np

from scaleflow.interfaces import Inputs, Standardize
from scaleflow.interfaces.options import Positive, at_least, check_options

#: Number of reserved token ids: padding and unknown words.
SPECIAL = 2


class Text:
    """Converts a text, a string of shape (), to the token ids of its first words.

    0 is padding, 1 an unknown word; other words are numbered by descending frequency.

    Args:
        vocabulary: maximum number of token ids.
        tokens: words per text; shorter texts are padded.
        standardize: applied to the text before it is split at white space.

    Raises:
        ConfigError: if an option is invalid.
    """

    @check_options("dataset")
    def __init__(
        self,
        vocabulary: Annotated[int, at_least(SPECIAL + 1)] = 10_000,
        tokens: Positive = 250,
        standardize: Standardize = "lower_and_strip_punctuation",
    ) -> None:
        self._vocabulary, self._tokens = vocabulary, tokens
        self._standardize = None if standardize == "none" else standardize

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> list[str]:
        """Returns the most frequent words, in descending order of frequency."""
        layer = self._layer(max_tokens=self._vocabulary)
        for batch in batches:
            layer.update_state(batch)
        layer.finalize_state()
        return [str(word) for word in layer.get_vocabulary(include_special_tokens=False)]

    def extend(self, learned: Any, new: Any) -> list[str]:
        """Returns the known words, then the most frequent new ones that there is a place for."""
        return add_words(learned, new, self._vocabulary - SPECIAL)

    def features(self, learned: Any) -> Inputs:
        """Describes the features: [tokens] int32, below the size of the vocabulary."""
        return Inputs(shape=(self._tokens,), dtype="int32", vocabulary=len(learned) + SPECIAL)

    def layer(self, learned: Any) -> keras.Layer:
        """Returns the model texts [b] -> [b, tokens] int32."""
        raw = keras.Input((), dtype="string", name="text")
        numbers = self._layer(vocabulary=learned)(raw)
        return keras.Model(raw, keras.ops.cast(numbers, "int32"), name="text")

    def _layer(self, **options: Any) -> keras.Layer:
        return keras.layers.TextVectorization(
            standardize=self._standardize, output_sequence_length=self._tokens, **options
        )


def add_words(known: Sequence[str], new: Iterable[str], most: int | None = None) -> list[str]:
    """Returns the known words, then new ones in their order, up to `most` words in all if there are not more known."""
    known_words = set(known)
    added = [word for word in new if word not in known_words]
    return [*known, *(added if most is None else added[: max(0, most - len(known))])]
