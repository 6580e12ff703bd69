"""Tokenizers of a text corpus: bytes, words, and tokenizers of the libraries tokenizers and keras_hub."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from scaleflow.dataset.reading.text import add_words, choose_standardization, lower_text
from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import Standardize

#: Number of different bytes.
BYTES = 256

#: The number of token ids that `words` reserves: for padding, and for an unknown word.
SPECIAL = 2

#: The values of `dataset.tokenizer`.
EXPECTED = "expected bytes, words, a .json file of the library tokenizers, or a preset of KerasHub"

#: Settings of KerasHub presets that suit single texts, with the values for the blocks of a corpus. Blocks are not cut
#: off or padded, and get no tokens at their ends.
CORPUS_SETTINGS = {"sequence_length": None, "add_bos": False, "add_eos": False, "add_prefix_space": False}

Ids = np.ndarray[Any, Any]


class Tokenizer(Protocol):
    """Turns text into token ids.

    Attributes:
        name: a part of the fingerprint of cached ids. Tokenizers with equal names make equal ids.
        needs_text: whether it needs valid UTF-8.
        learns: whether `learn` or `restore` has to be called first.
    """

    name: str
    needs_text: bool
    learns: bool

    @property
    def unknown(self) -> int | None:
        """The token id of unknown text; None if the tokenizer has no such id."""

    @property
    def unused(self) -> Sequence[int]:
        """The ids that do not stand for text. They are never generated."""

    def learn(self, blocks: Iterable[bytes]) -> str:
        """Learns from the training split. Returns the learned state as JSON, for `restore`."""

    def extend(self, learned: str, new: str) -> str:
        """Returns a learned state with the additional entries of a newer one."""

    def restore(self, learned: str) -> None:
        """Sets the learned state."""

    @property
    def vocabulary(self) -> int:
        """The number of token ids. All ids are below it."""

    def encode(self, block: bytes) -> Ids:
        """Returns the token ids of a block of text, [n]."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids. An incomplete character becomes U+FFFD."""

    def describe(self) -> Any:
        """Returns the values that `restore_tokenizer` needs in addition to the name; None if it needs no others."""


class FixedTokenizer:
    """Base of tokenizers that have nothing to learn."""

    learns = False
    unknown: int | None = None

    @property
    def unused(self) -> Sequence[int]:
        return () if self.unknown is None else (self.unknown,)

    def describe(self) -> Any:
        return None

    def learn(self, blocks: Iterable[bytes]) -> str:
        return ""

    def extend(self, learned: str, new: str) -> str:
        return learned

    def restore(self, learned: str) -> None:
        pass


class Bytes(FixedTokenizer):
    """Each byte is a token."""

    name = "bytes"
    needs_text = False
    vocabulary = BYTES

    def encode(self, block: bytes) -> Ids:
        return np.frombuffer(block, np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class Words:
    """The most frequent words of the training split, split at white space by Keras's `TextVectorization`.

    1 is an unknown word. The other words are numbered by descending frequency from 2 on.

    Args:
        most: maximum number of token ids.
        standardize: as for `Text`.
    """

    needs_text = True
    learns = True
    unknown = 1
    unused = range(SPECIAL)

    def __init__(self, most: int, standardize: Standardize) -> None:
        self.name = f"words {most} {standardize}"
        self._is_unicode = standardize == "unicode"
        self._most = most
        self._standardize = choose_standardization(standardize)
        self._words: list[str] = []
        self._encode: Any = None

    def learn(self, blocks: Iterable[bytes]) -> str:
        import tensorflow as tf

        layer = self._layer(max_tokens=self._most)
        with tf.device("CPU:0"):
            for block in blocks:
                layer.update_state(tf.constant([self._lower(block)]))
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
            ids: Ids = np.asarray(self._encode(tf.constant([self._lower(block)])))[0]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self._words[token - SPECIAL] for token in ids if token >= SPECIAL)

    def describe(self) -> Any:
        return self._words

    def _lower(self, block: bytes) -> str | bytes:
        """Returns a block in lower case if Keras, which lowers ASCII letters only, cannot do it."""
        return lower_text(block) if self._is_unicode else block

    def _layer(self, **options: Any) -> Any:
        import keras

        return keras.layers.TextVectorization(standardize=self._standardize, **options)


