"""Dataset source: tensorflow-datasets, prepared in a folder or downloaded to it.

A prepared dataset describes its own examples, so it needs neither the code that prepared it nor a network.
https://www.tensorflow.org/datasets
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tensorflow as tf
from filelock import FileLock

from scaleflow.dataset.batches.records import interleave_files
from scaleflow.dataset.reading.images import ImageSize
from scaleflow.dataset.reading.targets import describe_outputs
from scaleflow.dataset.reading.text import Text
from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import Inputs, Outputs, Preprocessing, Standardize, Stream
from scaleflow.interfaces.options import check_options

#: Timeout for a connection to the host of a download.
PROBE_SECONDS = 5.0

#: Input dtypes that are kept. Other numbers become float32.
KEPT_TYPES = ("uint8", "int32", "float32")


class Tfds:
    """One dataset of tensorflow-datasets.

    The kind of the targets follows from the feature: a class label is classification (binary for two classes), a
    sequence of class labels is multi-label, numbers are regression.

    conf/dataset/tfds.yaml describes the arguments.

    Raises:
        ConfigError: if tensorflow-datasets is not installed, or an option names a dataset or a feature that does not
            exist and can't be downloaded.
    """

    @check_options("dataset")
    def __init__(
        self,
        name: str | None = None,
        data_dir: str | None = None,
        version: str | None = None,
        splits: Mapping[str, str] | None = None,
        input: str | None = None,  # the key in the config
        target: str | None = None,
        size: ImageSize | None = None,
        vocabulary: int = 10_000,
        tokens: int = 250,
        standardize: Standardize = "lower_and_strip_punctuation",
    ) -> None:
        if importlib.util.find_spec("tensorflow_datasets") is None:
            raise ConfigError("dataset: tensorflow-datasets is not installed; pip install 'scaleflow[tfds]'")
        if not isinstance(name, str) or not re.fullmatch(r"\w+(/[\w.-]+)?", name):
            raise ConfigError(f"dataset.name={name}: expected the name of a dataset, such as mnist or glue/cola")
        self._name = name
        default_folder = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
        self._folder = Path(default_folder if data_dir is None else data_dir).expanduser()
        self._version = None if version is None else str(version)
        self._splits = dict(splits or {})
        self._keys = input, target
        self._size = size
        self._text = Text(vocabulary, tokens, standardize)
        prepared = find_prepared(self._folder, self._name, self._version)
        self.notes = (
            () if prepared else (f"dataset.name={name}: is not in {self._folder} yet; scaleflow downloads it to there",)
        )

    @cached_property
    def inputs(self) -> Inputs:
        feature = self._features[0]
        if is_text_feature(feature):
            return Inputs((), "string")
        if is_image(feature):
            shape = self._image_shape(feature)
            return Inputs(shape, "uint8", scale=1 / 255) if feature.np_dtype == np.uint8 else Inputs(shape, "float32")
        shape = self._static_shape(feature, "input")
        dtype = np.dtype(feature.np_dtype).name
        return Inputs(shape, dtype if dtype in KEPT_TYPES else "float32")

    @cached_property
    def outputs(self) -> Outputs:
        feature = self._features[1]
        labels = find_class_label(feature)
        if labels is not None:
            names = [labels.int2str(number) for number in range(labels.num_classes)]
            return describe_outputs("multi_label" if is_sequence(feature) else "auto", len(names), names)
        return Outputs("regression", self._static_shape(feature, "target") or (1,))

    @cached_property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self._splits, *self._builder.info.splits]))

    @cached_property
    def preprocessing(self) -> Preprocessing | None:
        return self._text if self.inputs.dtype == "string" else None

    def load(self, split: str) -> Stream:
        """Returns records (file, row, serialized example)."""
        instruction = self._splits.get(split, split)
        try:
            info = self._builder.info.splits[instruction]
        except (ValueError, KeyError) as error:
            raise ConfigError(f"dataset.splits.{split}={instruction}: {read_reason(error)}") from None
        parts = [(part.filename, part.skip, part.take) for part in info.file_instructions]

        def name(file: bytes, row: int, serialized: bytes) -> str:
            return f"{file.decode()}, example {row}"

        return Stream(read_files(parts), info.num_examples, self._decoder(), name=name)

    def _decoder(self) -> Callable[..., Any]:
        import tensorflow_datasets as tfds

        key, target = self._chosen_keys
        features = self._builder.info.features
        used_features = tfds.features.FeaturesDict({key: features[key], target: features[target]})

        def decode(file: tf.Tensor, row: tf.Tensor, serialized: tf.Tensor) -> Any:
            example = used_features.deserialize_example(serialized)
            return self._input_of(example[key]), self._target_of(example[target])

        return decode

    def _input_of(self, value: tf.Tensor) -> tf.Tensor:
        inputs = self.inputs
        if self._size is not None and is_image(self._features[0]):
            resized = tf.image.resize(value, self._size, antialias=True)
            value = tf.round(resized) if inputs.dtype == "uint8" else resized
        value = value if inputs.dtype == "string" else tf.cast(value, inputs.dtype)
        return tf.ensure_shape(value, inputs.shape)

    def _target_of(self, value: tf.Tensor) -> tf.Tensor:
        outputs = self.outputs
        if outputs.kind == "multi_label":
            return tf.minimum(tf.reduce_sum(tf.one_hot(value, *outputs.shape), axis=0), 1.0)
        return tf.reshape(tf.cast(value, outputs.target_dtype), outputs.target_shape)

    @cached_property
    def _builder(self) -> Any:
        """The prepared dataset. The first process that needs it downloads it if it is missing."""
        import tensorflow_datasets as tfds

        prepared = find_prepared(self._folder, self._name, self._version)
        if prepared is None:
            prepared = download_dataset(self._folder, self._name, self._version)
        builder = tfds.builder_from_directory(prepared)
        if builder.info.file_format != tfds.core.FileFormat.TFRECORD:
            raise ConfigError(
                f"dataset.name={self._name}: {prepared} contains {builder.info.file_format.value} files; prepare it "
                "as tfrecord"
            )
        return builder

    @cached_property
    def _chosen_keys(self) -> tuple[str, str]:
        features = self._builder.info.features
        supervised = self._builder.info.supervised_keys
        available = list(features.keys()) if hasattr(features, "keys") else []
        default_keys = supervised if supervised and all(isinstance(key, str) for key in supervised) else (None, None)
        keys = []
        for name, chosen, supervised_key in zip(("input", "target"), self._keys, default_keys[:2], strict=True):
            key = chosen or supervised_key
            if key is None or key not in available:
                option = f"dataset.{name}={'null' if chosen is None else chosen}"
                raise ConfigError(f"{option}: choose a feature of {self._name}: {', '.join(available)}")
            keys.append(key)
        return keys[0], keys[1]

    @cached_property
    def _features(self) -> tuple[Any, Any]:
        key, target = self._chosen_keys
        features = self._builder.info.features
        return features[key], features[target]

    def _image_shape(self, feature: Any) -> tuple[int, ...]:
        height, width, channels = feature.shape
        if self._size is not None:
            height, width = self._size
        if height is None or width is None:
            raise ConfigError(
                "dataset.size=null: the images differ in size; set the size to which all are resized, such as "
                "dataset.size=[64,64]"
            )
        return height, width, channels or 3

    def _static_shape(self, feature: Any, name: str) -> tuple[int, ...]:
        dtype = getattr(feature, "np_dtype", None)
        shape = getattr(feature, "shape", None)
        is_numeric = not isinstance(dtype, dict | None) and np.dtype(dtype).kind in "biuf"
        if not is_numeric or shape is None or None in shape:
            key = dict(zip(("input", "target"), self._chosen_keys, strict=True))[name]
            raise ConfigError(
                f"dataset.{name}={key}: expected an image, a text, class labels or numbers of one shape, but it is "
                f"{type(feature).__name__}(shape={shape})"
            )
        return tuple(shape)


def is_image(feature: Any) -> bool:
    import tensorflow_datasets as tfds

    return isinstance(feature, tfds.features.Image)


def is_text_feature(feature: Any) -> bool:
    import tensorflow_datasets as tfds

    is_string = isinstance(feature, tfds.features.Tensor) and np.dtype(feature.np_dtype).kind in "OSU"
    return is_string and feature.shape == ()


def is_sequence(feature: Any) -> bool:
    import tensorflow_datasets as tfds

    return isinstance(feature, tfds.features.Sequence)


def find_class_label(feature: Any) -> Any:
    """Returns the class label of a feature or of the elements of a sequence, if there is one."""
    import tensorflow_datasets as tfds

    inner = feature.feature if is_sequence(feature) else feature
    return inner if isinstance(inner, tfds.features.ClassLabel) and inner.num_classes else None


def read_files(parts: Sequence[tuple[str, int, int]]) -> tf.data.Dataset:
    """Returns records (file, row, serialized example) of parts (file, rows to skip, rows to take), read in parallel."""
    files, skips, takes = zip(*parts, strict=True)

    def read_part(index: tf.Tensor, file: tf.Tensor) -> tf.data.Dataset:
        skip, take = (tf.gather(tf.constant(counts, tf.int64), index) for counts in (skips, takes))
        numbered = tf.data.TFRecordDataset(file).enumerate().skip(skip).take(take)
        return numbered.map(lambda row, serialized: (file, row, serialized))

    return interleave_files(files, read_part)


def find_prepared(folder: Path, name: str, version: str | None) -> Path | None:
    """Returns the folder of a prepared dataset: `folder/name/version`, or `folder/name/config/version` if it has
    configs.

    Raises ConfigError if several configs are prepared, and `name` contains none.
    """
    root = folder / name
    prepared = find_newest_version(root, version)
    if prepared is not None or "/" in name:
        return prepared
    configs: dict[str, Path] = {}
    for path in list_entries(root):
        newest = find_newest_version(path, version)
        if newest is not None:
            configs[path.name] = newest
    if len(configs) > 1:
        raise ConfigError(
            f"dataset.name={name}: {root} has {', '.join(configs)}; choose one, such as "
            f"dataset.name={name}/{next(iter(configs))}"
        )
    return next(iter(configs.values()), None)


def find_newest_version(root: Path, version: str | None) -> Path | None:
    """Returns the folder of the prepared version, or of the newest one for None."""
    versions = [path for path in list_entries(root) if re.fullmatch(r"\d+\.\d+\.\d+", path.name)]
    prepared = [path for path in versions if (path / "dataset_info.json").is_file()]
    if version is not None:
        prepared = [path for path in prepared if path.name == version]
    return max(prepared, key=lambda path: [int(part) for part in path.name.split(".")], default=None)


def list_entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def download_dataset(folder: Path, name: str, version: str | None) -> Path:
    """Downloads and prepares a dataset, unless another process does so first. Progress goes to the log.

    Raises ConfigError if there is no such dataset, no network, or no space. It says where to put a prepared copy.
    """
    import tensorflow_datasets as tfds

    where = f"{folder / name / (version or 'VERSION')} (dataset_info.json, features.json, the .tfrecord files)"
    try:
        builder = tfds.builder(name, data_dir=str(folder), **({} if version is None else {"version": version}))
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{name.replace('/', '-')}.lock"):
            prepared = find_prepared(folder, name, version)
            if prepared is None:
                check_reachable(builder.url_infos)
                builder.download_and_prepare()
        return prepared or Path(builder.data_dir)
    except tfds.core.registered.DatasetNotFoundError:
        similar = difflib.get_close_matches(
            name.partition("/")[0], tfds.list_builders(with_community_datasets=False), n=1
        )
        hint = f"did you mean {similar[0]}? Or put" if similar else "put"
        raise ConfigError(
            f"dataset.name={name}: tensorflow-datasets has no dataset of that name; {hint} a prepared one at {where}, "
            "or set dataset.data_dir to its folder"
        ) from None
    except Exception as error:  # the dataset's own code can raise anything
        options = f"dataset.name={name}" + ("" if version is None else f" with dataset.version={version}")
        reason = f"{type(error).__name__}: {read_reason(error)}"
        raise ConfigError(
            f"{options}: is not prepared, and could not be downloaded ({reason}); put a prepared copy at {where}, or "
            "set dataset.data_dir to its folder"
        ) from error


def check_reachable(urls: Iterable[str]) -> None:
    """Raises ConnectionError if the first host of a download does not answer.

    Without a network, tensorflow-datasets retries for minutes.
    """
    if any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in os.environ):
        return
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            continue
        try:
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
            socket.create_connection((parts.hostname, port), timeout=PROBE_SECONDS).close()
        except OSError as error:
            raise ConnectionError(f"{parts.hostname} does not answer ({error})") from error
        return
