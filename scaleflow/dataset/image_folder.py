"""Pictures in a folder to each class."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from scaleflow.dataset.class_folders import ClassFolders
from scaleflow.dataset.files import TEST_FRACTION
from scaleflow.dataset.images import SUFFIXES, make_image_decoder
from scaleflow.interfaces import Inputs, Stream


class ImageFolder:
    """JPEG, PNG, BMP and GIF files (of an animation the first frame), brought to one size.

    Inputs are [height, width, channels] uint8; the model scales them to [0, 1]. The classes are named by their
    folders. What can't be decoded is a bad example, named by its path.

    Args:
        data_dir: folders `train`, `validation` (or `val`), `test` with the classes' folders in them, or the classes'
            folders themselves.
        size: [height, width].
        resize: `stretch`, `pad_batch` (black, keeps the proportions) or `crop` (the middle).
        channels: 3, or 1 for grey.
        classes: the folders to use; null means all, sorted.
        kind: `auto` (binary for two classes), `classification` or `binary`.
        test: the part of each class that is the test split, where there are no folders of splits.
        split_seed: decides which part, and the order that `dataset.limit` takes the first examples of.

    Raises:
        ConfigError: for a folder that is missing or empty, or an option that makes no sense.
    """

    def __init__(
        self,
        data_dir: str,
        size: Sequence[int] = (224, 224),
        resize: str = "stretch",
        channels: int = 3,
        classes: Sequence[str] | None = None,
        kind: str = "auto",
        test: float = TEST_FRACTION,
        split_seed: int = 0,
    ) -> None:
        self._decode = make_image_decoder(size, resize, channels)
        self.inputs = Inputs((*size, channels), "uint8", scale=1 / 255)
        self._folders = ClassFolders(data_dir, SUFFIXES, classes, kind, test, split_seed)
        self.outputs = self._folders.outputs

    @property
    def splits(self) -> Collection[str]:
        return self._folders.splits

    def load(self, split: str) -> Stream:
        """Records are (path, number of the class)."""

        def read(path: tf.Tensor) -> Any:
            return self._decode(tf.io.read_file(path))

        return self._folders.stream(split, read)
