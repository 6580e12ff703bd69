"""Checks the splits that sources return, and makes rows of them: examples that are accessed by index."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.records import (
    DIGESTED,
    StreamRows,
    draw_places,
    largest_target,
    reading_options,
    spread_evenly,
)
from scaleflow.dataset.column_kinds import KINDS
from scaleflow.dataset.reading.targets import check_finite_targets
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Arrays,
    Examples,
    Inputs,
    InputStructure,
    Kind,
    Outputs,
    OutputStructure,
    Rows,
    Source,
    Stream,
    describe_keys,
    label_leaf,
    map_leaves,
    name_leaves,
)

#: What a key of outputs may be: it becomes a part of the names of metrics and layers.
OUTPUT_KEY = re.compile(r"[\w.\- ]+")

#: What a key of inputs may be: any text, such as the name of a column; `/` joins the keys of nested dicts.
INPUT_KEY = re.compile(r"[^/]+")


class Spec(NamedTuple):
    """The shape of one example's tensor, and the name of its dtype."""

    shape: Any
    dtype: str


def check_contract(source: Any) -> None:
    """Rejects an object that is not a `Source`. The error names the missing attribute."""
    name = type(source).__name__
    for attribute, kind in (("inputs", Inputs), ("outputs", Outputs)):
        # Without getattr's default, an AttributeError inside a property is not mistaken for a missing property.
        value = getattr(source, attribute) if hasattr(type(source), attribute) else getattr(source, attribute, None)
        check_description(f"{name}.{attribute}", value, kind)
    if "train" not in (getattr(source, "splits", None) or ()):
        raise ConfigError(f"dataset: {name}.splits must name the splits, 'train' among them")
    if not callable(getattr(source, "load", None)):
        raise ConfigError(f"dataset: {name} needs a method load(split)")
    for key, inputs in name_leaves(source.inputs).items():
        if inputs.kind not in (None, *KINDS):
            label = f"{name}.{label_leaf('inputs', key)}"
            raise ConfigError(f"dataset: {label}.kind={inputs.kind}: expected one of {', '.join(KINDS)}")
    for key, outputs in name_leaves(source.outputs).items():
        label = f"{name}.{label_leaf('outputs', key)}"
        if outputs.kind not in get_args(Kind):
            raise ConfigError(f"dataset: {label}.kind={outputs.kind}: expected one of {', '.join(get_args(Kind))}")
        if not outputs.shape:
            raise ConfigError(f"dataset: {label}.shape=(): expected at least one dimension, such as (1,)")


def check_description(label: str, value: Any, kind: type, is_nested: bool = False) -> None:
    """Rejects a value that is neither a `kind` nor a dict of them. Only inputs may be nested deeper."""
    if isinstance(value, kind):
        return
    can_be_dict = kind is Inputs or not is_nested
    if not can_be_dict or not isinstance(value, Mapping) or not value:
        or_dict = ", or a dict of them" if can_be_dict else ""
        raise ConfigError(f"dataset: {label} must be a scaleflow.interfaces.{kind.__name__}{or_dict}")
    for key, part in value.items():
        if not isinstance(key, str) or not (INPUT_KEY if kind is Inputs else OUTPUT_KEY).fullmatch(key):
            expected = "without /" if kind is Inputs else "of letters, digits, spaces, _, - and ."
            raise ConfigError(f"dataset: {label} has the key {key!r}; expected a name {expected}")
        check_description(f"{label}[{key!r}]", part, kind, is_nested=True)


def check_examples(source: Source, split: str, examples: Examples) -> None:
    """Rejects examples whose keys, shapes or dtypes differ from the source's description."""
    describe = describe_arrays if isinstance(examples, Arrays) else describe_stream
    inputs, targets = describe(split, examples)  # type: ignore[arg-type]
    described_inputs = map_leaves(lambda leaf: Spec(tuple(leaf.shape), leaf.dtype), source.inputs)
    check_specs("inputs", split, inputs, described_inputs, described_as="inputs")
    described_targets = map_leaves(lambda leaf: Spec(leaf.target_shape, ""), source.outputs)
    check_specs("targets", split, targets, described_targets, described_as="outputs")


