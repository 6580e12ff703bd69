"""Dataset source: a text corpus as sequences of tokens, each with the next token as its target."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from scaleflow.dataset.reading.corpus import SUFFIXES, read_documents
from scaleflow.dataset.reading.files import ALL, TEST_FRACTION, find_files, list_splits
from scaleflow.dataset.reading.tokenizer import BYTES, SPECIAL, make_tokenizer
from scaleflow.errors import ConfigError
from scaleflow.files.cache import Cache, digest_key, identify_file
from scaleflow.interfaces import Arrays, EarlierState, Inputs, Outputs, Standardize
from scaleflow.interfaces.options import Check, Positive, TestFraction, at_least, check_options

#: The version of the files in the cache.
FORMAT = 1

Text = Annotated[str, Check(lambda value: isinstance(value, str), "text")]


class Tokens:
    """Reads text for models that predict the next token, such as `model=gpt`.

    The documents of a split are tokenized, joined in the order of their files, and cut into sequences of `tokens`. The
    target at each position is the next token. Tokens that are left at the end are not used. The tokens are kept in a
    file in `cache_dir`. Its name is a fingerprint of the files and the options. It is made once, and all runs and
    workers memory-map it.

    Args:
        earlier: the learned state of an earlier run, with its words in order.

    conf/dataset/tokens.yaml describes the other arguments.

    Raises:
        ConfigError: if there are no files, a file cannot be read, a split is shorter than one sequence, or an option is
            invalid.
    """

    notes: tuple[str, ...] = ()

    @check_options("dataset")
    def __init__(
        self,
        data_dir: str,
        tokens: Positive = 128,
        test: TestFraction = TEST_FRACTION,
        tokenizer: str = "bytes",
        column: Text = "text",
        separator: Text = "\n",
        vocabulary: Annotated[int, at_least(SPECIAL + 1)] = 10_000,
        standardize: Standardize = "lower_and_strip_punctuation",
        cache_dir: str | None = None,
        earlier: EarlierState | None = None,
    ) -> None:
        self._tokens = tokens
        self._test = test
        self._data_dir = data_dir
        self._column = column
        self._separator = separator.encode()
        self._files = find_files(data_dir, SUFFIXES)
        self._tokenizer = make_tokenizer(tokenizer, vocabulary, standardize)
        self._cache = Cache(cache_dir, "tokens")
        self.reading: dict[str, Any] = {"tokenizer": self._tokenizer.name}
        if self._tokenizer.learns:
            self._restore(earlier)
        described = self._tokenizer.describe()
        if described is not None:
            self.reading["learned"] = described
        size = self._tokenizer.vocabulary
        # Bytes stay bytes; other ids are int32, which saved models take everywhere.
        self.inputs = Inputs((self._tokens,), "uint8" if size <= BYTES else "int32", vocabulary=size)
        self.outputs = Outputs("classification", (self._tokens, size))

    @property
    def splits(self) -> Collection[str]:
        return list_splits(self._files, self._test)

    def load(self, split: str) -> Arrays:
        """Returns the sequences of a split: inputs and targets are [n, tokens] of the dtype of `inputs`, both parts of
        one memory-mapped file.
        """
        ids = self._read(split if split in self._files else ALL)
        if ALL in self._files:
            border = len(ids) - round(len(ids) * self._test)
            ids = ids[border:] if split == "test" else ids[:border]
        count = (len(ids) - 1) // self._tokens
        if count < 1:
            what = "bytes" if self._tokenizer.name == "bytes" else "tokens"
            raise ConfigError(
                f"dataset.data_dir={self._data_dir}: the split {split!r} has {len(ids)} {what}, fewer than one "
                f"sequence of {self._tokens} and its next one; use more text, or a smaller dataset.tokens"
            )
        used = count * self._tokens
        return Arrays(*(part.reshape(count, self._tokens) for part in (ids[:used], ids[1 : used + 1])))

    def _read(self, group: str) -> np.ndarray[Any, Any]:
        """Returns the token ids of a group of files, [n]."""
        files = self._files[group]
        dtype = np.dtype(self.inputs.dtype)

        def make() -> Iterator[bytes]:
            return (self._tokenizer.encode(block).astype(dtype).tobytes() for block in self._blocks(files))

        path = self._keep(self._key(files), f".{dtype.name}", make)
        if not path.stat().st_size:
            return np.empty(0, dtype)
        return np.memmap(path, dtype, "r")

    def _restore(self, earlier: EarlierState | None) -> None:
        """Restores the tokenizer of an earlier run, or learns it from the training split."""
        known = None if earlier is None else earlier.find_reading(self).get("learned")
        known = known if isinstance(known, list) else None  # only tokenizers that learn have a list here
        learned = self._learn() if known is None or (earlier and earlier.extends) else json.dumps(known)
        if known is not None:
            learned = self._tokenizer.extend(json.dumps(known), learned)
        self._tokenizer.restore(learned)
        self._tokenizer.name += f" {digest_key(learned)}"  # its tokens depend on more than their own files

    def _learn(self) -> str:
        """Learns the tokenizer from the training split. The cache keeps the result for the same files."""
        files = self._files.get("train", self._files.get(ALL, []))

        def make() -> Iterator[bytes]:
            yield self._tokenizer.learn(self._blocks(files)).encode()

        return self._keep(f"{self._key(files)} learned", ".json", make).read_text("utf-8")

    def _keep(self, key: str, suffix: str, make: Callable[[], Iterator[bytes]]) -> Path:
        """Returns the file of the cache for a key, with the bytes that `make()` yields."""
        path = self._cache.locate_file(key, suffix)
        try:
            self._cache.write_once(path, make)
        except OSError as error:
            raise ConfigError(
                f"dataset.cache_dir={self._cache.folder}: the tokens cannot be kept there ({error.strerror or error}); "
                "set it to another folder"
            ) from error
        return path

    def _blocks(self, files: list[str]) -> Iterator[bytes]:
        """Yields the text of the documents, with the separator between two."""
        documents = itertools.chain.from_iterable(
            read_documents(path, self._column, not self._tokenizer.needs_text) for path in files
        )
        for number, document in enumerate(documents):
            if number and self._separator:
                yield self._separator
            yield from document

    def _key(self, files: Any) -> str:
        """Returns a text with everything that the tokens of files depend on."""
        return repr([FORMAT, self._tokenizer.name, self._separator, self._column, *map(identify_file, files)])
