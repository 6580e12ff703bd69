"""Texts in a folder to each class."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from scaleflow.dataset.class_folders import ClassFolders
from scaleflow.dataset.files import TEST_FRACTION
from scaleflow.dataset.text import Text
from scaleflow.interfaces import Inputs, Standardize, Stream

SUFFIXES = (".txt",)


class TextFolder:
    """UTF-8 files that end in `.txt`, a text to a file; the classes are named by their folders.

    The saved model takes texts as they are. One that is not UTF-8 is a bad example, named by its path.

    Args:
        data_dir: folders `train`, `validation` (or `val`), `test` with the classes' folders in them, or the classes'
            folders themselves.
        vocabulary, tokens, standardize: how a text becomes numbers (`Text`).
        classes: the folders to use; null means all, sorted.
        kind: `auto` (binary for two classes), `classification` or `binary`.
        test: the part of each class that is the test split, where there are no folders of splits.
        split_seed: decides which part, and the order that `dataset.limit` takes the first examples of.

    Raises:
        ConfigError: for a folder that is missing or empty, or an option that makes no sense.
    """

    inputs = Inputs((), "string")

    def __init__(
        self,
        data_dir: str,
        vocabulary: int = 10_000,
        tokens: int = 250,
        standardize: Standardize = "lower_and_strip_punctuation",
        classes: Sequence[str] | None = None,
        kind: str = "auto",
        test: float = TEST_FRACTION,
        split_seed: int = 0,
    ) -> None:
        self.preprocessing = Text(vocabulary, tokens, standardize)
        self._folders = ClassFolders(data_dir, SUFFIXES, classes, kind, test, split_seed)
        self.outputs = self._folders.outputs

    @property
    def splits(self) -> Collection[str]:
        return self._folders.splits

    def load(self, split: str) -> Stream:
        """Records are (path, number of the class)."""
        return self._folders.stream(split, read_text)


def read_text(path: tf.Tensor) -> Any:
    """Traced: the text of a file, which has to be UTF-8."""
    text = tf.io.read_file(path)
    is_utf8 = tf.equal(tf.strings.unicode_transcode(text, "UTF-8", "UTF-8", errors="replace"), text)
    with tf.control_dependencies([tf.debugging.Assert(is_utf8, ["it is not UTF-8"])]):
        return tf.identity(text)
