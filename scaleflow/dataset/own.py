"""Makes a source of a user's own objects: map-style datasets, iterators, `tf.data.Dataset`s."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Inputs,
    InputStructure,
    Outputs,
    OutputStructure,
    Preprocessing,
    Source,
    Stream,
    label_leaf,
    map_leaves,
    map_named,
    name_leaves,
)

Array = np.ndarray[Any, Any]

#: An iterator with more examples than this may have no end.
MAX_COUNTED = 1_000_000


@dataclass(frozen=True)
class OwnSource:
    """The source that `make_source` returns."""

    inputs: InputStructure
    outputs: OutputStructure
    streams: Mapping[str, Stream]
    preprocessing: Preprocessing | Mapping[str, Preprocessing] | None = None

    @property
    def splits(self) -> Collection[str]:
        return tuple(self.streams)

    def load(self, split: str) -> Stream:
        return self.streams[split]


def make_source(
    splits: Mapping[str, Any],
    outputs: OutputStructure,
    inputs: InputStructure | None = None,
    lengths: Mapping[str, int] | None = None,
    preprocessing: Preprocessing | Mapping[str, Preprocessing] | None = None,
) -> Source:
    """Makes a source of splits, with `train` among them. A split is one of these:

    - a map-style dataset: an object with `__len__` and `__getitem__(index)`, such as a `torch.utils.data.Dataset`. It
      is read in several threads, in any order.
    - an iterable, or a function without arguments that returns an iterator, such as a generator function. It is read
      from its beginning in each epoch.
    - a `tf.data.Dataset` of single examples.

    An example is (input, target) or (input, target, weight). Inputs and targets are arrays, numbers, texts or torch
    tensors, or dicts of them. They are converted to the dtypes of `inputs` and of the kind of the target. Every
    iteration has to give the same examples in the same order.

    Args:
        splits: by name.
        outputs: describes the outputs of the model, and the targets.
        inputs: describes the inputs. None: they are as in the first example, with floats as float32, integers as int32,
            and uint8 scaled to [0, 1]. If an example has an integer that int32 does not have, it cannot be read.
            Describe the input as int64 or float32 then.
        lengths: the number of examples by split, for iterators and datasets of unknown length. None: they are counted,
            so they are read once more.
        preprocessing: of the inputs, as `Source.preprocessing`: `Text()` for texts.

    Raises:
        ConfigError: if a split has another type, is empty, can be iterated only once, gives batches, or has neither a
            length nor an end within a million examples.
    """
    examples_by_split = {name: make_examples(name, split) for name, split in splits.items()}
    if inputs is None:
        first = examples_by_split.get("train") or next(iter(examples_by_split.values()), None)
        if first is None:
            raise ConfigError("dataset: make_source was given no splits")
        inputs = first.describe_inputs()
    streams: dict[str, Stream] = {}
    for name, examples in examples_by_split.items():
        streams[name] = examples.make_stream(inputs, outputs, (lengths or {}).get(name))
    return OwnSource(inputs, outputs, streams, preprocessing=preprocessing)


class MapExamples:
    """A map-style dataset."""

    def __init__(self, split: str, examples: Any) -> None:
        self._split = split
        self._examples = examples
        if not len(examples):
            raise ConfigError(f"dataset: the split {split!r} is empty")
        self._first = split_example(examples[0], split)

    def describe_inputs(self) -> InputStructure:
        return describe_structure(self._first[0])

    def make_stream(self, inputs: InputStructure, outputs: OutputStructure, length: int | None) -> Stream:
        specs = example_specs(inputs, outputs, len(self._first))
        check_first(self._split, to_specs(self._first), specs)
        flat = tf.nest.flatten(specs)

        def read(index: Array) -> list[Array]:
            example = split_example(self._examples[int(index)], self._split)
            return flatten_example(example, specs)

        def decode(index: tf.Tensor) -> tuple[Any, ...]:
            values = tf.numpy_function(read, [index], [spec.dtype for spec in flat], stateful=False)
            shaped = [tf.ensure_shape(value, spec.shape) for value, spec in zip(values, flat, strict=True)]
            return tuple(tf.nest.pack_sequence_as(specs, shaped))

        count = length or len(self._examples)
        return Stream(tf.data.Dataset.range(count), count, decode)


class IteratedExamples:
    """An iterable, or a function that returns an iterator."""

    def __init__(self, split: str, iterate: Callable[[], Iterable[Any]]) -> None:
        self._split = split
        self._iterate = iterate
        first = next(iter(iterate()), None)
        if first is None:
            raise ConfigError(f"dataset: the split {split!r} is empty")
        self._first = split_example(first, split)

    def describe_inputs(self) -> InputStructure:
        return describe_structure(self._first[0])

    def make_stream(self, inputs: InputStructure, outputs: OutputStructure, length: int | None) -> Stream:
        specs = example_specs(inputs, outputs, len(self._first))
        check_first(self._split, to_specs(self._first), specs)

        def generate() -> Iterator[Any]:
            for number, example in enumerate(self._iterate()):
                try:
                    flat = flatten_example(split_example(example, self._split), specs)
                except ConfigError as error:
                    raise ConfigError(f"example {number}: {error}") from error
                yield tuple(tf.nest.pack_sequence_as(specs, flat))

        count = length or sum(1 for _ in itertools.islice(self._iterate(), MAX_COUNTED + 1))
        check_count(self._split, count, length)
        return Stream(tf.data.Dataset.from_generator(generate, output_signature=specs), count)


class DatasetExamples:
    """A `tf.data.Dataset`."""

    def __init__(self, split: str, dataset: tf.data.Dataset) -> None:
        self._split = split
        self._dataset = dataset
        spec = dataset.element_spec
        if not isinstance(spec, tuple) or len(spec) not in (2, 3):
            raise ConfigError(f"dataset: {split!r} yields {spec}, expected (input, target) or (input, target, weight)")
        split_example(spec, split)
        self._spec = spec

    def describe_inputs(self) -> InputStructure:
        for name, spec in name_leaves(self._spec[0]).items():
            if not spec.shape.is_fully_defined():
                raise ConfigError(
                    f"dataset: {label_leaf('inputs', name)} of {self._split!r} have the shape {spec.shape}; yield "
                    "single examples of one shape (unbatch, tf.ensure_shape)"
                )
        described: InputStructure = map_leaves(
            lambda spec: describe_input(tuple(spec.shape), spec.dtype.as_numpy_dtype), self._spec[0]
        )
        return described

    def make_stream(self, inputs: InputStructure, outputs: OutputStructure, length: int | None) -> Stream:
        specs = example_specs(inputs, outputs, len(self._spec))
        check_first(self._split, self._spec, specs)
        count = length or int(self._dataset.cardinality())
        if count == tf.data.INFINITE_CARDINALITY:
            raise ConfigError(f"dataset: {self._split!r} never ends; remove repeat(), or set lengths")
        if count == tf.data.UNKNOWN_CARDINALITY:
            counted = self._dataset.take(MAX_COUNTED + 1)
            count = int(counted.reduce(tf.constant(0, tf.int64), lambda total, *_: total + 1))
        check_count(self._split, count, length)

        def convert(*example: Any) -> tuple[Any, ...]:
            tf.nest.assert_same_structure(specs, example)
            return tuple(tf.nest.map_structure(convert_tensor, example, specs))

        return Stream(self._dataset, count, convert)


def make_examples(name: str, split: Any) -> Any:
    """Wraps one split. The wrapper depends on its type."""
    if isinstance(split, tf.data.Dataset):
        return DatasetExamples(name, split)
    if isinstance(split, Iterator):
        raise ConfigError(
            f"dataset: the split {name!r} can be read only once; give the function that makes the iterator, without "
            "calling it"
        )
    if isinstance(split, keras.utils.PyDataset):
        refuse_batches(name)
    if not inspect.isclass(split):
        if hasattr(split, "__getitem__") and hasattr(split, "__len__"):
            return MapExamples(name, split)
        if isinstance(split, Iterable):
            return IteratedExamples(name, lambda: split)
        if callable(split):
            return IteratedExamples(name, split)
    raise ConfigError(
        f"dataset: the split {name!r} is of type {type(split).__name__}, expected an object with __len__ and "
        "__getitem__, an iterable, a function that returns an iterator, or a tf.data.Dataset"
    )


def split_example(example: Any, split: str) -> tuple[Any, ...]:
    if not isinstance(example, tuple | list) or len(example) not in (2, 3):
        raise ConfigError(
            f"dataset: an example of {split!r} is of type {type(example).__name__}, expected (input, target) or "
            "(input, target, weight)"
        )
    for what, part in zip(("input", "target"), example, strict=False):
        refuse_tuple(what, part, split)
    return tuple(example)


def refuse_tuple(what: str, part: Any, split: str) -> None:
    """Rejects a tuple or list of several arrays: they have no names. A list of numbers is one array."""
    if not isinstance(part, tuple | list):
        return
    shapes = [getattr(array, "shape", None) for array in part]
    is_tuple_of_arrays = isinstance(part, tuple) and any(shape is not None and len(shape) for shape in shapes)
    if is_tuple_of_arrays or len(set(map(str, shapes))) > 1 or any(isinstance(array, Mapping) for array in part):
        raise ConfigError(
            f"dataset: the {what} of an example of {split!r} is a {type(part).__name__} of {len(part)} arrays; give a "
            "dict with a name for each array, such as {'a': ..., 'b': ...}, or one array"
        )


def check_count(split: str, count: int, length: int | None) -> None:
    """Rejects a split that may have no end."""
    if length is None and count > MAX_COUNTED:
        raise ConfigError(
            f"dataset: the split {split!r} has no length, and no end within {MAX_COUNTED:,} examples; set "
            f"make_source(..., lengths={{{split!r}: NUMBER}})"
        )


def check_first(split: str, first_specs: tuple[Any, ...], specs: tuple[Any, ...]) -> None:
    """Rejects a split whose first example is a batch, or has texts as targets.

    Args:
        split: its name.
        first_specs: the specs of the first example.
        specs: the specs that all examples should have.
    """
    targets = list(zip(tf.nest.flatten(first_specs[1]), tf.nest.flatten(specs[1]), strict=False))
    if any(target.dtype == tf.string != spec.dtype for target, spec in targets):
        raise ConfigError(
            f"dataset: the targets of {split!r} are texts, expected numbers; give the numbers of the classes, from 0, "
            "and their names in Outputs.names"
        )
    shapes = [spec.shape for spec in tf.nest.flatten(first_specs[:2])]
    leading = {shape[0] if shape.rank else None for shape in shapes}
    is_ambiguous = all(shape.rank == 1 for shape in shapes)  # may be a vector with a one-hot target of the same length
    if len(leading) > 1 or not leading - {1, None} or is_ambiguous:
        return
    if all(target.shape[1:].num_elements() == spec.shape.num_elements() for target, spec in targets):
        refuse_batches(split, f" of {leading.pop()}")


def refuse_batches(split: str, size: str = "") -> NoReturn:
    raise ConfigError(
        f"dataset: the split {split!r} gives batches{size}, expected single examples; unbatch it: unbatch() of a "
        "tf.data.Dataset, otherwise its arrays, or a function that yields one example after another"
    )


def to_specs(example: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the specs of an example's arrays."""

    def to_spec(value: Any) -> tf.TensorSpec:
        array = to_array(value)
        return tf.TensorSpec(array.shape, tf.string if array.dtype.kind in "OSU" else array.dtype)

    return tuple(map_leaves(to_spec, part) for part in example)


