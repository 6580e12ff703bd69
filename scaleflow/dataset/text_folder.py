"""Dataset source: text files in one folder per class."""

from __future__ import annotations

import tensorflow as tf

from scaleflow.dataset.reading.class_folders import ClassFolders, ClassKind
from scaleflow.dataset.reading.files import TEST_FRACTION, TEXT_SUFFIXES
from scaleflow.dataset.reading.text import Text
from scaleflow.interfaces import EarlierState, Inputs, Split, Standardize
from scaleflow.interfaces.options import Seed, TestFraction, Words


class TextFolder(ClassFolders):
    """Reads UTF-8 files that end in `.txt`, one text per file. The folders name the classes.

    The saved model takes raw texts. A file that is not UTF-8 is a bad example, named by its path.

    Args:
        earlier: the learned state of an earlier run, with its classes in order.

    conf/dataset/text_folder.yaml describes the other arguments.

    Raises:
        ConfigError: if a folder is missing or empty, or an option is invalid.
    """

    suffixes = TEXT_SUFFIXES
    inputs = Inputs((), "string")

    def __init__(
        self,
        data_dir: str,
        vocabulary: int = 10_000,
        tokens: int = 250,
        standardize: Standardize = "lower_and_strip_punctuation",
        classes: Words | None = None,
        kind: ClassKind = "auto",
        test: TestFraction = TEST_FRACTION,
        split_seed: Seed = 0,
        earlier: EarlierState | None = None,
        split: Split | None = None,
    ) -> None:
        self.preprocessing = Text(vocabulary, tokens, standardize)
        super().__init__(data_dir, classes, kind, test=test, split_seed=split_seed, earlier=earlier, split=split)

    def read(self, path: tf.Tensor) -> tf.Tensor:
        """Reads a text file, which must be UTF-8. Traced."""
        text = tf.io.read_file(path)
        is_utf8 = tf.equal(tf.strings.unicode_transcode(text, "UTF-8", "UTF-8", errors="replace"), text)
        with tf.control_dependencies([tf.debugging.Assert(is_utf8, ["it is not UTF-8"])]):
            return tf.identity(text)
