"""Examples from TFRecord files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import tensorflow as tf

from scaleflow.dataset import images
from scaleflow.dataset.files import (
    ALL,
    TEST_FRACTION,
    divide_records,
    find_files,
    interleave_files,
    list_splits,
    parse_choice,
    parse_count,
    parse_fraction,
    parse_words,
)
from scaleflow.dataset.unreadable import FAILURES
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Kind, Outputs, Stream

SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")
COMPRESSION = ("none", "gzip", "zlib")

#: What a feature's keys may be, by its kind.
KEYS: Mapping[str, Sequence[str]] = {
    "fixed": ("shape", "dtype"),
    "padded": ("shape", "dtype"),
    "raw": ("shape", "dtype"),
    "image": ("size", "resize", "channels"),
}
STORED = ("int64", "float32", "string")
RAW = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64")

#: What is said of the record that a file ends in, where that is not whole.
LOST = "the file is cut off or damaged from here on"
WRONG_TARGET = "its target is missing, of another form or out of range"

#: Few: a record may be large.
READ_BATCH_SIZE = 16

#: Faults that are kept to be named; the number of all is counted.
NAMED = 10


@dataclass(frozen=True)
class Feature:
    """One feature of the spec.

    Attributes:
        stored: what `tf.io.parse_single_example` reads it as.
        finish: traced: what was read -> what it stands for.
        shape, dtype: of that.
    """

    stored: Any
    finish: Callable[[Any], tf.Tensor]
    shape: tuple[int, ...]
    dtype: str


class TFRecord:
    """`tf.train.Example`s in TFRecord files.

    A first pass over the files counts the records, checks their checksums and targets, and needs no more memory
    than a few records.

    Args:
        data_dir: a file, a glob, or a folder; subfolders `train`, `validation`, `test`, or files whose names begin so,
            are the splits.
        features: a spec to each feature by its name:
            `{kind: fixed, shape: [...], dtype: int64, float32 or string}` (the default kind);
            `{kind: padded, ...}`, of any length, padded with zeros or cut to the shape [length];
            `{kind: raw, shape: [...], dtype: uint8}`, the bytes of an array;
            `{kind: image, size: [height, width], resize: stretch, channels: 3}`, an encoded image.
        input, target: which of them is the input, and which the target.
        kind: of the target.
        classes: for classification, how many; for the other kinds it follows from the target's shape.
        names: of the classes, labels or values; null for none.
        scale: what the model multiplies inputs by; `auto` is 1/255 for uint8, and nothing for others.
        compression: none, gzip or zlib.
        test: the part of the records that is the test split, where names tell of no splits.
        split_seed: decides which part.

    Raises:
        ConfigError: for files that are not there or not whole, or a spec that does not describe them.
    """

    def __init__(
        self,
        data_dir: str,
        features: Mapping[str, Mapping[str, Any]],
        input: str,
        target: str,
        kind: str = "classification",
        classes: int | None = None,
        names: Sequence[str] | None = None,
        scale: float | str | None = "auto",
        compression: str = "none",
        test: float = TEST_FRACTION,
        split_seed: int = 0,
    ) -> None:
        self._features = read_spec(features)
        for key, name in (("input", input), ("target", target)):
            if name not in self._features:
                raise ConfigError(f"dataset.{key}={name}: dataset.features has {', '.join(self._features)}")
        self._input, self._target = input, target
        parse_choice(compression, "dataset.compression", COMPRESSION)
        self._compression = "" if compression == "none" else compression.upper()
        self._part = parse_fraction(test)
        self._seed = parse_count(split_seed, "dataset.split_seed")
        found = self._features[input]
        self.inputs = Inputs(found.shape, found.dtype, parse_scale(scale, found))
        self.outputs = describe_outputs(kind, classes, names, self._features[target])
        self._files = find_files(data_dir, SUFFIXES)
        self._counted: dict[str, FileCounts] = {}

    @property
    def splits(self) -> Collection[str]:
        return list_splits(self._files, self._part)

    def load(self, split: str) -> Stream:
        """Records are (the file's number, the record's in it, the serialized example)."""
        group = split if split in self._files else ALL
        if group not in self._counted:
            self._counted[group] = self._count(self._files[group])
        counted = self._counted[group]
        records, length = self._records(self._files[group], counted), counted.total
        if group == ALL:
            records, length = divide_records(records, length, split, self._part, self._seed)
        return Stream(records, length, self._decode, self._make_namer(self._files[group]), counted.faults)

    def _records(self, files: Sequence[str], counted: FileCounts) -> tf.data.Dataset:
        """The records of all files; one that is not whole ends in a record numbered below zero, for what is lost."""
        intact = tf.constant(counted.intact, tf.int64)
        broken = tf.constant([n in counted.broken for n in range(len(files))], tf.int64)

        def read_file(file: tf.Tensor, path: tf.Tensor) -> tf.data.Dataset:
            count = tf.gather(intact, file)
            whole = tf.data.TFRecordDataset(path, self._compression).take(count)
            places = tf.data.Dataset.range(count), whole
            lost = tf.data.Dataset.from_tensors((file, -1 - count, tf.constant(b""))).take(tf.gather(broken, file))
            return tf.data.Dataset.zip((tf.data.Dataset.from_tensors(file).repeat(), *places)).concatenate(lost)

        records = interleave_files(files, read_file)
        return records.apply(tf.data.experimental.assert_cardinality(counted.total))

    def _decode(self, file: tf.Tensor, place: tf.Tensor, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Traced: a record -> (input, target)."""
        is_there = tf.debugging.Assert(place >= 0, [LOST])
        with tf.control_dependencies([is_there]):
            record = tf.identity(record)
        used = {name: self._features[name] for name in (self._input, self._target)}
        found = tf.io.parse_single_example(record, {name: each.stored for name, each in used.items()})
        inputs = used[self._input].finish(found[self._input])
        return inputs, convert_target(self.outputs, used[self._target].finish(found[self._target]))

    def _make_namer(self, files: Sequence[str]) -> Callable[..., str]:
        def name(file: Any, place: Any, record: Any) -> str:
            return f"{files[int(file)]}, record {int(place) if place >= 0 else -1 - int(place)}"

        return name

    def _count(self, files: Sequence[str]) -> FileCounts:
        """One pass over the files, several at once: how many records each has, and what is wrong with them."""
        with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1)) as pool:
            results = list(pool.map(self._count_file, files))
        faults = [fault for _, found in results for fault in found]
        broken = {n for n, (_, found) in enumerate(results) if any(LOST in fault for fault in found)}
        return FileCounts([count for count, _ in results], frozenset(broken), tuple(faults[:NAMED]))

    def _count_file(self, path: str) -> tuple[int, list[str]]:
        """(whole records, what is wrong with the file and with targets in it)."""
        records = tf.data.TFRecordDataset(path, self._compression)
        try:
            return self._count_good(records), []
        except FAILURES as error:
            if isinstance(error, tf.errors.NotFoundError | tf.errors.PermissionDeniedError):
                raise ConfigError(f"dataset.data_dir: {path} cannot be read ({error.message})") from error
        whole = records.ignore_errors()
        count = int(whole.reduce(tf.constant(0, tf.int64), lambda total, _: total + 1))
        faults = [f"{path}, record {place}: {WRONG_TARGET}" for place in self._wrong_targets(whole, count)]
        try:
            for _ in records.batch(READ_BATCH_SIZE):
                pass
        except FAILURES:
            faults.append(f"{path}, record {count}: {LOST}")
        return count, faults

    def _count_good(self, records: tf.data.Dataset) -> int:
        """How many records there are; fails where one is not whole, or its target is wrong."""
        sizes = records.batch(READ_BATCH_SIZE).map(self._check_targets, num_parallel_calls=tf.data.AUTOTUNE)
        return int(sizes.reduce(tf.constant(0, tf.int64), lambda total, size: total + size))

    def _check_targets(self, records: tf.Tensor) -> tf.Tensor:
        """Traced: how many serialized examples there are, once their targets are found right."""
        feature = self._features[self._target]
        found = tf.io.parse_example(records, {self._target: feature.stored})[self._target]
        checks = []
        last = largest_target(self.outputs)
        if last is not None and isinstance(feature.stored, tf.io.FixedLenFeature) and feature.stored.dtype != tf.string:
            checks.append(tf.debugging.Assert(tf.reduce_all((found >= 0) & (found <= last)), [WRONG_TARGET]))
        with tf.control_dependencies(checks):
            return tf.shape(records, tf.int64)[0]

    def _wrong_targets(self, records: tf.data.Dataset, count: int) -> list[int]:
        """The places of the first few records whose targets are missing or out of range."""

        def if_good(place: tf.Tensor, record: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([self._check_targets(record[None])]):
                return tf.identity(place)

        good = np.zeros(count, bool)
        for places in records.enumerate().map(if_good).ignore_errors().batch(READ_BATCH_SIZE).as_numpy_iterator():
            good[places] = True
        return [int(place) for place in np.flatnonzero(~good)[:NAMED]]


@dataclass(frozen=True)
class FileCounts:
    """What the first pass has found.

    Attributes:
        intact: whole records in each file.
        broken: the numbers of the files that are not whole.
        faults: the first few things that are wrong, in words.
    """

    intact: list[int]
    broken: frozenset[int]
    faults: tuple[str, ...]

    @property
    def total(self) -> int:
        """Records, with one for each file that is not whole."""
        return sum(self.intact) + len(self.broken)


# ---------------------------------------------------------------------------------------------
# The spec
# ---------------------------------------------------------------------------------------------


def read_spec(features: Any) -> dict[str, Feature]:
    """`dataset.features` as parsers of its features."""
    if not isinstance(features, Mapping) or not features:
        raise ConfigError(
            f"dataset.features={features}: expected a spec to each feature, such as "
            "{image: {kind: image, size: [32, 32]}, label: {dtype: int64}}"
        )
    return {str(name): read_feature(f"dataset.features.{name}", spec) for name, spec in features.items()}


def read_feature(key: str, spec: Any) -> Feature:
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{key}={spec}: expected keys such as {{shape: [], dtype: int64}}")
    options = dict(spec)
    kind = parse_choice(options.pop("kind", "fixed"), f"{key}.kind", list(KEYS))
    for name in options:
        if name not in KEYS[kind]:
            raise ConfigError(f"{key}.{name}: a feature of kind {kind} takes {', '.join(KEYS[kind])}")
    if kind == "image":
        return make_image_feature(key, options)
    shape = parse_shape(options.get("shape", []), f"{key}.shape")
    dtype = options.get("dtype", "uint8" if kind == "raw" else "float32")
    return {"fixed": make_fixed_feature, "padded": make_padded_feature, "raw": make_raw_feature}[kind](
        key, shape, dtype
    )


def make_image_feature(key: str, options: Mapping[str, Any]) -> Feature:
    if "size" not in options:
        raise ConfigError(f"{key}.size: is missing; expected [height, width]")
    channels = options.get("channels", 3)
    decode = images.make_image_decoder(options["size"], options.get("resize", "stretch"), channels, key)
    return Feature(tf.io.FixedLenFeature([], tf.string), decode, (*options["size"], channels), "uint8")


def make_fixed_feature(key: str, shape: tuple[int, ...], dtype: Any) -> Feature:
    parse_choice(dtype, f"{key}.dtype", STORED)
    return Feature(tf.io.FixedLenFeature(shape, dtype), tf.identity, shape, dtype)


def make_padded_feature(key: str, shape: tuple[int, ...], dtype: Any) -> Feature:
    parse_choice(dtype, f"{key}.dtype", STORED[:2])
    if len(shape) != 1:
        raise ConfigError(f"{key}.shape={list(shape)}: a padded feature has the shape [length]")

    def finish(found: tf.SparseTensor) -> tf.Tensor:
        values = found.values[: shape[0]]
        return tf.ensure_shape(tf.pad(values, [[0, shape[0] - tf.size(values)]]), shape)

    return Feature(tf.io.VarLenFeature(dtype), finish, shape, dtype)


def make_raw_feature(key: str, shape: tuple[int, ...], dtype: Any) -> Feature:
    parse_choice(dtype, f"{key}.dtype", RAW)

    def finish(found: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.io.decode_raw(found, dtype), shape)

    return Feature(tf.io.FixedLenFeature([], tf.string), finish, shape, dtype)


def parse_shape(shape: Any, key: str) -> tuple[int, ...]:
    is_list = isinstance(shape, Sequence) and not isinstance(shape, str)
    if not is_list or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape):
        raise ConfigError(f"{key}={shape}: expected a list of sizes; [] for a single value")
    return tuple(shape)


