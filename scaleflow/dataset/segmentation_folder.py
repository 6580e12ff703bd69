"""Dataset source: image files, and masks with the class of each pixel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.reading.division import Division, read_path_keys
from scaleflow.dataset.reading.files import (
    PICTURE_SUFFIXES,
    TEST_FRACTION,
    describe_unused,
    find_data_dir,
    find_split_folders,
    has_suffix,
    walk_files,
)
from scaleflow.dataset.reading.images import (
    PNG_HEADER,
    Channels,
    ImageSize,
    Resize,
    decode_image,
    image_size,
    largest_ratio,
    make_image_decoder,
    resize_image,
    scale_mask,
)
from scaleflow.errors import ConfigError
from scaleflow.interfaces import DivisionKeys, Inputs, Outputs, Split, Stream
from scaleflow.interfaces.options import AtLeastTwo, Seed, TestFraction, Words, check_option, check_options, is_integer

#: The names of the folders.
IMAGES = "images"
MASKS = "masks"

#: The target of pixels that do not count: pixels with the value `ignore`, and padding.
IGNORED = 255

#: The class of a value that is not in `dataset.values`.
UNKNOWN = 256

#: The factors of red, green and blue in the number of a colour.
PLACES = (1 << 16, 1 << 8, 1)

#: The colour type of a PNG file with a palette.
PALETTE = 3


@dataclass(frozen=True)
class MaskValues:
    """The classes of the values of pixels in masks."""

    values: np.ndarray[Any, Any]  # [n] int64: a grey value, or a colour as one number
    classes: np.ndarray[Any, Any]  # [n] int32. `IGNORED`: the pixels do not count
    channels: int  # 1 for grey values, 3 for colours


class SegmentationFolder:
    """Reads images from a folder `images`, and the class of each pixel from a PNG file of the same name in `masks`.

    Inputs are [height, width, channels] uint8; the model scales them to [0, 1]. Targets are [height, width] uint8. A
    pair that can't be decoded or does not fit is a bad example, named by the path of the image.

    conf/dataset/segmentation_folder.yaml describes the arguments.

    Raises:
        ConfigError: if a folder or a mask is missing, or an option is invalid.
    """

    @check_options("dataset")
    def __init__(
        self,
        data_dir: str,
        classes: int | Sequence[str],
        size: ImageSize = (224, 224),
        resize: Resize = "stretch",
        channels: Channels = 3,
        values: Sequence[Any] | None = None,
        ignore: Any = 255,
        test: TestFraction = TEST_FRACTION,
        split_seed: Seed = 0,
        split: Split | None = None,
    ) -> None:
        if not isinstance(classes, int):
            check_option(classes, Words, "dataset.classes")
        count = classes if isinstance(classes, int) else len(classes)
        check_option(count, AtLeastTwo, "dataset.classes")
        self._resize = resize
        self._seed = split_seed
        self._values = parse_values(values, ignore, count)
        self.inputs = Inputs((*size, channels), "uint8", scale=1 / 255)
        self.decoders = {"": make_image_decoder(size, resize, channels)}
        names = None if isinstance(classes, int) else tuple(classes)
        self.outputs = Outputs("classification", (*size, count), names, ignore=IGNORED)
        base = find_data_dir(data_dir)
        folders = find_split_folders(base)
        unused = Counter[str]()
        division = Division(split or Split("random"), test, split_seed)
        pairs_by_split = {name: find_pairs(folder, unused) for name, folder in (folders or {"train": base}).items()}
        keyed = {}
        for name, pairs in pairs_by_split.items():
            keyed[name] = (pairs, read_path_keys(division.rule, base, pairs[:, 0].tolist()))
        self._pairs = keyed if folders else divide_pairs(*keyed["train"], division)
        self.notes = describe_unused(unused, PICTURE_SUFFIXES)

    @property
    def splits(self) -> Collection[str]:
        return tuple(self._pairs)

    def load(self, split: str) -> Stream:
        """Returns records (path of the image, path of the mask), in an order drawn with the seed."""
        pairs, keys = self._pairs[split]
        order = np.random.default_rng([self._seed, 1]).permutation(len(pairs))
        records = tf.data.Dataset.from_tensor_slices(
            tuple(tf.constant(pairs[order, side], tf.string) for side in range(2))
        )
        return Stream(records, len(pairs), self._decode, name=name_pair, **vars(keys.select(order)))

    def _decode(self, image_path: tf.Tensor, mask_path: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        height, width, channels = self.inputs.shape
        encoded = tf.io.read_file(image_path)
        image = decode_image(encoded, channels, lambda shape: largest_ratio(shape, height, width, resize=self._resize))
        mask = self._decode_mask(tf.io.read_file(mask_path))
        sizes = tf.ensure_shape(image_size(encoded, image), [2]), tf.shape(mask)[:2]
        (image_height, image_width), (mask_height, mask_width) = map(tf.unstack, sizes)
        message = ["the image is", image_height, "x", image_width, "pixels, its mask", mask_height, "x", mask_width]
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(tf.equal(*sizes)), message)]):
            mask = resize_image(mask, height, width, resize=self._resize, scale=scale_mask, fill=IGNORED)
        image = resize_image(image, height, width, resize=self._resize)
        return tf.ensure_shape(image, self.inputs.shape), tf.ensure_shape(mask[..., 0], (height, width))

    def _decode_mask(self, encoded: tf.Tensor) -> tf.Tensor:
        """Returns the class of each pixel, [h, w, 1] uint8."""
        known = self._values
        pixels = tf.cast(tf.io.decode_png(encoded, known.channels), tf.int32)
        with tf.control_dependencies([pixels]):  # so that a damaged file is reported as such
            header = tf.cast(tf.io.decode_raw(tf.strings.substr(encoded, PNG_HEADER, 2), tf.uint8), tf.int32)
        bits = header[0]
        has_palette = tf.equal(header[1], PALETTE)
        checks = []
        if known.channels == 1:
            problem = "the mask has a palette; list the colours of the classes in dataset.values"
            checks.append(tf.debugging.Assert(~has_palette, [problem]))
        # Of fewer bits, TensorFlow stretches the values to 0 to 255, of more it drops some.
        checks.append(tf.debugging.Assert(has_palette | tf.equal(bits, 8), ["the mask has", bits, "bits, expected 8"]))
        with tf.control_dependencies(checks):
            values = pixels if known.channels == 1 else tf.tensordot(pixels, tf.constant(PLACES), 1)[..., None]
        classes = look_up(values, known)
        worst = tf.gather(tf.reshape(values, [-1]), tf.argmax(tf.reshape(classes, [-1])))
        value = [worst] if known.channels == 1 else [worst // place % 256 for place in PLACES]
        message = ["the mask has a pixel of the value", *value, "which is no class and not dataset.ignore"]
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(classes < UNKNOWN), message)]):
            return tf.cast(classes, tf.uint8)


def look_up(values: tf.Tensor, known: MaskValues) -> tf.Tensor:
    """Returns the classes of values, int32 of the same shape. The class of other values is `UNKNOWN`."""
    if known.channels == 1:
        table = np.full(256, UNKNOWN, np.int32)
        table[known.values] = known.classes
        return tf.gather(tf.constant(table), values)
    order = np.argsort(known.values)
    sorted_values = tf.constant(known.values[order], tf.int32)
    flat = tf.reshape(values, [-1])
    places = tf.minimum(tf.searchsorted(sorted_values, flat), len(order) - 1)
    is_known = tf.equal(tf.gather(sorted_values, places), flat)
    classes = tf.where(is_known, tf.gather(tf.constant(known.classes[order]), places), UNKNOWN)
    return tf.reshape(classes, tf.shape(values))


def name_pair(image: bytes, mask: bytes) -> str:
    return f"{image.decode(errors='replace')} (mask {mask.decode(errors='replace')})"


def parse_values(values: Any, ignore: Any, count: int) -> MaskValues:
    """Checks `dataset.values` and `dataset.ignore` for a number of classes."""
    listed = list(range(count)) if values is None else values
    is_list = isinstance(listed, Sequence) and not isinstance(listed, str)
    if count > IGNORED:
        raise ConfigError(f"dataset.classes: {count} classes, expected at most {IGNORED}")
    if not is_list or len(listed) != count or not all(map(is_value, listed)):
        raise ConfigError(
            f"dataset.values={values}: expected a number from 0 to 255, or a colour [red, green, blue], for each of "
            f"the {count} classes"
        )
    if ignore is not None and not is_value(ignore):
        raise ConfigError(f"dataset.ignore={ignore}: expected a number from 0 to 255, [red, green, blue] or null")
    whole = [*listed, *([] if ignore is None else [ignore])]
    channels = 3 if any(isinstance(value, Sequence) for value in whole) else 1
    if channels == 3:
        whole = [value if isinstance(value, Sequence) else [value] * 3 for value in whole]
    keys = np.array(whole, np.int64).reshape(len(whole), channels) @ PLACES[-channels:]
    if len(set(keys)) < len(keys):
        where = "dataset.ignore" if len(set(keys[:count])) == count else "dataset.values"
        raise ConfigError(f"{where}={ignore if where == 'dataset.ignore' else values}: is the value of another class")
    return MaskValues(keys, np.array([*range(count), IGNORED], np.int32)[: len(keys)], channels)


def is_value(value: Any) -> bool:
    """Returns whether it is a number from 0 to 255, or three of them."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return len(value) == 3 and all(isinstance(part, int) and is_value(part) for part in value)
    return is_integer(value) and 0 <= value <= 255