def check_specs(part: str, split: str, specs: Any, described: Any, described_as: str) -> None:
    """Rejects inputs or targets that differ from the description of the source.

    Args:
        part: `inputs` or `targets`.
        split: the name of the split.
        specs: the structure of specs of the examples.
        described: the structure of specs of the source. An empty dtype fits all dtypes.
        described_as: the attribute of the source, for messages.
    """
    if list(name_leaves(specs)) != list(name_leaves(described)):
        raise ConfigError(
            f"dataset: {part} of {split!r} {describe_keys(specs)}, but the source's {described_as} "
            f"{describe_keys(described)}"
        )
    for (name, spec), expected in zip(name_leaves(specs).items(), name_leaves(described).values(), strict=True):
        label = f"dataset: {label_leaf(part, name)} of {split!r}"
        if part == "targets" and spec.dtype == "string":
            raise ConfigError(
                f"{label} are texts, expected numbers; give the numbers of the classes, from 0, and their names in "
                "Outputs.names"
            )
        if spec.shape != expected.shape:
            hint = "; it gives batches: unbatch it" if spec.shape[1:] == expected.shape else ""
            raise ConfigError(f"{label} have shape {spec.shape}, but the source says {expected.shape}{hint}")
        if expected.dtype and spec.dtype != expected.dtype:
            raise ConfigError(f"{label} are {spec.dtype}, but the source says {expected.dtype}")


def check_targets(outputs: Outputs, split: str, name: str, targets: np.ndarray[Any, Any]) -> None:
    """Rejects targets in memory that are invalid for their kind."""
    kind = outputs.kind
    label = f"{kind} {label_leaf('targets', name)} of {split!r}"
    if targets.dtype.kind not in ("iu" if kind == "classification" else "iufb"):
        expected = "integers" if kind == "classification" else "numbers"
        raise ConfigError(f"dataset: {label} are {targets.dtype.name}, expected {expected}")
    check_finite_targets(label, targets)
    counted = targets if outputs.ignore is None else targets[targets != outputs.ignore]
    if not counted.size:
        raise ConfigError(f"dataset: all {label} are {outputs.ignore}, which is ignored")
    last = largest_target(outputs)
    if last is None:
        return
    low = counted.min()
    high = counted.max()
    if low < 0 or high > last:
        besides = "" if outputs.ignore is None else f" or {outputs.ignore}, which is ignored"
        raise ConfigError(f"dataset: {label} range from {low} to {high}, expected 0 to {last}{besides}")


def check_ids(inputs: InputStructure, split: str, examples: Any) -> None:
    """Rejects ids in memory that are not below `Inputs.vocabulary`. XLA would silently use the last id instead.

    Args:
        inputs: describes the examples.
        split: the name of the split.
        examples: arrays [n, ...] of the structure of `inputs`. Arrays that are mapped from a file are not read.
    """
    arrays = name_leaves(examples)
    for name, described in name_leaves(inputs).items():
        ids = arrays[name]
        vocabulary = described.vocabulary
        if vocabulary is None or ids.dtype.kind not in "iu" or isinstance(ids, np.memmap):
            continue
        low = int(ids.min())
        high = int(ids.max())
        if low < 0 or high >= vocabulary:
            raise ConfigError(
                f"dataset: {label_leaf('inputs', name)} of {split!r} range from {low} to {high}, expected 0 to "
                f"{vocabulary - 1}, because their vocabulary is {vocabulary}"
            )


def check_cached_targets(split: str, targets: Any) -> None:
    """Rejects NaN and infinite targets of a stream that is now in memory. `targets` is a structure of arrays."""
    for name, array in name_leaves(targets).items():
        check_finite_targets(f"{label_leaf('targets', name)} of {split!r}", array)


def check_weights(split: str, weights: np.ndarray[Any, Any]) -> None:
    """Rejects weights in memory that are negative, infinite or NaN, or all 0."""
    is_valid = weights.dtype.kind in "iufb" and bool(np.isfinite(weights).all()) and weights.min() >= 0
    if not is_valid or not weights.any():
        problem = "are all 0" if is_valid else "contain values that are negative, infinite or NaN"
        raise ConfigError(f"dataset: weights of {split!r} {problem}")


def describe_arrays(split: str, examples: Arrays) -> tuple[Any, Any]:
    """Returns the structures of specs (inputs, targets) of examples in memory."""
    lengths = {}
    for what, part in zip(("inputs", "targets", "weights"), examples.parts, strict=False):
        for name, array in name_leaves(part).items():
            if not isinstance(array, np.ndarray):
                raise ConfigError(
                    f"dataset: {label_leaf(what, name)} of {split!r} are a {type(array).__name__}, expected a numpy "
                    "array"
                )
            if array.dtype == object and array.size and isinstance(array.flat[0], np.ndarray | list | tuple):
                raise ConfigError(
                    f"dataset: {label_leaf(what, name)} of {split!r} are arrays of several lengths; pad them, as "
                    "keras.utils.pad_sequences does"
                )
            lengths[label_leaf(what, name)] = len(array)
    if len(set(lengths.values())) > 1:
        first, count = next(iter(lengths.items()))
        other, others = next(item for item in lengths.items() if item[1] != count)
        raise ConfigError(f"dataset: load({split!r}) returned {count} {first} and {others} {other}")
    if examples.weights is not None and examples.weights.ndim != 1:
        raise ConfigError(
            f"dataset: weights of {split!r} have shape {examples.weights.shape}, expected one number each"
        )
    if examples.weights is not None:
        check_weights(split, examples.weights)
    return map_leaves(to_spec, examples.inputs), map_leaves(to_spec, examples.targets)