def describe_structure(values: Any) -> InputStructure:
    def describe(value: Any) -> Inputs:
        array = to_array(value)
        return describe_input(array.shape, array.dtype)

    described: InputStructure = map_leaves(describe, values)
    return described


def describe_input(shape: tuple[int, ...], dtype: Any) -> Inputs:
    """Describes an input by its shape and numpy's dtype."""
    kind = np.dtype(dtype).kind
    if kind in "OSU":
        return Inputs(shape, "string")
    if np.dtype(dtype) == np.uint8:
        return Inputs(shape, "uint8", scale=1 / 255)
    return Inputs(shape, "int32" if kind in "iu" else "float32")


def example_specs(inputs: InputStructure, outputs: OutputStructure, parts: int) -> tuple[Any, ...]:
    """Returns the specs of an example: (input, target), or with a weight. Their names are for messages."""

    def input_spec(name: str, described: Inputs) -> tf.TensorSpec:
        return tf.TensorSpec(described.shape, described.dtype, f"its {label_leaf('input', name)}")

    def target_spec(name: str, described: Outputs) -> tf.TensorSpec:
        return tf.TensorSpec(described.target_shape, described.target_dtype, f"its {label_leaf('target', name)}")

    specs = (
        map_named(input_spec, inputs),
        map_named(target_spec, outputs),
        tf.TensorSpec((), tf.float32, "its weight"),
    )
    return specs[:parts]


