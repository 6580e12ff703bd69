"""Reads from a model's graph what each layer takes: features of which input, words, or units of which layer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import keras

from scaleflow.interfaces import name_leaves
from scaleflow.model.make import find_functional, find_graph
from scaleflow.model.row_mapping import WORDS, Segments

#: Operations after which each feature is still what it was.
UNCHANGED = ("Rescaling", "Dropout", "Activation", "ReLU", "Cast", "ExpandDims", "Identity", "RepeatVector")

#: Operations on each number by itself, with constants or with others that were computed from it.
ELEMENTWISE = ("Add", "Subtract", "Multiply", "Divide", "TrueDivide", "Power", "Minimum", "Maximum", "Cos", "Sqrt")

#: The key of the first feature, x[:, :1].
FIRST = [slice(None), slice(None, 1)]

#: Operations that lay features out in one dimension.
FLAT = ("Flatten", "Reshape")


def find_segments(model: keras.Model, label: Callable[[str], str]) -> dict[str, Segments]:
    """Returns what each layer with weights takes on its last axis, by the layer's path; empty without a graph.

    Args:
        model: functional or sequential. Nested models are entered.
        label: names the features of an input, by the input's name.
    """
    graph, functional = find_graph(model), find_functional(model)
    if graph is None or functional is None:
        return {}
    taken = graph[0][0] if isinstance(graph[0], list | tuple) else graph[0]
    names = {id(tensor): label(name) for name, tensor in name_leaves(taken).items()}
    found: dict[str, Segments] = {}
    walk(functional, [((names[id(each)], count_features(each)),) for each in functional._inputs], "", found)
    return found


def walk(graph: Any, given: list[Segments], prefix: str, found: dict[str, Segments]) -> list[Segments]:
    """Follows the segments of a graph's inputs to its outputs, and adds what its layers take to `found`."""
    known = {id(tensor): each for tensor, each in zip(graph._inputs, given, strict=True)}
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if node.is_input:
                continue
            operation, taken = node.operation, [known[id(each)] for each in node.input_tensors]
            inner = find_functional(operation)
            if inner is not None and len(inner._inputs) == len(taken):
                results = walk(inner, taken, f"{prefix}{operation.name}/", found)
            else:
                found.setdefault(prefix + operation.name, tuple(each for part in taken for each in part))
                results = [pass_on(node, taken, each) for each in node.outputs]
            known |= zip(map(id, node.outputs), results, strict=True)
    return [known[id(each)] for each in graph._outputs]


def pass_on(node: Any, taken: list[Segments], returned: keras.KerasTensor) -> Segments:
    """Returns the segments of what a node's operation returns."""
    operation = node.operation
    kind, size = type(operation).__name__, count_features(returned)
    is_alike = bool(taken) and all(each == taken[0] for each in taken)
    if getattr(operation, "weights", None):
        if kind == "EinsumDense" and re.match(r"\w*(\w),\w*\1\w*->\w*\1$", operation.equation):
            return taken[0]  # each feature for itself
        return ((f"layer {operation.name}", size),)
    is_last = getattr(operation, "axis", -1) in (-1, len(returned.shape) - 1)
    if kind == "Concatenate" and is_last:
        return tuple(each for part in taken for each in part)
    if kind == "Concatenate" and is_alike:
        return taken[0]
    if kind == "Stack" and is_last:
        return tuple((digest(kind, [part]), 1) for part in taken)
    features = sum(count for _, count in taken[0]) if is_alike else 0
    if features == size and kind in ELEMENTWISE:
        return taken[0]
    features = features if len(taken) == 1 else 0
    if features == size and kind in (*UNCHANGED, *FLAT):
        return taken[0]
    if features and len(taken[0]) == 1 and kind in ("GetItem", "OneHot"):  # such as x[:, 1:]
        key = node.arguments.args[1] if kind == "GetItem" else ()
        key = list(key) if isinstance(key, tuple) else key  # which a loaded model has a list for
        what = "" if key == FIRST else f" {kind} {key}"  # the first feature is named as an input that has no more
        return ((f"{taken[0][0][0]}{what}", size),)
    if features and kind in FLAT and size % features == 0:
        return tuple((f"{name} at {n}", count) for n in range(size // features) for name, count in taken[0])
    return ((digest(kind, taken), size),)


def digest(kind: str, taken: list[Segments]) -> str:
    """Names the result of an operation by what it is made of. The order of its arguments does not count."""
    return hashlib.sha256(repr((kind, sorted(repr([name for name, _ in each]) for each in taken))).encode()).hexdigest()


def count_features(tensor: keras.KerasTensor) -> int:
    """Returns the size of the last axis; 1 if there is only the batch."""
    return (tensor.shape[-1] or 0) if len(tensor.shape) > 1 else 1


def find_heads(model: keras.Model) -> dict[str, str]:
    """Returns the name of the output that a layer computes, by the layer's path."""
    graph = find_graph(model)
    if graph is None:
        return {}
    returned = graph[1][0] if isinstance(graph[1], list | tuple) else graph[1]
    heads = {name: next(trace_layers(tensor, ""), None) for name, tensor in name_leaves(returned).items()}
    return {path: name for name, path in heads.items() if path is not None}


def trace_layers(tensor: keras.KerasTensor, prefix: str) -> Iterator[str]:
    """Yields the path of the layer that computes a tensor, if only operations without weights follow it."""
    history = tensor._keras_history
    operation = history.operation
    inner = find_functional(operation)
    if inner is not None:
        yield from trace_layers(inner._outputs[history.tensor_index], f"{prefix}{operation.name}/")
    elif getattr(operation, "weights", None):
        yield prefix + operation.name
    else:
        before = operation._inbound_nodes[history.node_index].input_tensors
        paths = {next(trace_layers(each, prefix), None) for each in before}
        yield from filter(None, paths if len(paths) == 1 else ())


def label_inputs(grown: Collection[str], other: Collection[str] = ()) -> Callable[[str], str]:
    """Returns a function that names the features of an input; those of `other` match no other features."""

    def label(name: str) -> str:
        if name in other:
            return f"other input {name}"
        return f"{WORDS if name in grown else 'input '}{name}"

    return label
