"""Checks what a source says of its data, and that its examples agree with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.rows import to_rows
from scaleflow.dataset.batches.value_checks import check_weights
from scaleflow.dataset.column_kinds import KINDS
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Arrays,
    Examples,
    Inputs,
    Kind,
    Outputs,
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
    for attribute, expected_class in (("inputs", Inputs), ("outputs", Outputs)):
        # Without getattr's default, an AttributeError inside a property is not mistaken for a missing property.
        value = getattr(source, attribute) if hasattr(type(source), attribute) else getattr(source, attribute, None)
        check_description(f"{name}.{attribute}", value, expected_class)
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


def check_description(label: str, value: Any, expected_class: type, is_nested: bool = False) -> None:
    """Rejects a description that is neither an object of a class nor a dict of such objects.

    Args:
        label: the words for the description in messages.
        value: what the source says of its inputs or outputs.
        expected_class: `Inputs` or `Outputs`. Only dicts of inputs may contain dicts.
        is_nested: whether `value` is a part of a dict.
    """
    if isinstance(value, expected_class):
        return
    can_be_dict = expected_class is Inputs or not is_nested
    if not can_be_dict or not isinstance(value, Mapping) or not value:
        or_dict = ", or a dict of them" if can_be_dict else ""
        raise ConfigError(f"dataset: {label} must be a scaleflow.interfaces.{expected_class.__name__}{or_dict}")
    for key, part in value.items():
        if not isinstance(key, str) or not (INPUT_KEY if expected_class is Inputs else OUTPUT_KEY).fullmatch(key):
            expected = "without /" if expected_class is Inputs else "of letters, digits, spaces, _, - and ."
            raise ConfigError(f"dataset: {label} has the key {key!r}; expected a name {expected}")
        check_description(f"{label}[{key!r}]", part, expected_class, is_nested=True)


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
