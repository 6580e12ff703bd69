"""Dataset source: datasets of the library datasets, from a folder or from the Hugging Face hub."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.npz import describe_whole_floats
from scaleflow.dataset.reading.division import Division, find_keys, find_strata, is_by_target, read_keys
from scaleflow.dataset.reading.files import TEST_FRACTION, expand_data_dir
from scaleflow.dataset.reading.images import Channels, ImageSize, Resize, make_image_decoder
from scaleflow.dataset.reading.targets import OneKind, check_weights_name, describe_outputs
from scaleflow.dataset.reading.text import Text
from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import DivisionKeys, EarlierState, Inputs, Outputs, Preprocessing, Split, Standardize, Stream
from scaleflow.interfaces.options import Seed, TestFraction, check_options

#: Input dtypes that are kept. Other numbers become float32.
KEPT_TYPES = ("uint8", "int32", "float32")

#: Rows that are read in one call.
ROWS = 256

Array = np.ndarray[Any, Any]

#: Rows of a target of floats that are examined before all of them are.
SAMPLED_ROWS = 1000


@dataclass(frozen=True)
class ColumnForm:
    """How the values of a column become an input."""

    inputs: Inputs
    stored: str  # dtype of the values as they are read
    shape: tuple[int, ...]  # of one stored value
    decode: Callable[[tf.Tensor], tf.Tensor] | None = None  # decodes one value, traced. None: it stays as it is

    def to_array(self, values: Sequence[Any]) -> Array:
        """Converts values of the library, as plain Python objects, to [n, *shape]."""
        if self.decode is not None:
            return np.array([read_image(value) for value in values], object)
        if self.stored == "string":
            return np.array([value.encode() for value in values], object)
        return np.array(values, self.stored).reshape(len(values), *self.shape)


class HuggingFace:
    """Reads columns of a dataset of the library datasets. Its rows stay in memory-mapped files.

    Texts are preprocessed by `Text`, and images are resized. Numbers stay as they are, and so do lists and arrays that
    all have the same shape. A class (`ClassLabel`), a bool, a text or an integer is the target of a classification.
    Other numbers are the target of a regression.

    Args:
        earlier: the learned state of an earlier run, with the kind of its target and its classes.

    conf/dataset/huggingface.yaml describes the other arguments.

    Raises:
        ConfigError: if the library is missing, the dataset cannot be read, a column is missing, has missing values or
            is of a type that is not supported, or an option is invalid.
    """

    @check_options("dataset")
    def __init__(  # noqa: PLR0913  # the keys of a config
        self,
        input: str | Sequence[str],
        target: str,
        weights: str | None = None,
        data_dir: str | None = None,
        name: str | None = None,
        config: str | None = None,
        streaming: bool = False,
        size: ImageSize = (224, 224),
        resize: Resize = "stretch",
        channels: Channels = 3,
        vocabulary: int = 10_000,
        tokens: int = 250,
        standardize: Standardize = "lower_and_strip_punctuation",
        kind: OneKind = "auto",
        test: TestFraction = TEST_FRACTION,
        split_seed: Seed = 0,
        earlier: EarlierState | None = None,
        split: Split | None = None,
    ) -> None:
        image = Inputs((*size, channels), "uint8", scale=1 / 255)
        self._image = ColumnForm(image, "string", (), decode=make_image_decoder(size, resize, channels))
        text = Text(vocabulary, tokens, standardize)
        self.notes: tuple[str, ...] = ()
        self._division = Division(split or Split("random"), test, split_seed)
        self._divide = functools.cache(self._draw_splits)
        self._streams = streaming
        self._label, self._splits = open_splits(data_dir, name, config, streams=streaming)
        if "train" not in self._splits:
            raise ConfigError(f"{self._label}: has the splits {', '.join(self._splits)}, expected train among them")
        self._features: Mapping[str, Any] = self._splits["train"].features or {}
        self._is_single = isinstance(input, str)
        names = [input] if isinstance(input, str) else list(input)
        self._target = target
        self._weights = weights
        self._check_columns(names)
        self._columns = {column: self._describe(column, self._features[column]) for column in names}
        if weights is not None:
            check_weights_name(weights, names, target, key="dataset.input")
            self._check_weights(weights)
        known = None if earlier is None else earlier.find_outputs()
        self.outputs, self._classes = self._describe_target(kind, known)
        self.decoders = self._choose_decoders()
        self.inputs: Any = self._pack({name: column.inputs for name, column in self._columns.items()})
        self.preprocessing: Any = self._choose_preprocessing(text)

    def _check_columns(self, names: Sequence[str]) -> None:
        """Rejects options that name a column which does not exist, cannot be streamed, or has missing values."""
        rule_keys = find_keys(self._division.rule)
        if rule_keys and self._streams:
            key = min(rule_keys)
            raise ConfigError(f"{key}={rule_keys[key]}: is read first; use dataset.streaming=false")
        keys = [("dataset.input", name) for name in names]
        keys.append(("dataset.target", self._target))
        keys += find_keys(self._division.rule, self._weights).items()
        for key, column in keys:
            if column not in self._features:
                raise ConfigError(f"{key}={column}: there is no such column; {self._label} has {list(self._features)}")
        if not self._streams:
            self._check_missing([*names, self._target])

    def _check_weights(self, name: str) -> None:
        """Rejects a column of weights that are not numbers."""
        feature = self._features[name]
        shape, dtype = shape_of(feature)
        if shape or not str(dtype).startswith(("int", "uint", "float")):
            raise ConfigError(f"dataset.weights={name}: is {feature}, expected a number for each row")

    @property
    def _specs(self) -> tuple[tf.TensorSpec, ...]:
        """The specs of the stored values of a row: inputs, target, and the weight if there is one."""
        specs = [tf.TensorSpec(column.shape, column.stored) for column in self._columns.values()]
        specs.append(tf.TensorSpec(self.outputs.target_shape, self.outputs.target_dtype))
        if self._weights:
            specs.append(tf.TensorSpec((), tf.float32))
        return tuple(specs)

    def _choose_decoders(self) -> dict[str, Callable[[tf.Tensor], tf.Tensor]]:
        """Returns the decoders of images, by input. The name of a single input is ""."""
        decoders: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {}
        for name, column in self._columns.items():
            if column.decode is not None:
                decoders["" if self._is_single else name] = column.decode
        return decoders

    def _choose_preprocessing(self, text: Text) -> Text | dict[str, Preprocessing] | None:
        """Returns the preprocessing of texts, for a single input, or by input."""
        preprocessing: dict[str, Preprocessing] = {}
        for name, column in self._columns.items():
            if column.stored == "string" and column.decode is None:
                preprocessing[name] = text
        if self._is_single:
            return text if preprocessing else None
        return preprocessing

    @property
    def splits(self) -> Collection[str]:
        if self._streams:
            return tuple(self._splits)
        drawn: Collection[str] = self._division.splits
        if self._division.rule.by == "column":
            drawn, _ = self._divide("train")
        return tuple(dict.fromkeys((*self._splits, *drawn)))

    def load(self, split: str) -> Stream:
        """Returns records: row numbers, or with `streaming` the rows themselves."""
        if self._streams:
            return self._open_stream(split)
        name = split if split in self._splits else "train"
        rows = self._splits[name]
        masks, keys = self._divide(name)
        chosen = masks.get(split, np.ones(len(rows), bool))
        numbers = np.flatnonzero(chosen)
        records = tf.data.Dataset.from_tensor_slices(numbers)
        arrow = rows.with_format("arrow")

        def read(places: Array) -> tuple[Array, ...]:
            table = arrow[places.tolist()]
            return self._convert(lambda name: table[name].to_pylist())

        def read_batch(places: tf.Tensor) -> list[tf.Tensor]:
            dtypes = [spec.dtype for spec in self._specs]
            values = tf.numpy_function(read, [places], dtypes, stateful=False)
            pairs = zip(values, self._specs, strict=True)
            return [tf.ensure_shape(value, [None, *spec.shape]) for value, spec in pairs]

        def decode_batch(places: tf.Tensor) -> tuple[Any, ...]:
            return self._finish(read_batch(places))

        def decode_row(place: tf.Tensor) -> tuple[Any, ...]:
            return self._finish([value[0] for value in read_batch(place[None])])

        row_keys = vars(keys.select(chosen))
        if any(column.decode for column in self._columns.values()):
            # images are decoded one by one, several in parallel
            return Stream(records, len(numbers), decode_row, name=self._name_row, **row_keys)
        return Stream(records, len(numbers), decode_batch, name=self._name_row, at_once=ROWS, **row_keys)

    def _name_row(self, row: Any) -> str:
        return f"{self._label}, row {row}"

    def _draw_splits(self, name: str) -> tuple[Mapping[str, Array], DivisionKeys]:
        """Returns the rows of each split that are drawn from a stored one, [n] bool, and the values that divide it."""
        rule = self._division.rule
        rows = self._splits[name]
        keys = read_keys(rule, lambda column: read_arrow(rows, column), self._name_row)
        if is_by_target(rule) or (rule.by == "auto" and self.outputs.is_one_class):
            targets = self._to_targets(read_arrow(rows, self._target).to_pylist())
            keys = replace(keys, strata=find_strata(np.ravel(targets), self.outputs))
        if name == "train" and "test" not in self._splits:
            return self._division.draw(keys, len(rows), len(rows)), keys
        return {}, keys

    def _open_stream(self, split: str) -> Stream:
        rows = self._splits[split]
        sizes = rows.info.splits or {}
        count = sizes[split].num_examples if split in sizes else None
        if not count:
            raise ConfigError(
                f"dataset.streaming=true: {self._label} does not say how many rows {split!r} has; use "
                "dataset.streaming=false"
            )

        def generate() -> Any:
            for row in rows:
                yield tuple(values[0] for values in self._convert(lambda name: [row[name]]))  # noqa: B023

        dataset = tf.data.Dataset.from_generator(generate, output_signature=self._specs)
        return Stream(dataset, count, lambda *values: self._finish(list(values)))

    def _convert(self, read: Callable[[str], Sequence[Any]]) -> tuple[Array, ...]:
        """Returns inputs, targets and weights, [n, ...]. `read` returns a column as plain Python objects."""
        arrays = [column.to_array(read(name)) for name, column in self._columns.items()]
        weights: list[Array] = []
        if self._weights is not None:
            with np.errstate(over="ignore"):  # infinite weights are refused later, and NaN, which None becomes
                weights.append(np.array(read(self._weights), np.float32))
        return *arrays, self._to_targets(read(self._target)), *weights

    def _to_targets(self, values: Sequence[Any]) -> Array:
        if self._classes is not None:
            values = [self._classes[value] for value in values]
        return np.array(values, self.outputs.target_dtype).reshape(len(values), *self.outputs.target_shape)

    def _finish(self, values: list[tf.Tensor]) -> tuple[Any, ...]:
        """Converts stored values of a row, or of several, to (inputs, targets), or with weights. Traced."""
        inputs: dict[str, tf.Tensor] = {}
        for (name, column), value in zip(self._columns.items(), values, strict=False):
            inputs[name] = column.decode(value) if column.decode else value
        return self._pack(inputs), *values[len(inputs) :]

    def _pack(self, values: Mapping[str, Any]) -> Any:
        return next(iter(values.values())) if self._is_single else dict(values)

    def _check_missing(self, names: Sequence[str]) -> None:
        """Rejects columns with missing values. Files have their number."""
        for split, rows in self._splits.items():
            for name in names:
                missing = rows.data.column(name).null_count
                if missing:
                    raise ConfigError(
                        f"{self._label}: the column {name} of {split!r} has {missing} missing values; fill or remove "
                        "them before save_to_disk"
                    )

    def _describe(self, name: str, feature: Any) -> ColumnForm:
        import datasets

        if isinstance(feature, datasets.Image):
            return self._image
        shape, dtype = shape_of(feature)
        if dtype in ("string", "large_string") and not shape:
            return ColumnForm(Inputs((), "string"), "string", ())
        if dtype is None or "string" in dtype:
            raise ConfigError(
                f"dataset.input={name}: is {feature}, expected text, an image, a number, or lists of numbers of one "
                "length"
            )
        kept = dtype if dtype in KEPT_TYPES else "float32"
        return ColumnForm(Inputs(shape, kept, scale=1 / 255 if kept == "uint8" else None), kept, shape)

    def _describe_target(self, kind: OneKind, known: Outputs | None) -> tuple[Outputs, Mapping[Any, int] | None]:
        """Describes the target.

        Args:
            kind: `dataset.kind`.
            known: the output of an earlier run, with classes that these data may lack.

        Returns:
            The outputs, and the class of each value if the values are not the numbers of classes.
        """
        import datasets

        name = self._target
        feature = self._features[name]
        shape: tuple[int, ...] = ()
        dtype: str | None = "class"
        if not isinstance(feature, datasets.ClassLabel):
            shape, dtype = shape_of(feature)
        is_float = dtype is not None and dtype.startswith(("float", "double"))
        is_class = not shape and dtype is not None and not is_float
        if kind == "auto" and known is None and is_float:
            is_class = self._has_two_floats(name, shape)
            self._note_whole_floats(name, shape)
        if known is not None and kind in ("auto", known.kind):
            kind = "regression" if known.kind == "regression" else "auto"
            is_class = is_class or (known.is_one_class and not shape and dtype is not None)
        if kind == "regression" or (kind == "auto" and not is_class):
            if dtype is None or "string" in dtype or dtype == "class":
                raise ConfigError(f"dataset.target={name}: is {feature}, expected numbers")
            return Outputs("regression", shape or (1,)), None
        if not is_class:
            raise ConfigError(f"dataset.target={name}: is {feature}, expected classes; use dataset.kind=regression")
        numbers: dict[Any, int] | None = None
        if dtype == "class":
            names = tuple(feature.names)
        else:
            numbers = self._number_classes(name, reads_all=known is not None)
            names = tuple(map(str, numbers))
        if len(names) < 2 and known is None:
            raise ConfigError(f"dataset.target={name}: has the only class {names[0]}, expected at least two")
        if kind == "binary" and len(names) != 2:
            raise ConfigError(f"dataset.kind=binary: {name} has {len(names)} classes, expected 2")
        return describe_outputs(kind, len(names), names), numbers

    def _number_classes(self, name: str, reads_all: bool) -> dict[Any, int]:
        """Returns the classes of a target with their numbers, in order.

        Raises ConfigError if the rows are streamed, or another split has a class that the training split lacks.

        Args:
            name: the column of the target.
            reads_all: take the classes of all splits, not only of the training split.
        """
        if self._streams:
            raise ConfigError(
                f"dataset.target={name}: is {self._features[name]}; with dataset.streaming=true a class is needed"
            )
        values: set[Any] = set()
        for split, rows in self._splits.items():
            if split == "train" or reads_all:
                values.update(rows.unique(name))
        numbers = {value: number for number, value in enumerate(sorted(values))}
        self._check_values(name, numbers)
        return numbers

    def _has_two_floats(self, name: str, shape: Any) -> bool:
        """Returns whether all floats of a target are 0 and 1, or -1 and 1, so that they are two classes.

        Raises ConfigError if they mark classes in rows: such numbers may be classes or amounts.
        """
        if self._streams:
            return False
        sample = self._read_first_floats(name)
        pair: tuple[float, float] | None = None
        for candidate in ((0.0, 1.0), (-1.0, 1.0)):
            if pair is None and np.isin(sample, candidate).all():
                pair = candidate
        if pair is None:
            return False
        if shape:
            raise ConfigError(
                f"dataset.target={name}: its rows have only {pair[0]:g} and {pair[1]:g}; store the number of the "
                "class, or set dataset.kind=regression if they are amounts"
            )
        for rows in self._splits.values():
            if not set(rows.unique(name)) <= set(pair):
                return False
        return len(self._splits["train"].unique(name)) == len(pair)

    def _note_whole_floats(self, name: str, shape: Any) -> None:
        """Adds a note if a target of floats may be the numbers of classes."""
        if shape or self._streams:
            return
        sample = self._read_first_floats(name)
        if sample.size and (sample == np.trunc(sample)).all():
            values = [np.asarray(rows.unique(name), dtype=float) for rows in self._splits.values()]
            note = describe_whole_floats(name, values)
            if note:
                self.notes += (note,)

    def _read_first_floats(self, name: str) -> Array:
        train = self._splits["train"]
        return np.asarray(train[: min(len(train), SAMPLED_ROWS)][name], dtype=float)

    def _check_values(self, name: str, numbers: Mapping[Any, int]) -> None:
        """Raises ConfigError if a split has a value without a number."""
        for split, rows in self._splits.items():
            for value in rows.unique(name):
                if value not in numbers:
                    raise ConfigError(
                        f"dataset.target={name}: {split!r} of {self._label} has the class {value}, which the training "
                        "split does not have"
                    )


def open_splits(data_dir: Any, name: Any, config: Any, streams: bool) -> tuple[str, dict[str, Any]]:
    """Opens a dataset. Returns its name in messages, and its splits."""
    if (data_dir is None) == (name is None):
        raise ConfigError(
            "dataset=huggingface: set dataset.data_dir=FOLDER, written by save_to_disk, or dataset.name=NAME on the hub"
        )
    if data_dir is not None and config is not None:
        raise ConfigError(f"dataset.config={config}: is for dataset.name; remove it, or dataset.data_dir")
    if data_dir is not None and streams:
        raise ConfigError("dataset.streaming=true: is for dataset.name; remove it, or dataset.data_dir")
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError("dataset=huggingface: datasets is not installed; pip install 'scaleflow[datasets]'")
    import datasets

    label = f"dataset.name={name}" if data_dir is None else f"dataset.data_dir={data_dir}"
    try:
        if data_dir is None:
            opened = datasets.load_dataset(name, config, streaming=streams)
        else:
            folder: Path = expand_data_dir(data_dir)
            opened = datasets.load_from_disk(str(folder))
    except Exception as error:  # of the network, or of the contents of a file
        reason = read_reason(error)
        raise ConfigError(f"{label}: cannot be read: {reason}") from error
    splits = dict(opened) if isinstance(opened, dict) else {"train": opened}
    if streams:
        splits = {split: keep_images_encoded(rows) for split, rows in splits.items()}
    return label, splits


def keep_images_encoded(rows: Any) -> Any:
    """Returns rows of a stream whose images the library does not decode."""
    import datasets

    encoded = datasets.Image(decode=False)
    for column, feature in (rows.features or {}).items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(column, encoded)
    return rows


def read_arrow(rows: Any, name: str) -> Any:
    """Returns a column of a dataset, as pyarrow's."""
    return rows.select_columns([name]).with_format("arrow")[:][name]


def shape_of(feature: Any) -> tuple[tuple[int, ...], str | None]:
    """Returns the shape and dtype of a column's values. The dtype is None if they have no fixed shape."""
    shape: tuple[int, ...] = ()
    inner = getattr(feature, "feature", None)
    while inner is not None:  # a list
        length = getattr(feature, "length", -1)
        if length < 1:
            return (), None
        shape = (*shape, length)
        feature = inner
        inner = getattr(feature, "feature", None)
    array_shape = getattr(feature, "shape", None)
    if array_shape is not None:
        return (*shape, *array_shape), feature.dtype
    if isinstance(feature, dict) or not hasattr(feature, "dtype"):
        return shape, None
    return shape, str(feature.dtype)


def read_image(value: Any) -> bytes:
    """Returns the encoded image of a row: its bytes, or the contents of its file."""
    content: bytes = value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()
    return content
