"""Dataset source: TFRecord files."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.records import BLOCK, divide_records, interleave_files, largest_target, reading_options
from scaleflow.dataset.batches.rows import to_rows
from scaleflow.dataset.batches.unreadable import FAILURES
from scaleflow.dataset.reading import images
from scaleflow.dataset.reading.division import Division, find_keys, find_strata, is_by_target, read_keys
from scaleflow.dataset.reading.files import ALL, RECORD_SUFFIXES, TEST_FRACTION, find_files, list_splits
from scaleflow.dataset.reading.learned_cache import LearnedCache
from scaleflow.dataset.reading.targets import check_weights_name
from scaleflow.errors import ConfigError, RunError, read_reason
from scaleflow.interfaces import DivisionKeys, Inputs, Kind, Outputs, Split, Stream
from scaleflow.interfaces.options import AtLeastTwo, Seed, Shape, TestFraction, Words, check_option, check_options

Array = np.ndarray[Any, Any]

RawType = Literal["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"]

#: Message for the last record of a damaged file.
DAMAGED = "the file is cut off or damaged from here on"
WRONG_TARGET = "its {} is missing, has another shape or dtype, or is out of range"

#: Small, because a record may be large.
READ_BATCH_SIZE = 16

#: Maximum number of faults that are recorded.
MAX_FAULTS = 10


@dataclass(frozen=True)
class Feature:
    """Parser of one feature of the spec."""

    stored: Any  # spec for `tf.io.parse_single_example`
    finish: Callable[[Any], tf.Tensor]  # parsed feature -> value. Traced.
    #: Shape and dtype of the value
    shape: tuple[int, ...]
    dtype: str


class TFRecord:
    """Reads `tf.train.Example`s from TFRecord files.

    A first pass over the files counts the records, and checks their checksums and targets. It holds only a few
    records in memory.

    conf/dataset/tfrecord.yaml describes the arguments.

    Raises:
        ConfigError: if files are missing or unreadable, or the spec does not describe them.
    """

    @check_options("dataset")
    def __init__(  # noqa: PLR0913  # the keys of a config
        self,
        data_dir: str,
        features: Mapping[str, Mapping[str, Any]],
        input: str,
        target: str,
        weights: str | None = None,
        kind: Kind = "classification",
        classes: int | None = None,
        names: Words | None = None,
        scale: float | str | None = "auto",
        compression: Literal["none", "gzip", "zlib"] = "none",
        test: TestFraction = TEST_FRACTION,
        split_seed: Seed = 0,
        cache_dir: str | None = None,
        split: Split | None = None,
    ) -> None:
        self.learned_cache = LearnedCache(cache_dir, data_dir)
        self._features = read_spec(features)
        self._division = Division(split or Split("random"), test, split_seed)
        keys = find_keys(self._division.rule, weights)
        for key, name in (("dataset.input", input), ("dataset.target", target), *keys.items()):
            if name not in self._features:
                raise ConfigError(
                    f"{key}={name}: there is no such feature; dataset.features has {', '.join(self._features)}"
                )
        if weights is not None:
            check_weights_name(weights, [input], target, key="dataset.input")
            feature = self._features[weights]
            if feature.dtype == "string" or math.prod(feature.shape) != 1 or features[weights].get("kind") == "padded":
                raise ConfigError(f"dataset.weights={weights}: expected a feature that is one number in each record")
        self._target = target
        self._weights = weights
        self._wrong = WRONG_TARGET.format("target" if weights is None else "target or its weight")
        self._used = [name for name in (input, target, weights) if name is not None]
        self._compression = "" if compression == "none" else compression.upper()
        input_feature = self._features[input]
        self.inputs = Inputs(input_feature.shape, input_feature.dtype, parse_scale(scale, input_feature))
        is_picture = features[input].get("kind") == "image"
        self.decoders = {"": input_feature.finish} if is_picture else {}
        self.outputs = describe_feature_outputs(kind, classes, names or (), feature=self._features[target])
        self._files = find_files(data_dir, RECORD_SUFFIXES)
        self._find_counts = functools.cache(lambda group: self._recall_counts(self._files[group]))
        self._divide = functools.cache(self._draw_splits)

    @property
    def splits(self) -> Collection[str]:
        if ALL in self._files and self._division.rule.by == "column":
            return tuple(self._divide(ALL)[0])
        return list_splits(self._files, self._division.test)

    def load(self, split: str) -> Stream:
        """Returns records (file index, record index in the file, serialized example)."""
        group = split if split in self._files else ALL
        files = self._files[group]
        counts = self._find_counts(group)
        division = self._division
        records = self._records(files, counts)
        length = counts.total
        has_keys = bool(find_keys(division.rule)) or is_by_target(division.rule)
        if group == ALL and not has_keys:
            records, length = divide_records(records, length, split, test=division.test, seed=division.seed)

        def name(file: Any, place: Any, record: Any) -> str:
            return f"{files[int(file)]}, record {int(place) if place >= 0 else -1 - int(place)}"

        stream = Stream(records, length, self._decode, name=name, faults=counts.faults)
        if not has_keys:
            return stream
        masks, keys = self._divide(group)
        whole = to_rows(replace(stream, **vars(keys)))
        return whole.select(masks[split]) if group == ALL else whole  # type: ignore[return-value]

    def _draw_splits(self, group: str) -> tuple[Mapping[str, Array], DivisionKeys]:
        """Returns the records of each split, [n] bool, and the values that divide all records."""
        rule = self._division.rule
        counts = self._find_counts(group)

        def read(name: str) -> Array:
            return self._read_feature(self._records(self._files[group], counts), name)

        keys = read_keys(rule, read, lambda row: f"example {row}")
        if is_by_target(rule):
            keys = replace(keys, strata=find_strata(np.ravel(read(self._target)), self.outputs))
        if group == ALL:
            return self._division.draw(keys, counts.total, counts.total), keys
        return {}, keys

    def _read_feature(self, records: tf.data.Dataset, name: str) -> Array:
        """Reads a feature with a single value from all records: [n], texts as strings."""
        feature = self._features[name]
        if math.prod(feature.shape) != 1 or not isinstance(feature.stored, tf.io.FixedLenFeature):
            raise ConfigError(f"dataset.split: the feature {name} has no single value; its shape must be []")

        def parse(file: tf.Tensor, place: tf.Tensor, record: tf.Tensor) -> tf.Tensor:
            return tf.reshape(tf.io.parse_example(record, {name: feature.stored})[name], [-1])

        try:
            values = np.concatenate(list(records.batch(BLOCK).map(parse).as_numpy_iterator()))
        except FAILURES as error:
            raise ConfigError(
                f"dataset.split: the feature {name} cannot be read of all records: {read_reason(error)}"
            ) from error
        if values.dtype != object:
            return values
        return np.array([text.decode(errors="replace") for text in values], object)

    def _records(self, files: Sequence[str], counted: FileCounts) -> tf.data.Dataset:
        """Returns the records of all files. A damaged file ends in a record with a negative index."""
        intact = tf.constant(counted.intact, tf.int64)
        broken = tf.constant([n in counted.broken for n in range(len(files))], tf.int64)

        def read_file(file: tf.Tensor, path: tf.Tensor) -> tf.data.Dataset:
            count = tf.gather(intact, file)
            records_of_file = tf.data.TFRecordDataset(path, self._compression).take(count)
            indexed = tf.data.Dataset.range(count), records_of_file
            lost = tf.data.Dataset.from_tensors((file, -1 - count, tf.constant(b""))).take(tf.gather(broken, file))
            return tf.data.Dataset.zip((tf.data.Dataset.from_tensors(file).repeat(), *indexed)).concatenate(lost)

        records = interleave_files(files, read_file)
        return records.apply(tf.data.experimental.assert_cardinality(counted.total)).with_options(reading_options())

    def _decode(self, file: tf.Tensor, place: tf.Tensor, record: tf.Tensor) -> tuple[tf.Tensor, ...]:
        is_intact = tf.debugging.Assert(place >= 0, [DAMAGED])
        with tf.control_dependencies([is_intact]):
            record = tf.identity(record)
        parsed = tf.io.parse_single_example(record, {name: self._features[name].stored for name in self._used})
        inputs, target, *weights = (self._features[name].finish(parsed[name]) for name in self._used)
        target = tf.reshape(tf.cast(target, self.outputs.target_dtype), self.outputs.target_shape)
        return inputs, target, *(tf.reshape(tf.cast(weight, tf.float32), ()) for weight in weights)

    def _recall_counts(self, files: Sequence[str]) -> FileCounts:
        """Returns the result of the first pass over files, of this run or of an earlier one."""

        def learn() -> list[Any]:
            counts = self._count(files)
            return [counts.intact, sorted(counts.broken), counts.faults]

        checked = {name: self._features[name].stored for name in self._used[1:]}
        options = [self._compression, self._target, self._weights, checked, self.outputs]
        intact, broken, faults = self.learned_cache.recall("records", files, options, learn=learn)
        return FileCounts(intact, frozenset(broken), tuple(faults))

    def _count(self, files: Sequence[str]) -> FileCounts:
        """Reads the files once, several in parallel. Counts records, and finds faults."""
        with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1)) as pool:
            results = list(pool.map(self._count_file, files))
        counts: list[int] = []
        faults: list[str] = []
        broken: set[int] = set()
        for file, (count, file_faults) in enumerate(results):
            counts.append(count)
            faults += file_faults
            if any(DAMAGED in fault for fault in file_faults):
                broken.add(file)
        return FileCounts(counts, frozenset(broken), tuple(faults[:MAX_FAULTS]))

    def _count_file(self, path: str) -> tuple[int, list[str]]:
        """Returns (number of intact records, faults of the file and of targets in it)."""
        records = tf.data.TFRecordDataset(path, self._compression).with_options(reading_options())
        try:
            return self._count_good(records), []
        except FAILURES as error:
            if isinstance(error, tf.errors.NotFoundError | tf.errors.PermissionDeniedError):
                raise ConfigError(f"dataset.data_dir: {path} cannot be read ({read_reason(error)})") from error
        intact = records.ignore_errors()
        count = int(intact.reduce(tf.constant(0, tf.int64), lambda total, _: total + 1))
        faults = [f"{path}, record {index}: {self._wrong}" for index in self._wrong_targets(intact, count)]
        try:
            for _ in records.batch(READ_BATCH_SIZE):
                pass
        except FAILURES:
            faults.append(f"{path}, record {count}: {DAMAGED}")
        return count, faults

    def _count_good(self, records: tf.data.Dataset) -> int:
        """Returns the number of records; raises if a record is damaged or its target is wrong."""
        sizes = records.batch(READ_BATCH_SIZE).map(self._check_targets, num_parallel_calls=tf.data.AUTOTUNE)
        return int(sizes.reduce(tf.constant(0, tf.int64), lambda total, size: total + size))

    def _check_targets(self, records: tf.Tensor) -> tf.Tensor:
        """Returns the number of serialized examples, after a check of their targets and weights. Traced."""
        parsed = tf.io.parse_example(records, {name: self._features[name].stored for name in self._used[1:]})
        checks = []
        for name, last in ((self._target, largest_target(self.outputs)), (self._weights, tf.float32.max)):
            values = parsed.get(name)
            if last is not None and isinstance(values, tf.Tensor) and values.dtype != tf.string:
                values = tf.cast(values, tf.float64)
                checks.append(tf.debugging.Assert(tf.reduce_all((values >= 0) & (values <= last)), [self._wrong]))
        with tf.control_dependencies(checks):
            return tf.shape(records, tf.int64)[0]

    def _wrong_targets(self, records: tf.data.Dataset, count: int) -> list[int]:
        """Returns the indices of the first records whose targets or weights are missing or out of range."""

        def if_good(place: tf.Tensor, record: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([self._check_targets(record[None])]):
                return tf.identity(place)

        good = np.zeros(count, bool)
        for indices in records.enumerate().map(if_good).ignore_errors().batch(READ_BATCH_SIZE).as_numpy_iterator():
            good[indices] = True
        return [int(place) for place in np.flatnonzero(~good)[:MAX_FAULTS]]


@dataclass(frozen=True)
class FileCounts:
    """Result of the first pass."""

    intact: list[int]  # number of intact records in each file
    broken: frozenset[int]  # indices of the damaged files
    faults: tuple[str, ...]  # the first faults, in words

    @property
    def total(self) -> int:
        """Number of records, including one for each damaged file."""
        return sum(self.intact) + len(self.broken)


def read_spec(features: Any) -> dict[str, Feature]:
    if not isinstance(features, Mapping) or not features:
        raise ConfigError(
            f"dataset.features={features}: expected a specification of each feature, such as {{image: {{kind: image, "
            "size: [32, 32]}, label: {dtype: int64}}"
        )
    return {str(name): read_feature(f"dataset.features.{name}", spec) for name, spec in features.items()}


def read_feature(key: str, spec: Any) -> Feature:
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{key}={spec}: expected keys such as {{shape: [], dtype: int64}}")
    options = dict(spec)
    kind = options.pop("kind", "fixed")
    check_option(kind, Literal["fixed", "padded", "raw", "image"], f"{key}.kind")
    make = MAKERS[kind]
    accepted = list(inspect.signature(make).parameters)
    for name in options:
        if name not in accepted:
            raise ConfigError(f"{key}.{name}: a feature of kind {kind} accepts {', '.join(accepted)}")
    if kind == "image" and "size" not in options:
        raise ConfigError(f"{key}.size: is missing; expected [height, width]")
    feature = check_options(key)(make)(**options)
    if kind == "padded" and len(feature.shape) != 1:
        raise ConfigError(f"{key}.shape={list(feature.shape)}: a padded feature has the shape [length]")
    return feature


def make_image_feature(
    size: images.ImageSize, resize: images.Resize = "stretch", channels: images.Channels = 3
) -> Feature:
    decode = images.make_image_decoder(size, resize, channels)
    return Feature(tf.io.FixedLenFeature([], tf.string), decode, (*size, channels), dtype="uint8")


def make_fixed_feature(shape: Shape = (), dtype: Literal["int64", "float32", "string"] = "float32") -> Feature:
    return Feature(tf.io.FixedLenFeature(tuple(shape), dtype), tf.identity, tuple(shape), dtype=dtype)


def make_padded_feature(shape: Shape = (), dtype: Literal["int64", "float32"] = "float32") -> Feature:
    def finish(parsed: tf.SparseTensor) -> tf.Tensor:
        values = parsed.values[: shape[0]]
        return tf.ensure_shape(tf.pad(values, [[0, shape[0] - tf.size(values)]]), shape)

    return Feature(tf.io.VarLenFeature(dtype), finish, tuple(shape), dtype=dtype)


def make_raw_feature(shape: Shape = (), dtype: RawType = "uint8") -> Feature:
    def finish(parsed: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.io.decode_raw(parsed, dtype), shape)

    return Feature(tf.io.FixedLenFeature([], tf.string), finish, tuple(shape), dtype=dtype)


#: How a feature is made from the other keys of its specification, by its kind.
MAKERS: Mapping[str, Callable[..., Feature]] = {
    "fixed": make_fixed_feature,
    "padded": make_padded_feature,
    "raw": make_raw_feature,
    "image": make_image_feature,
}


def parse_scale(scale: Any, feature: Feature) -> float | None:
    if scale == "auto":
        return 1 / 255 if feature.dtype == "uint8" else None
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise ConfigError(f"dataset.scale={scale}: expected auto, a number or null")
    return float(scale)


def describe_feature_outputs(kind: Kind, classes: Any, labels: Sequence[str], feature: Feature) -> Outputs:
    size = max(1, math.prod(feature.shape))
    if feature.dtype == "string":
        raise ConfigError("dataset.target: is text, but targets must be numbers")
    if kind in ("classification", "binary") and size != 1:
        raise ConfigError(f"dataset.kind={kind}: the target has the shape {list(feature.shape)}, expected one number")
    if kind == "classification":
        if classes is None and not labels:
            raise ConfigError(
                "dataset.classes: is missing; set the number of classes, or their names with dataset.names"
            )
        expected = len(labels) if classes is None else classes
        check_option(expected, AtLeastTwo, "dataset.classes")
        shape: tuple[int, ...] = (expected,)
    else:
        if classes is not None:
            raise ConfigError(f"dataset.classes={classes}: is for kind=classification")
        expected = 2 if kind == "binary" else size
        shape = feature.shape or (1,)
    if labels and len(labels) != expected:
        raise ConfigError(f"dataset.names={labels}: has {len(labels)} names, expected {expected}")
    return Outputs(kind, shape, tuple(labels) or None)


def read_feature_values(
    path: str, name: str, spec: Mapping[str, Any], compression: str, at_once: int
) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the values [b, ...] of a feature of a file in order. A picture stays encoded.

    Args:
        path: of the file.
        name: of the feature.
        spec: the description of the feature in `dataset.features`.
        compression: of the file.
        at_once: maximum number of values in a batch.

    Raises:
        RunError: if the file is damaged, or a record does not fit `spec`.
    """
    feature = read_feature(f"dataset.features.{name}", spec)

    def parse(record: tf.Tensor) -> tf.Tensor:
        stored = tf.io.parse_single_example(record, {name: feature.stored})[name]
        return stored if spec.get("kind") == "image" else feature.finish(stored)

    records = tf.data.TFRecordDataset(path, compression).with_options(reading_options())
    intact = 0
    try:
        values = records.map(parse, num_parallel_calls=tf.data.AUTOTUNE).batch(at_once).prefetch(1)
        yield from values.as_numpy_iterator()
    except tf.errors.OpError as error:
        try:
            for _ in records:
                intact += 1
        except tf.errors.OpError:
            raise RunError(f"{path}: record {intact + 1} is damaged, or the file is cut off there") from error
        reason = read_reason(error).rpartition("}} ")[2][:300]
        raise RunError(f"{path}: a record is not as dataset.features says: {reason}") from error