def parse_scale(scale: Any, feature: Feature) -> float | None:
    if scale == "auto":
        return 1 / 255 if feature.dtype == "uint8" else None
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise ConfigError(f"dataset.scale={scale}: expected auto, a number or null")
    return float(scale)


def describe_outputs(kind: Any, classes: Any, names: Any, feature: Feature) -> Outputs:
    """What the targets are."""
    found: Any = parse_choice(kind, "dataset.kind", get_args(Kind))
    size = max(1, math.prod(feature.shape))
    if feature.dtype == "string":
        raise ConfigError("dataset.target: is text; a TFRecord's targets are numbers")
    if kind in ("classification", "binary") and size != 1:
        raise ConfigError(f"dataset.kind={kind}: the target has the shape {list(feature.shape)}, expected one number")
    said = parse_words(names, "dataset.names")
    if kind != "classification":
        if classes is not None:
            raise ConfigError(f"dataset.classes={classes}: is for kind=classification")
        expected = 2 if kind == "binary" else size
        outputs = Outputs(found, feature.shape or (1,), tuple(said) or None)
    else:
        if classes is None and not said:
            raise ConfigError(
                "dataset.classes: is missing; say how many classes there are, or their names in dataset.names"
            )
        expected = parse_count(len(said) if classes is None else classes, "dataset.classes", 2)
        outputs = Outputs(found, (expected,), tuple(said) or None)
    if said and len(said) != expected:
        raise ConfigError(f"dataset.names={said}: are {len(said)}, expected {expected}")
    return outputs


def largest_target(outputs: Outputs) -> int | None:
    """The largest target there may be; None for any."""
    if outputs.kind == "regression":
        return None
    return outputs.shape[-1] - 1 if outputs.kind == "classification" else 1


def convert_target(outputs: Outputs, target: tf.Tensor) -> tf.Tensor:
    if outputs.kind == "classification":
        return tf.cast(tf.reshape(target, []), tf.int32)
    return tf.cast(tf.reshape(target, outputs.shape), tf.float32)
