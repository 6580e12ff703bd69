"""Dataset source: text files as sequences of bytes, each with the next byte as its target."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scaleflow.dataset.files import ALL, TEST_FRACTION, find_files, list_splits, parse_count, parse_fraction
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Inputs, Outputs

SUFFIXES = (".txt", ".md")

#: Number of different bytes.
BYTES = 256


class Tokens:
    """Reads text files as bytes, for models that predict the next token, such as `model=gpt`.

    The files of a split are joined in the order of their names, with a line break between two, and cut into sequences
    of `tokens` bytes. The target at each position is the next byte. What is left at the end is not used. Memory: two
    bytes for each byte of the files.

    Args:
        data_dir: a file, a glob, or a folder with files that end in `.txt` or `.md`. Folders or files whose names begin
            with `train`, `validation` (or `val`) and `test` are the splits.
        tokens: the length of a sequence, in bytes.
        test: the fraction of the text in the test split, if names denote no splits: its end, so that no test sequence
            lies between training sequences.

    Raises:
        ConfigError: if there are no files, a file cannot be read, or a split is shorter than one sequence.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, data_dir: str, tokens: int = 128, test: float = TEST_FRACTION) -> None:
        self._tokens = parse_count(tokens, "dataset.tokens", 1)
        self._test = parse_fraction(test, "dataset.test")
        self._data_dir = data_dir
        self._files = find_files(data_dir, SUFFIXES)
        self.splits = list_splits(self._files, self._test)
        self.inputs = Inputs((self._tokens,), "uint8", vocabulary=BYTES)
        self.outputs = Outputs("classification", (self._tokens, BYTES))

    def load(self, split: str) -> Arrays:
        """Returns the sequences of a split: inputs and targets are [n, tokens] uint8."""
        text = self._read(self._files[split if split in self._files else ALL])
        if ALL in self._files:
            border = len(text) - round(len(text) * self._test)
            text = text[border:] if split == "test" else text[:border]
        count = (len(text) - 1) // self._tokens
        if count < 1:
            raise ConfigError(
                f"dataset.data_dir={self._data_dir}: the split {split!r} has {len(text)} bytes, fewer than one "
                f"sequence of {self._tokens} and its next byte; use more text, or a smaller dataset.tokens"
            )
        used = count * self._tokens
        return Arrays(*(part.reshape(count, self._tokens) for part in (text[:used], text[1 : used + 1])))

    def _read(self, files: list[str]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        try:
            return np.frombuffer(b"\n".join(Path(name).read_bytes() for name in files), np.uint8)
        except OSError as error:
            raise ConfigError(f"dataset.data_dir={self._data_dir}: {error.filename}: {error.strerror}") from error