def to_spec(array: np.ndarray[Any, Any]) -> Spec:
    return Spec(array.shape[1:], "string" if array.dtype.kind in "OSU" else array.dtype.name)


def describe_stream(split: str, examples: Stream) -> tuple[Any, Any]:
    """Returns the structures of specs (inputs, targets) of a stream."""
    spec = to_rows(examples).spec
    if not (isinstance(spec, tuple) and len(spec) in (2, 3) and all(is_tensor_structure(part) for part in spec)):
        raise ConfigError(
            f"dataset: the stream of {split!r} must yield (input, target), or (input, target, weight), but yields "
            f"{spec}"
        )
    if len(spec) == 3 and (isinstance(spec[2], Mapping) or spec[2].shape.rank != 0 or not is_number(spec[2].dtype)):
        raise ConfigError(f"dataset: the stream of {split!r} yields the weight {spec[2]}, expected one number")
    count = int(examples.dataset.cardinality())
    if count != examples.length and count >= 0:
        raise ConfigError(
            f"dataset: the stream of {split!r} holds {count} examples, but the source says {examples.length}"
        )
    return map_leaves(from_tensor_spec, spec[0]), map_leaves(from_tensor_spec, spec[1])


def from_tensor_spec(spec: tf.TensorSpec) -> Spec:
    return Spec(tuple(spec.shape) if spec.shape.rank is not None else "unknown", spec.dtype.name)


def is_number(dtype: Any) -> bool:
    return bool(dtype.is_floating or dtype.is_integer)


def is_tensor_structure(spec: Any) -> bool:
    """Returns whether an element's component is a tensor, or a dict of tensors."""
    return all(hasattr(leaf, "shape") for leaf in name_leaves(spec).values()) and spec != {}


#: Arrays up to this size are digested whole: a core takes 2 s for it.
WHOLE_BYTES = 2 << 30

#: A sample of larger arrays has this size.
SAMPLE_BYTES = 64 << 20

#: The `covers` of a digest of all values.
ALL_VALUES = "all"

