"""Dataset source: image files in one folder per class."""

from __future__ import annotations

import tensorflow as tf

from scaleflow.dataset.reading.class_folders import ClassFolders, ClassKind
from scaleflow.dataset.reading.files import PICTURE_SUFFIXES, TEST_FRACTION
from scaleflow.dataset.reading.images import Channels, ImageSize, Resize, make_image_decoder
from scaleflow.interfaces import EarlierState, Inputs, Split
from scaleflow.interfaces.options import Seed, TestFraction, Words, check_options


class ImageFolder(ClassFolders):
    """Reads JPEG, PNG, BMP and GIF files (the first frame of an animation), resized to one size.

    Inputs are [height, width, channels] uint8; the model scales them to [0, 1]. The folders name the classes. A file
    that can't be decoded is a bad example, named by its path.

    Args:
        earlier: the learned state of an earlier run, with its classes in order.

    conf/dataset/image_folder.yaml describes the other arguments.

    Raises:
        ConfigError: if a folder is missing or empty, or an option is invalid.
    """

    suffixes = PICTURE_SUFFIXES

    @check_options("dataset")
    def __init__(
        self,
        data_dir: str,
        size: ImageSize = (224, 224),
        resize: Resize = "stretch",
        channels: Channels = 3,
        classes: Words | None = None,
        kind: ClassKind = "auto",
        test: TestFraction = TEST_FRACTION,
        split_seed: Seed = 0,
        earlier: EarlierState | None = None,
        split: Split | None = None,
    ) -> None:
        self._decode = make_image_decoder(size, resize, channels)
        self.decoders = {"": self._decode}
        self.inputs = Inputs((*size, channels), "uint8", scale=1 / 255)
        super().__init__(data_dir, classes, kind, test=test, split_seed=split_seed, earlier=earlier, split=split)

    def read(self, path: tf.Tensor) -> tf.Tensor:
        return self._decode(tf.io.read_file(path))
