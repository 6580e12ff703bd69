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

#: Input dtypes that are kept; other numbers become float32.
KEPT_TYPES = ("uint8", "int32", "float32")

#: Rows that are read in one call.
ROWS = 256

Array = np.ndarray[Any, Any]


#: The rows of a target of floats that are looked at first.
SAMPLED_ROWS = 1000


@dataclass(frozen=True)
class ColumnForm:
    """How the values of a column become an input."""

    inputs: Inputs
    stored: str  # dtype of the values as they are read
    shape: tuple[int, ...]  # of one such value
    decode: Callable[[tf.Tensor], tf.Tensor] | None = None  # of one value. Traced; None: it stays as it is

    def to_array(self, values: Sequence[Any]) -> Array:
        """Converts values of the library, as plain Python objects, to [n, *shape]."""
        if self.decode is not None:
            return np.array([image_bytes(value) for value in values], object)
        if self.stored == "string":
            return np.array([value.encode() for value in values], object)
        return np.array(values, self.stored).reshape(len(values), *self.shape)


class HuggingFace:
    """Reads columns of a dataset of the library datasets; its rows stay in memory-mapped files.

    Inputs: text is preprocessed as `Text` says; images are resized; numbers, and lists and arrays of one shape, stay as
    they are. A class (`ClassLabel`), a bool, a text or an integer is the target of a classification, another number one
    of a regression.

    Args:
        earlier: what an earlier run learned: the kind of its target, and its classes.

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
        self._image = make_image_decoder(size, resize, channels)
        self._image_shape = (*size, channels)
        text = Text(vocabulary, tokens, standardize)
        self.notes: tuple[str, ...] = ()
        self._division, self._streams = Division(split or Split("random"), test, split_seed), streaming
        self._divide = functools.cache(self._draw_splits)
        self._label, self._splits = open_splits(data_dir, name, config, streams=self._streams)
        if "train" not in self._splits:
            raise ConfigError(f"{self._label}: has the splits {', '.join(self._splits)}, expected train among them")
        names = [input] if isinstance(input, str) else list(input)
        features = self._splits["train"].features or {}
        keys = find_keys(self._division.rule)
        if keys and streaming:
            raise ConfigError(f"{min(keys)}={keys[min(keys)]}: is read first; use dataset.streaming=false")
        keys = find_keys(self._division.rule, weights)
        for key, column in (*(("dataset.input", each) for each in names), ("dataset.target", target), *keys.items()):
            if column not in features:
                raise ConfigError(f"{key}={column}: there is no such column; {self._label} has {list(features)}")
        self._check_missing([*names, target])
        self._columns = {each: self._describe(each, features[each]) for each in names}
        self._target, self._weights = target, weights
        if weights is not None:
            check_weights_name(weights, names, target, key="dataset.input")
            shape, dtype = shape_of(features[weights])
            if shape or not str(dtype).startswith(("int", "uint", "float")):
                raise ConfigError(f"dataset.weights={weights}: is {features[weights]}, expected a number for each row")
        self._is_single = isinstance(input, str)
        self.outputs, self._classes = self._describe_target(
            kind, target, features[target], known=None if earlier is None else earlier.find_outputs()
        )
        specs = [tf.TensorSpec(column.shape, column.stored) for column in self._columns.values()]
        specs += [tf.TensorSpec(self.outputs.target_shape, self.outputs.target_dtype)]
        self._specs = (*specs, tf.TensorSpec((), tf.float32)) if weights else tuple(specs)
        decoded = {each: column.decode for each, column in self._columns.items() if column.decode}
        self.decoders = {"" if self._is_single else each: decode for each, decode in decoded.items()}
        self.inputs: Any = self._pack({each: column.inputs for each, column in self._columns.items()})
        strings = [each for each, column in self._columns.items() if column.stored == "string"]
        texts = {each: text for each in strings if each not in decoded}
        self.preprocessing: Any = (text if texts else None) if self._is_single else dict[str, Preprocessing](texts)

    @property
    def splits(self) -> Collection[str]:
        if self._streams:
            return tuple(self._splits)
        is_named = self._division.rule.by == "column"
        return tuple(dict.fromkeys((*self._splits, *(self._divide("train")[0] if is_named else self._division.splits))))

    def load(self, split: str) -> Stream:
        """Returns records: row numbers, or with `streaming` the rows themselves."""
        if self._streams:
            return self._open_stream(split)
        name = split if split in self._splits else "train"
        rows = self._splits[name]
        masks, keys = self._divide(name)
        chosen = masks.get(split, np.ones(len(rows), bool))
        numbers = np.flatnonzero(chosen)
        arrow, has_images = rows.with_format("arrow"), any(column.decode for column in self._columns.values())

        def read(places: Array) -> tuple[Array, ...]:
            table = arrow[places.tolist()]
            return self._convert(lambda name: table[name].to_pylist())

        def decode(places: tf.Tensor) -> tuple[Any, ...]:
            batch = places[None] if has_images else places
            values = tf.numpy_function(read, [batch], [each.dtype for each in self._specs], stateful=False)
            pairs = zip(values, self._specs, strict=True)
            values = [tf.ensure_shape(value, [None, *each.shape]) for value, each in pairs]
            return self._finish([value[0] for value in values] if has_images else values)

        records = tf.data.Dataset.from_tensor_slices(numbers)
        at_once = None if has_images else ROWS  # images are decoded one by one, several in parallel
        row_keys = vars(keys.select(chosen))
        return Stream(records, len(numbers), decode, name=self._name_row, at_once=at_once, **row_keys)

    def _name_row(self, row: Any) -> str:
        return f"{self._label}, row {row}"

    def _draw_splits(self, name: str) -> tuple[Mapping[str, Array], DivisionKeys]:
        """Returns which rows of a stored split are in which split, [n] bool, and by what all are divided."""
        rule, rows = self._division.rule, self._splits[name]
        keys = read_keys(rule, lambda each: read_arrow(rows, each), self._name_row)
        if is_by_target(rule) or (rule.by == "auto" and self.outputs.is_one_class):
            targets = self._to_targets(read_arrow(rows, self._target).to_pylist())
            keys = replace(keys, strata=find_strata(np.ravel(targets), self.outputs))
        is_divided = name == "train" and "test" not in self._splits
        return self._division.draw(keys, len(rows), len(rows)) if is_divided else {}, keys

    def _open_stream(self, split: str) -> Stream:
        rows = self._splits[split]
        count = rows.info.splits[split].num_examples if rows.info.splits and split in rows.info.splits else None
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
        """Returns inputs, targets and weights, [n, ...] each; `read` returns a column as plain Python objects."""
        inputs = [column.to_array(read(name)) for name, column in self._columns.items()]
        with np.errstate(over="ignore"):  # infinite weights are refused, and NaN, which None becomes
            weights = [] if self._weights is None else [np.array(read(self._weights), np.float32)]
        return *inputs, self._to_targets(read(self._target)), *weights

    def _to_targets(self, values: Sequence[Any]) -> Array:
        if self._classes is not None:
            values = [self._classes[value] for value in values]
        return np.array(values, self.outputs.target_dtype).reshape(len(values), *self.outputs.target_shape)

    def _finish(self, values: list[tf.Tensor]) -> tuple[Any, ...]:
        """Returns (inputs, target), or with a weight, of the values that were read. Traced."""
        count = len(self._columns)
        inputs = {
            name: column.decode(value) if column.decode else value
            for (name, column), value in zip(self._columns.items(), values[:count], strict=True)
        }
        return self._pack(inputs), *values[count:]

    def _pack(self, values: Mapping[str, Any]) -> Any:
        return next(iter(values.values())) if self._is_single else dict(values)

    def _check_missing(self, names: Sequence[str]) -> None:
        """Rejects columns with missing values, of which files have a count."""
        for split, rows in self._splits.items() if not self._streams else ():
            for name in names:
                if missing := rows.data.column(name).null_count:
                    raise ConfigError(
                        f"{self._label}: the column {name} of {split!r} has {missing} missing values; fill or remove "
                        "them before save_to_disk"
                    )

    def _describe(self, name: str, feature: Any) -> ColumnForm:
        import datasets

        if isinstance(feature, datasets.Image):
            return ColumnForm(Inputs(self._image_shape, "uint8", scale=1 / 255), "string", (), decode=self._image)
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

    def _describe_target(
        self, kind: OneKind, name: str, feature: Any, known: Outputs | None
    ) -> tuple[Outputs, Mapping[Any, int] | None]:
        """Returns the outputs, and the number of each value if values are not numbers from 0 on.

        `known` is the output of an earlier run, with classes that these data may lack.
        """
        import datasets

        shape, dtype = ((), "class") if isinstance(feature, datasets.ClassLabel) else shape_of(feature)
        is_class = not shape and dtype is not None and not dtype.startswith(("float", "double"))
        if kind == "auto" and known is None and dtype is not None and dtype.startswith(("float", "double")):
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
        if dtype == "class":
            names, numbers = tuple(feature.names), None
        else:
            if self._streams:
                raise ConfigError(f"dataset.target={name}: is {feature}; with dataset.streaming=true a class is needed")
            read = self._splits.values() if known else [self._splits["train"]]
            values = sorted({value for rows in read for value in rows.unique(name)})
            names, numbers = tuple(map(str, values)), {value: number for number, value in enumerate(values)}
            self._check_values(name, numbers)
        if len(names) < 2 and known is None:
            raise ConfigError(f"dataset.target={name}: has the only class {names[0]}, expected at least two")
        if kind == "binary" and len(names) != 2:
            raise ConfigError(f"dataset.kind=binary: {name} has {len(names)} classes, expected 2")
        return describe_outputs(kind, len(names), names), numbers

    def _has_two_floats(self, name: str, shape: Any) -> bool:
        """Returns whether all floats of a target are 0 and 1, or -1 and 1, so that they are two classes.

        Raises ConfigError if they mark classes in rows: nobody can tell whether they are classes or amounts.
        """
        import numpy as np

        if self._streams:
            return False
        train = self._splits["train"]
        sample = np.asarray(train[: min(len(train), SAMPLED_ROWS)][name], dtype=float)
        pair = next((each for each in ((0.0, 1.0), (-1.0, 1.0)) if np.isin(sample, each).all()), None)
        if pair is None:
            return False
        if shape:
            raise ConfigError(
                f"dataset.target={name}: its rows have only {pair[0]:g} and {pair[1]:g}; store the number of the "
                "class, or set dataset.kind=regression if they are amounts"
            )
        return all(set(rows.unique(name)) <= set(pair) for rows in self._splits.values()) and (
            len(train.unique(name)) == len(pair)
        )

    def _note_whole_floats(self, name: str, shape: Any) -> None:
        """Adds a note if a target of floats may be the numbers of classes."""
        import numpy as np

        if shape or self._streams:
            return
        train = self._splits["train"]
        first = np.asarray(train[: min(len(train), SAMPLED_ROWS)][name], dtype=float)
        if first.size and (first == np.trunc(first)).all():
            values = [np.asarray(rows.unique(name), dtype=float) for rows in self._splits.values()]
            self.notes += tuple(filter(None, [describe_whole_floats(name, values)]))

    def _check_values(self, name: str, numbers: Mapping[Any, int]) -> None:
        for split, rows in self._splits.items():
            if unknown := [value for value in rows.unique(name) if value not in numbers]:
                raise ConfigError(
                    f"dataset.target={name}: {split!r} of {self._label} has the class {unknown[0]}, which the training "
                    "split does not have"
                )


def open_splits(data_dir: Any, name: Any, config: Any, streams: bool) -> tuple[str, dict[str, Any]]:
    """Returns how messages name the dataset, and its splits."""
    if (data_dir is None) == (name is None):
        raise ConfigError(
            "dataset=huggingface: set dataset.data_dir=FOLDER, written by save_to_disk, or dataset.name=NAME on the hub"
        )
    for key, value in (("config", config), ("streaming", streams or None)):
        if data_dir is not None and value is not None:
            shown = "true" if value is True else value
            raise ConfigError(f"dataset.{key}={shown}: is for dataset.name; remove it, or dataset.data_dir")
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError("dataset=huggingface: datasets is not installed; pip install 'scaleflow[datasets]'")
    import datasets

    label = f"dataset.name={name}" if data_dir is None else f"dataset.data_dir={data_dir}"
    try:
        if data_dir is None:
            found = datasets.load_dataset(name, config, streaming=streams)
        else:
            folder: Path = expand_data_dir(data_dir)
            found = datasets.load_from_disk(str(folder))
    except Exception as error:  # of the network, of a file, or of what is in it
        reason = read_reason(error)
        raise ConfigError(f"{label}: cannot be read: {reason}") from error
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    image = datasets.Image(decode=False)
    for split, rows in splits.items() if streams else ():
        for column, feature in (rows.features or {}).items():
            if isinstance(feature, datasets.Image):
                splits[split] = splits[split].cast_column(column, image)
    return label, splits


def read_arrow(rows: Any, name: str) -> Any:
    """Returns a column of a dataset, as pyarrow's."""
    return rows.select_columns([name]).with_format("arrow")[:][name]


def shape_of(feature: Any) -> tuple[tuple[int, ...], str | None]:
    """Returns (shape, dtype) of a column's values; None as the dtype if they have no fixed shape."""
    shape: tuple[int, ...] = ()
    while (inner := getattr(feature, "feature", None)) is not None:  # lists
        length = getattr(feature, "length", -1)
        if length < 1:
            return (), None
        shape, feature = (*shape, length), inner
    if (of_array := getattr(feature, "shape", None)) is not None:
        return (*shape, *of_array), feature.dtype
    return shape, str(feature.dtype) if hasattr(feature, "dtype") and not isinstance(feature, dict) else None


def image_bytes(value: Any) -> bytes:
    """Returns the encoded image of a row: its bytes, or those of its file."""
    content: bytes = value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()
    return content
