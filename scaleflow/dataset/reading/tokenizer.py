"""Tokenizers of a text corpus: bytes, words, and those of the libraries tokenizers and keras_hub."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scaleflow.dataset.reading.text import add_words
from scaleflow.errors import ConfigError, first_line

#: Number of different bytes.
BYTES = 256

#: Token ids that `words` reserves: padding, and an unknown word.
SPECIAL = 2

#: What `dataset.tokenizer` may be.
EXPECTED = "expected bytes, words, a .json file of the library tokenizers, or a preset of KerasHub"

Ids = np.ndarray[Any, Any]


class Tokenizer(Protocol):
    """Turns text into token ids.

    Attributes:
        name: a part of the fingerprint of what it makes: equal names make equal ids.
        needs_text: whether it takes UTF-8 only.
        learns: whether `learn` has to be called before anything else.
    """

    name: str
    needs_text: bool
    learns: bool

    def learn(self, blocks: Iterable[bytes]) -> str:
        """Learns from the training split; returns what `restore` takes, as JSON."""

    def extend(self, learned: str, new: str) -> str:
        """Returns what was learned, extended by new entries of what `learn` returned for other text."""

    def restore(self, learned: str) -> None: ...

    @property
    def vocabulary(self) -> int:
        """All ids are below this."""

    def encode(self, block: bytes) -> Ids:
        """Returns the token ids of a block of text, [n]."""


class FixedTokenizer:
    """Base of tokenizers that have nothing to learn."""

    learns = False

    def learn(self, blocks: Iterable[bytes]) -> str:
        return ""

    def extend(self, learned: str, new: str) -> str:
        return learned

    def restore(self, learned: str) -> None:
        pass


class Bytes(FixedTokenizer):
    """Each byte is a token."""

    name, needs_text, vocabulary = "bytes", False, BYTES

    def encode(self, block: bytes) -> Ids:
        return np.frombuffer(block, np.uint8)


class Words:
    """The most frequent words of the training split, split at white space by Keras's `TextVectorization`.

    1 is an unknown word; other words are numbered by descending frequency from 2 on.
    """

    needs_text, learns = True, True

    def __init__(self, most: int, standardize: str) -> None:
        self.name = f"words {most} {standardize}"
        self._most, self._standardize = most, None if standardize == "none" else standardize
        self._words: list[str] = []
        self._encode: Any = None

    def learn(self, blocks: Iterable[bytes]) -> str:
        import tensorflow as tf

        layer = self._layer(max_tokens=self._most)
        with tf.device("CPU:0"):
            for block in blocks:
                layer.update_state(tf.constant([block]))
        layer.finalize_state()
        return json.dumps([str(word) for word in layer.get_vocabulary(include_special_tokens=False)])

    def extend(self, learned: str, new: str) -> str:
        return json.dumps(add_words(json.loads(learned), json.loads(new), self._most - SPECIAL))

    def restore(self, learned: str) -> None:
        self._words = json.loads(learned)
        self._encode = self._layer(vocabulary=self._words)

    @property
    def vocabulary(self) -> int:
        return len(self._words) + SPECIAL

    def encode(self, block: bytes) -> Ids:
        import tensorflow as tf

        with tf.device("CPU:0"):
            ids: Ids = np.asarray(self._encode(tf.constant([block])))[0]
        return ids

    def _layer(self, **options: Any) -> Any:
        import keras

        return keras.layers.TextVectorization(standardize=self._standardize, **options)


class TokenizerFile(FixedTokenizer):
    """A file of the library tokenizers, such as `tokenizer.json` of a model on Hugging Face."""

    needs_text = True

    def __init__(self, path: str) -> None:
        if importlib.util.find_spec("tokenizers") is None:
            raise ConfigError(
                f"dataset.tokenizer={path}: tokenizers is not installed; pip install 'scaleflow[tokenizers]'"
            )
        import tokenizers

        try:
            content = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ConfigError(f"dataset.tokenizer={path}: {error.strerror}") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing more specific
            raise ConfigError(f"dataset.tokenizer={path}: is no file of the library tokenizers ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = f"tokenizers {hashlib.blake2b(content, digest_size=16).hexdigest()}"

    @property
    def vocabulary(self) -> int:
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    def encode(self, block: bytes) -> Ids:
        return np.array(self._tokenizer.encode(block.decode(), add_special_tokens=False).ids, np.int32)


class HubTokenizer(FixedTokenizer):
    """The tokenizer of a preset of KerasHub."""

    needs_text = True

    def __init__(self, preset: str) -> None:
        if importlib.util.find_spec("keras_hub") is None:
            raise ConfigError(
                f"dataset.tokenizer={preset}: {EXPECTED}, which is not installed; pip install 'scaleflow[hub]'"
            )
        import keras_hub

        folder = os.path.expanduser(preset)  # noqa: PTH111  (a preset may be a URL)
        try:
            self._tokenizer = keras_hub.tokenizers.Tokenizer.from_preset(folder)
        except Exception as error:  # of a download, of a file, or of what is in it
            reason = first_line(error)
            raise ConfigError(f"dataset.tokenizer={preset}: {EXPECTED}, which cannot be loaded: {reason}") from error
        settings = json.dumps(self._tokenizer.get_config(), sort_keys=True, default=str)
        vocabulary = json.dumps(self._tokenizer.get_vocabulary()) if hasattr(self._tokenizer, "get_vocabulary") else ""
        digest = hashlib.blake2b((settings + vocabulary).encode(), digest_size=16).hexdigest()
        self.name = f"keras_hub {preset} {digest}"

    @property
    def vocabulary(self) -> int:
        return int(self._tokenizer.vocabulary_size())

    def encode(self, block: bytes) -> Ids:
        return np.asarray(self._tokenizer(block.decode()), np.int32)


def make_tokenizer(name: Any, words: int, standardize: str) -> Tokenizer:
    """Makes the tokenizer that `dataset.tokenizer` names; `words` and `standardize` are for words."""
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"dataset.tokenizer={name}: {EXPECTED}")
    if name == "bytes":
        return Bytes()
    if name == "words":
        return Words(words, standardize)
    return TokenizerFile(name) if name.endswith(".json") else HubTokenizer(name)
