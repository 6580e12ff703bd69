"""Preprocessing of text: Keras's TextVectorization with a vocabulary learned from the training split.

Users import it as `scaleflow.dataset.Text`.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import keras
import numpy as np

from scaleflow.interfaces import Inputs, Standardize
from scaleflow.interfaces.options import Positive, at_least, check_options

#: Keras's way to standardize ASCII.
LOWER: Standardize = "lower_and_strip_punctuation"

#: A character of a script that is written without spaces.
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")

#: Number of reserved token ids: padding and unknown words.
SPECIAL = 2


class Text:
    """Converts a text, a string of shape (), to the token ids of its first words.

    0 is padding, 1 an unknown word. The other words are numbered by descending frequency.

    Args:
        vocabulary: maximum number of token ids.
        tokens: words per text. Shorter texts are padded.
        standardize: applied to the text before it is split at white space. `unicode` lowers the letters of all scripts
            and strips ASCII punctuation. Texts in scripts without spaces are split into characters.

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
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._is_unicode = standardize == "unicode"
        self._standardize = choose_standardization(standardize)

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> list[str]:
        """Returns the most frequent words, in descending order of frequency."""
        layer = self._layer(max_tokens=self._vocabulary)
        characters: Counter[str] = Counter()
        for batch in batches:
            if self._is_unicode:
                batch = np.array([lower_text(text) for text in batch.ravel()], object)
                characters.update("".join(batch))
            layer.update_state(batch)
        for space in string.whitespace + string.punctuation:
            del characters[space]
        unspaced = sum(count for character, count in characters.items() if UNSPACED.match(character))
        if unspaced * 2 > characters.total() > 0:
            return [character for character, _ in characters.most_common(self._vocabulary - SPECIAL)]
        layer.finalize_state()
        return [str(word) for word in layer.get_vocabulary(include_special_tokens=False)]

    def extend(self, learned: Any, new: Any) -> list[str]:
        """Returns the known words, then the most frequent new words, as many as there are ids."""
        return add_words(learned, new, self._vocabulary - SPECIAL)

    def features(self, learned: Any) -> Inputs:
        """Describes the features: [tokens] int32, below the size of the vocabulary."""
        return Inputs(shape=(self._tokens,), dtype="int32", vocabulary=len(learned) + SPECIAL)

    def layer(self, learned: Any) -> keras.Layer:
        """Returns the model texts [b] -> [b, tokens] int32."""
        raw = keras.Input((), dtype="string", name="text")
        words, places = add_variants(learned) if self._is_unicode else (learned, [])
        vectorize = self._layer(vocabulary=words, split=find_split(learned, self._is_unicode))
        numbers = keras.ops.cast(vectorize(raw), "int32")
        if len(words) > len(learned):
            ids = [0, 1, *(SPECIAL + place for place in places)]
            numbers = keras.ops.take(np.array(ids, "int32"), numbers, axis=0)
        return keras.Model(raw, numbers, name="text")

    def _layer(self, **options: Any) -> keras.Layer:
        return keras.layers.TextVectorization(
            standardize=self._standardize, output_sequence_length=self._tokens, **options
        )


def choose_standardization(standardize: Standardize) -> str | None:
    """Returns the option `standardize` of Keras's TextVectorization."""
    if standardize == "none":
        return None
    return LOWER if standardize == "unicode" else standardize


def lower_text(text: Any) -> str:
    """Returns a text, which may be `bytes`, in lower case and in Unicode's normal form C."""
    plain = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return unicodedata.normalize("NFC", plain).lower()


def add_variants(words: Sequence[str]) -> tuple[list[str], list[int]]:
    """Returns words with their variants, and for each the place of its word among `words`.

    Keras lowers ASCII letters only, and a saved model contains no code of scaleflow. So the vocabulary also has the
    words in capitals, with a capital, and with separate accents (normal form D).
    """
    places = {word: place for place, word in enumerate(words)}
    for place, word in enumerate(words):
        if word.isascii():
            continue
        for cased in (word, word.capitalize(), word.title(), word.upper()):
            for form in ("NFC", "NFD"):
                variant = lower_ascii(unicodedata.normalize(form, cased))
                places.setdefault(variant, place)
    return list(places), list(places.values())


def lower_ascii(text: str) -> str:
    """Returns a text with its ASCII letters in lower case, as Keras does."""
    return "".join(character.lower() if character.isascii() else character for character in text)


def find_split(words: Sequence[str], is_unicode: bool) -> str:
    """Returns how texts are split: into characters if the words are characters of a script without spaces."""
    are_characters = all(len(word) == 1 for word in words) and any(UNSPACED.match(word) for word in words)
    return "character" if is_unicode and are_characters else "whitespace"


def add_words(known: Sequence[str], new: Iterable[str], most: int | None = None) -> list[str]:
    """Returns the known words, then new ones in their order, up to `most` words. All known words are kept."""
    known_words = set(known)
    added = [word for word in new if word not in known_words]
    if most is not None:
        added = added[: max(0, most - len(known))]
    return [*known, *added]
