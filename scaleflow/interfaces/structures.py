"""Structures: a value, or a dict of values or further dicts. Inputs, targets and outputs have this form.

`tf.nest` does the same for tensors. These functions need no TensorFlow, and also give each value a name: its keys
joined with `/`, or "" for a single value. Names are in `tf.nest`'s order: dicts by sorted keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def name_leaves(structure: Any) -> dict[str, Any]:
    """Returns the values of a structure by name."""
    leaves: dict[str, Any] = {}
    map_named(leaves.__setitem__, structure)
    return {name: leaves[name] for name in sorted(leaves, key=lambda name: name.split("/"))}


def map_leaves(function: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """Returns a structure of the results of `function`, called with the values of structures of the same keys."""
    if not isinstance(structure, Mapping):
        return function(structure, *others)
    return {key: map_leaves(function, value, *(other[key] for other in others)) for key, value in structure.items()}


def map_named(function: Callable[[str, Any], Any], structure: Any, prefix: str = "") -> Any:
    """Returns a structure of the results of `function`, called with the name and the value of each leaf."""
    if not isinstance(structure, Mapping):
        return function(prefix, structure)
    start = f"{prefix}/" if prefix else ""
    return {key: map_named(function, value, f"{start}{key}") for key, value in structure.items()}


def apply_layer(layer: Callable[[Any], Any], inputs: Sequence[Any]) -> list[Any]:
    """Returns what the preprocessing of one input, or of several at once, makes of each of them."""
    return list(layer(list(inputs))) if len(inputs) > 1 else [layer(inputs[0])]


def describe_keys(structure: Any) -> str:
    """Describes a structure's keys for a message: `are one tensor`, or `have the keys a, b`."""
    names = list(name_leaves(structure))
    if names == [""]:
        return "are one tensor"
    return f"have the key{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else "have no keys"


def label_leaf(what: str, name: str) -> str:
    """Names a leaf in a message: `inputs` of a single value, `inputs['age']` in a dict."""
    return f"{what}['{name}']" if name else what


def add_batch_dimension(shape: tuple[int | None, ...]) -> str:
    """Formats the shape of a batch of examples of a shape: `(batch, 8, 8)`."""
    return "(batch" + "".join(f", {size}" for size in shape) + ")"