def find_pairs(base: Path, unused: Counter[str]) -> np.ndarray[Any, Any]:
    """Returns the paths of images and their masks, [n, 2], and counts other files.

    Raises ConfigError if a folder or a mask is missing.
    """
    for name in (IMAGES, MASKS):
        if not (base / name).is_dir():
            raise ConfigError(f"dataset.data_dir: there is no folder {base / name}; put the {name} there")
    masks: dict[Path, str] = {}
    for path in walk_files(base / MASKS):
        if has_suffix(path, (".png",)):
            masks[Path(path).relative_to(base / MASKS).with_suffix("")] = path
    pairs = []
    for path in walk_files(base / IMAGES):
        if not has_suffix(path, PICTURE_SUFFIXES):
            unused[Path(path).suffix.lower()] += 1
            continue
        place = Path(path).relative_to(base / IMAGES).with_suffix("")
        if place not in masks:
            raise ConfigError(f"dataset.data_dir: {path} has no mask; expected {base / MASKS / place}.png")
        pairs.append((path, masks[place]))
    if not pairs:
        raise ConfigError(f"dataset.data_dir: {base / IMAGES} has no file that ends in {', '.join(PICTURE_SUFFIXES)}")
    return np.array(pairs, dtype=object)


def divide_pairs(
    pairs: np.ndarray[Any, Any], keys: DivisionKeys, division: Division
) -> dict[str, tuple[np.ndarray[Any, Any], DivisionKeys]]:
    """Divides pairs into splits. There is no test split if its fraction is 0."""
    masks = division.draw(keys, len(pairs), len(pairs))
    if not all(mask.any() for mask in masks.values()):
        raise ConfigError(
            f"dataset.test={division.test:g}: leaves no image to {'train' if masks['test'].any() else 'test'} on; use "
            "another fraction, or 0 for no test split"
        )
    return {name: (pairs[mask], keys.select(mask)) for name, mask in masks.items()}