class TokenizerFile(FixedTokenizer):
    """A file of the library tokenizers, such as `tokenizer.json` of a model on Hugging Face.

    Args:
        path: of the file.
        content: of the file, if it was read before.
    """

    needs_text = True

    def __init__(self, path: str, content: bytes | None = None) -> None:
        if importlib.util.find_spec("tokenizers") is None:
            raise ConfigError(
                f"dataset.tokenizer={path}: tokenizers is not installed; pip install 'scaleflow[tokenizers]'"
            )
        import tokenizers

        try:
            content = Path(path).expanduser().read_bytes() if content is None else content
        except OSError as error:
            raise ConfigError(f"dataset.tokenizer={path}: {error.strerror}") from error
        try:
            content = drop_prefixes(content.decode()).encode()
            self._content = content.decode()
            self._tokenizer = tokenizers.Tokenizer.from_str(self._content)
        except Exception as error:  # the library raises nothing more specific
            raise ConfigError(f"dataset.tokenizer={path}: is no file of the library tokenizers ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = f"tokenizers {hashlib.blake2b(content, digest_size=16).hexdigest()}"
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self.unknown = None if unknown is None else self._tokenizer.token_to_id(unknown)

    @property
    def vocabulary(self) -> int:
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    def encode(self, block: bytes) -> Ids:
        return np.array(self._tokenizer.encode(block.decode(), add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def describe(self) -> Any:
        return self._content


class HubTokenizer(FixedTokenizer):
    """The tokenizer of a preset of KerasHub.

    Args:
        preset: a name, a URL or a folder.
        files: the contents of the preset's files as base64, by path, if a run has recorded them.
        name: the name of the tokenizer in that run.
    """

    needs_text = True

    def __init__(self, preset: str, files: Mapping[str, str] | None = None, name: str = "") -> None:
        if importlib.util.find_spec("keras_hub") is None:
            raise ConfigError(
                f"dataset.tokenizer={preset}: {EXPECTED}, which is not installed; pip install 'scaleflow[hub]'"
            )
        import keras_hub

        try:
            if files is None:
                folder = os.path.expanduser(preset)  # noqa: PTH111  (a preset may be a URL)
                self._tokenizer = keras_hub.tokenizers.Tokenizer.from_preset(folder)
            else:
                self._tokenizer = load_hub_tokenizer(files)
            changes = find_corpus_changes(self._tokenizer)
            if changes:
                self._tokenizer = load_hub_tokenizer(self.describe(), changes)
        except Exception as error:  # of a download, or of the contents of a file
            reason = read_reason(error)
            raise ConfigError(f"dataset.tokenizer={preset}: {EXPECTED}, which cannot be loaded: {reason}") from error
        settings = json.dumps(self._tokenizer.get_config(), sort_keys=True, default=str)
        words = self._tokenizer.get_vocabulary() if hasattr(self._tokenizer, "get_vocabulary") else None
        vocabulary = "" if words is None else json.dumps(list(words))
        digest = hashlib.blake2b((settings + vocabulary).encode(), digest_size=16).hexdigest()
        self.name = name or f"keras_hub {preset} {digest}"
        self.unknown = getattr(self._tokenizer, "unk_token_id", None)

    @property
    def vocabulary(self) -> int:
        return int(self._tokenizer.vocabulary_size())

    def encode(self, block: bytes) -> Ids:
        return np.asarray(self._tokenizer(block.decode()), np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        text = np.asarray(self._tokenizer.detokenize(np.array(ids, np.int32))).item()
        return text.decode(errors="replace") if isinstance(text, bytes) else str(text)

    def describe(self) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            self._tokenizer.save_to_preset(folder)
            files: dict[str, str] = {}
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    files[str(path.relative_to(folder))] = base64.b64encode(path.read_bytes()).decode()
            return files


def make_tokenizer(name: Any, words: int, standardize: Standardize) -> Tokenizer:
    """Makes the tokenizer that `dataset.tokenizer` names. `words` and `standardize` are options of `Words`."""
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"dataset.tokenizer={name}: {EXPECTED}")
    if name == "bytes":
        return Bytes()
    if name == "words":
        return Words(words, standardize)
    return TokenizerFile(name) if name.endswith(".json") else HubTokenizer(name)


def restore_tokenizer(name: str, described: Any) -> Tokenizer:
    """Makes the tokenizer that a run used, from its recorded name and description.

    Args:
        name: `Tokenizer.name`.
        described: the result of `Tokenizer.describe`.

    Raises:
        ConfigError: if the record describes no tokenizer, or its library is not installed.
    """
    kind, *options = name.split(" ")
    if kind == "bytes":
        return Bytes()
    if kind == "words" and isinstance(described, list):
        tokenizer = Words(len(described) + SPECIAL, cast(Standardize, options[1]))
        tokenizer.restore(json.dumps(described))
        return tokenizer
    if kind == "tokenizers" and isinstance(described, str):
        return TokenizerFile("tokenizer.json", described.encode())
    if kind == "keras_hub" and isinstance(described, Mapping):
        return HubTokenizer("of the run", described, name)
    raise ConfigError(f"the run's record of its tokenizer, {name}, is damaged; train it again")


def drop_prefixes(content: str) -> str:
    """Returns a file of the library tokenizers without a space before each text.

    The blocks of a corpus and the separators of its documents would all get such a space.
    """
    described = json.loads(content)
    if not isinstance(described, dict):
        return content
    normalizer = drop_prefix(described.get("normalizer"))
    pre_tokenizer = drop_prefix(described.get("pre_tokenizer"))
    if normalizer == described.get("normalizer") and pre_tokenizer == described.get("pre_tokenizer"):
        return content
    changed = {
        **described,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": drop_prefix(described.get("decoder")),
    }
    return json.dumps(changed, ensure_ascii=False)


def drop_prefix(part: Any) -> Any:
    """Returns a part of a tokenizer that does not add or remove a space before a text.

    It is None if the part does nothing else.
    """
    if not isinstance(part, dict) or part.get("type") == "Prepend":
        return None
    if part.get("type") == "Strip" and part.get("content") == " " and part.get("start"):
        return None
    changed = dict(part)
    if part.get("add_prefix_space"):
        changed["add_prefix_space"] = False
    if "prepend_scheme" in part:
        changed["prepend_scheme"] = "never"
    for key in ("normalizers", "pretokenizers", "decoders"):
        if key in part:
            inner_parts = [drop_prefix(inner) for inner in part[key]]
            changed[key] = [inner for inner in inner_parts if inner is not None]
    return changed


def find_corpus_changes(tokenizer: Any) -> dict[str, Any]:
    """Returns the settings of a KerasHub tokenizer that have to change for a corpus."""
    changes: dict[str, Any] = {}
    for key, value in CORPUS_SETTINGS.items():
        if getattr(tokenizer, key, None) not in (None, False, value):
            changes[key] = value
    if "int" not in str(getattr(tokenizer, "compute_dtype", "int32")):  # it returns pieces of text
        changes["dtype"] = "int32"
    return changes


def load_hub_tokenizer(files: Mapping[str, str], changes: Mapping[str, Any] | None = None) -> Any:
    """Loads a tokenizer of KerasHub from the contents of its files, with changed settings.

    Raises ValueError if a file is not in their folder.
    """
    import keras

    with tempfile.TemporaryDirectory() as folder:
        for path, content in files.items():
            place = Path(folder, path).resolve()
            if not place.is_relative_to(Path(folder).resolve()):  # a store's content is not trusted
                raise ValueError(f"{path} is outside of its folder")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(base64.b64decode(content))
        described = json.loads(Path(folder, "tokenizer.json").read_text())
        described["config"].update(changes or {})
        tokenizer = keras.saving.deserialize_keras_object(described)
        tokenizer.load_preset_assets(folder)
    return tokenizer


def find_unknown(tokenizer: Tokenizer, text: str) -> list[str]:
    """Returns the words of a text that are not in the vocabulary, in their order."""
    if tokenizer.unknown is None:
        return []
    words = dict.fromkeys(text.split())
    return [word for word in words if tokenizer.unknown in tokenizer.encode(word.encode()).tolist()]


class TextStream:
    """Turns token ids into text as they come. A piece ends with a whole character.

    Args:
        tokenizer: of the ids.
        before: the ids before the first one. Their text is not returned.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._ids = list(before)
        self._start = 0  # ids before this place are not decoded again
        self._end = len(self._ids)  # the text of the ids before this place has been returned

    def add(self, token: int) -> str:
        """Adds an id. Returns the text that it completes, or ""."""
        self._ids.append(token)
        text = self._read_new()
        if text.endswith("\ufffd"):  # the first bytes of a character
            return ""
        if text:
            self._start = self._end
            self._end = len(self._ids)
        return text

    def finish(self) -> str:
        """Returns the text of the remaining ids."""
        return self._read_new()

    def _read_new(self) -> str:
        """Returns the text of the new ids. Some ids before them are decoded as well: the text may depend on these."""
        text = self._decode(self._ids[self._start :])
        returned = self._decode(self._ids[self._start : self._end])
        return text[len(returned) :]