def flatten_example(example: tuple[Any, ...], specs: tuple[Any, ...]) -> list[Array]:
    """Returns the values of an example in the order of the flat specs, converted to them."""
    tf.nest.assert_same_structure(
        tf.nest.map_structure(lambda _: 0, specs), tuple(map_leaves(lambda _: 0, part) for part in example)
    )
    leaves: list[Array] = []
    for part in example:
        leaves += tf.nest.flatten(map_leaves(to_array, part))
    return [convert_array(leaf, spec) for leaf, spec in zip(leaves, tf.nest.flatten(specs), strict=True)]


def to_array(value: Any) -> Array:
    """Converts a value, such as a torch tensor, to an array. Texts become bytes."""
    array = np.asarray(value)
    if array.dtype.kind not in "US":
        return array
    texts = [text.encode() if isinstance(text, str) else text for text in array.ravel()]
    return np.array(texts, object).reshape(array.shape)


def convert_array(array: Array, spec: tf.TensorSpec) -> Array:
    """Converts an array to the spec's dtype. A target of one value may lack its dimension.

    Raises ConfigError for another shape, and for a value that the integer dtype of the spec does not have.
    """
    dtype = spec.dtype.as_numpy_dtype
    if spec.dtype != tf.string and array.dtype != dtype:
        with np.errstate(invalid="ignore"):
            converted = array.astype(dtype)
        if spec.dtype.is_integer:
            is_lost = np.asarray(converted != array)
            if is_lost.any():
                raise ConfigError(f"{describe_misfit(spec)} {array[is_lost].ravel()[0]}")
        array = converted
    if array.size == 1 and spec.shape.num_elements() == 1:
        return array.reshape(spec.shape)
    if array.shape != tuple(spec.shape):
        hint = ", which all examples must have; pad those that are shorter" if array.ndim == spec.shape.rank else ""
        raise ConfigError(f"{spec.name} has the shape {array.shape}, expected {tuple(spec.shape)}{hint}")
    return array


def convert_tensor(tensor: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    """Converts a tensor to the spec's dtype, as `convert_array` does. Traced."""
    if spec.dtype != tf.string and tensor.dtype != spec.dtype:
        converted = tf.cast(tensor, spec.dtype)
        if spec.dtype.is_integer:
            is_kept = tf.cast(converted, tensor.dtype) == tensor
            lost = tf.boolean_mask(tf.reshape(tensor, [-1]), tf.reshape(~is_kept, [-1]))[:1]
            check = tf.debugging.Assert(tf.reduce_all(is_kept), [describe_misfit(spec), lost])
            with tf.control_dependencies([check]):
                converted = tf.identity(converted)
        tensor = converted
    return tf.reshape(tensor, spec.shape) if spec.shape.num_elements() == 1 else tf.ensure_shape(tensor, spec.shape)


def describe_misfit(spec: tf.TensorSpec) -> str:
    return f"{spec.name} has a value that {spec.dtype.name} does not have:"