BATCH = 1024

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ArrayRows(Arrays, Rows):
    """Examples in memory, or in memory-mapped files."""

    is_random_access: ClassVar[bool] = True

    @property
    def spec(self) -> tuple[Any, ...]:
        return tuple(map_leaves(lambda array: tf.TensorSpec(array.shape[1:], array.dtype), part) for part in self.parts)

    @property
    def place(self) -> Literal["memory", "file"]:
        for part in self.parts:
            for array in name_leaves(part).values():
                if isinstance(array, np.memmap):
                    return "file"
        return "memory"

    def select(self, chosen: Array) -> ArrayRows:
        numbered = self if self.rows is not None else replace(self, rows=np.arange(len(self)))
        return numbered.map(lambda array: array[chosen])

    def limit(self, count: int) -> Self:
        return self.map(lambda array: array[:count])

    def repeat(self, times: int) -> ArrayRows:
        return self.map(lambda array: np.concatenate([array] * times))

    def map_targets(self, convert: Callable[[Any], Any]) -> ArrayRows:
        with tf.device("CPU:0"):
            targets = convert(map_leaves(tf.convert_to_tensor, self.targets))
        return replace(self, targets=map_leaves(np.asarray, targets))

    def read(self, places: Array) -> tuple[Any, ...]:
        return tuple(map_leaves(lambda array: np.asarray(array[places]), part) for part in self.parts)

    def stream(self) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(self.parts).with_options(reading_options())

    def read_first(self, count: int) -> Any:
        return map_leaves(lambda array: np.array(array[:count]), self.inputs)

    def read_spread(self, count: int, reads_all: bool = False) -> tuple[Array, tuple[Any, ...]]:
        places = draw_places(len(self), count)
        return places, self.read(places)

    def iterate(self, pick: Callable[..., Any]) -> Iterator[Any]:
        for first in range(0, len(self), BATCH):
            yield pick(*self.read(slice(first, first + BATCH)))  # type: ignore[arg-type]

    def read_to_learn(self, name: str) -> Iterator[Array]:
        inputs = name_leaves(self.inputs)[name]
        return (inputs[first : first + BATCH] for first in range(0, len(self), BATCH))

    def read_cheap_targets(self) -> tuple[Any, Array | None]:
        return self.targets, self.weights

    def read_to_digest(self) -> tuple[str, Iterator[tuple[Any, ...]]]:
        if self.nbytes <= WHOLE_BYTES:
            return ALL_VALUES, iter([self.parts])
        bytes_per_example = max(1, self.nbytes // len(self))
        places = spread_evenly(len(self), max(DIGESTED, SAMPLE_BYTES // bytes_per_example))
        return f"a sample of {len(places)} examples", iter([self.read(places)])

    def locate(self, places: Array) -> tuple[None, Array]:
        return None, places if self.rows is None else self.rows[places]

    def check_targets(self, outputs: OutputStructure, split: str = "") -> ArrayRows:
        for name, described in name_leaves(outputs).items():
            check_targets(described, split, name, targets=name_leaves(self.targets)[name])
        return self

    def check_cached(self, inputs: InputStructure, split: str) -> None:
        check_ids(inputs, split, self.inputs)
        check_cached_targets(split, self.targets)
        if self.weights is not None:
            check_weights(split, self.weights)


def to_rows(examples: Examples | Rows) -> Rows:
    """Returns the examples of a source as `Rows`. Rows are returned unchanged."""
    if isinstance(examples, ArrayRows | StreamRows):
        return examples
    if isinstance(examples, Arrays):
        rows = ArrayRows(**{field.name: getattr(examples, field.name) for field in fields(Arrays)})
        weights = None if rows.weights is None else rows.weights.astype(np.float32)
        return replace(rows, weights=weights)
    stream = StreamRows(**{field.name: getattr(examples, field.name) for field in fields(Stream)})
    return replace(stream, dataset=stream.dataset.with_options(reading_options()))


#: The `covers` of a digest of all records of a stream, before they are decoded.
ALL_RECORDS = "all records"


@dataclass(frozen=True)
class Fingerprint:
    """Identifies a split."""

    examples: int  # their number
    digest: str  # 16 hexadecimal digits: a hash of the split's name and size, and of the values named by `covers`
    inputs: Any  # (dtype, shape of one example), or a dict of these by name
    targets: Any  # likewise
    #: `all`, `all records` (of a stream, before they are decoded) or `a sample of 32 examples`. A sample is spread
    #: evenly over the split, or has the first records of a stream that is not in memory.
    covers: str = ALL_VALUES
    paths: tuple[str, ...] = ()  # the files of the split, if the source names them


def fingerprint_split(split: str, examples: Rows, outputs: OutputStructure | None = None) -> Fingerprint:
    """Computes the fingerprint of a split from its raw examples in memory, or from a sample without unreadable ones.

    The names of the classes in `outputs` count. Targets are numbers, so they stay the same if a class is renamed.
    """
    covers, portions = examples.read_to_digest()
    digest = hashlib.blake2b(f"{split} {len(examples)}".encode(), digest_size=8)
    class_names: dict[str, Any] = {}
    if outputs is not None:
        for name, described in name_leaves(outputs).items():
            if described.names:
                class_names[name] = described.names
    digest.update(repr(class_names).encode())
    inputs: Any = None
    targets: Any = None
    for parts in portions:
        for part in parts:
            for name, values in name_leaves(part).items():
                digest.update(f"{name} {dtype_name(values)} {values.shape}".encode())
                update_digest(digest, values)
        if inputs is None:
            inputs = describe_examples(parts[0])
            targets = describe_examples(parts[1])
    contents = [values for values in examples.records if not are_paths(values)]
    if contents and len(contents) == len(examples.records):
        covers = ALL_RECORDS
    for values in contents:
        update_digest(digest, values)
    return Fingerprint(len(examples), digest.hexdigest(), inputs, targets=targets, covers=covers, paths=examples.paths)


def describe_examples(part: Any) -> Any:
    """Returns the dtype and shape of one example, or a dict of these by name."""
    described = {name: (dtype_name(values), list(values.shape[1:])) for name, values in name_leaves(part).items()}
    return described.get("", described)


def are_paths(values: Array) -> bool:
    """Returns whether texts are paths of files, judged by the first one.

    A digest leaves out such texts, because the folder of the data can move.
    """
    return dtype_name(values) == "string" and values.size > 0 and os.path.isfile(values.flat[0])  # noqa: PTH113


def dtype_name(values: Array) -> str:
    return name_dtype(values.dtype)


@cache
def name_dtype(dtype: np.dtype[Any]) -> str:
    return "string" if dtype.kind in "OSU" else dtype.name


def update_digest(digest: hashlib.blake2b, values: Array) -> None:
    """Adds all values to a digest. `str` and `bytes` count the same."""
    if dtype_name(values) != "string":
        digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        return
    texts = [text if isinstance(text, bytes) else str(text).encode() for text in values.ravel().tolist()]
    digest.update(np.fromiter(map(len, texts), np.int64, len(texts)).data)
    digest.update(b"".join(texts))
