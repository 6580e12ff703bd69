"""Maps saved weights to a new model: whole layers, or the rows and columns that both models have.

The model's graph shows the source of each row of a layer's weights: the features of an input, words, or the units of
another layer. A segment is a range of rows with one source.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import keras
import numpy as np

from scaleflow.compat.keras import find_functional, find_node, list_nodes
from scaleflow.errors import ConfigError
from scaleflow.interfaces import LearnedChanges, Outputs, name_leaves
from scaleflow.model.make import find_graph

#: Operations that keep the number, order and source of features.
UNCHANGED = ("Rescaling", "Dropout", "Activation", "ReLU", "Cast", "ExpandDims", "Identity", "RepeatVector")

#: Elementwise operations. They keep the source of features if all operands have the same source.
ELEMENTWISE = (
    "Add",
    "Subtract",
    "Multiply",
    "Divide",
    "TrueDivide",
    "Power",
    "Sqrt",
    "Cos",
    "Minimum",
    "Maximum",
    "Absolute",
    "Round",
)

#: The key of `x[:, :1]`, the first feature.
FIRST = [slice(None), slice(None, 1)]

#: Operations that flatten features to one dimension.
FLAT = ("Flatten", "Reshape")


def find_segments(model: keras.Model, label: Callable[[str], str]) -> dict[str, Segments]:
    """Returns the segments of each layer's last input axis, by the layer's path; {} for a subclass of keras.Model.

    Args:
        model: a functional or sequential model, which may contain nested models.
        label: input name -> name of its segment.
    """
    graph = find_graph(model)
    functional = find_functional(model)
    if graph is None or functional is None:
        return {}
    inputs = graph[0][0] if isinstance(graph[0], list | tuple) else graph[0]
    names = {id(tensor): label(name) for name, tensor in name_leaves(inputs).items()}
    segments_of_inputs: list[Segments] = []
    for tensor in functional.inputs:
        segment = (names[id(tensor)], count_features(tensor))
        segments_of_inputs.append((segment,))
    segments_of_layers: dict[str, Segments] = {}
    walk(functional, segments_of_inputs, "", segments_of_layers)
    return segments_of_layers


def walk(
    graph: Any, segments_of_inputs: list[Segments], prefix: str, segments_of_layers: dict[str, Segments]
) -> list[Segments]:
    """Follows the segments of a graph's inputs to its outputs, and returns those of its outputs.

    Adds the segments that each layer takes to `segments_of_layers`, by the layer's path.
    """
    known = {id(tensor): segments for tensor, segments in zip(graph.inputs, segments_of_inputs, strict=True)}
    for node in list_nodes(graph):
        operation = node.operation
        input_segments = [known[id(tensor)] for tensor in node.input_tensors]
        inner = find_functional(operation)
        if inner is not None and len(inner.inputs) == len(input_segments):
            results = walk(inner, input_segments, f"{prefix}{operation.name}/", segments_of_layers)
        else:
            segments_of_layers.setdefault(prefix + operation.name, join_segments(input_segments))
            results = [pass_on(node, input_segments, output) for output in node.outputs]
        known |= zip(map(id, node.outputs), results, strict=True)
    return [known[id(tensor)] for tensor in graph.outputs]


def join_segments(segments_of_tensors: Iterable[Segments]) -> Segments:
    """Returns the segments of several tensors one after the other."""
    return tuple(itertools.chain.from_iterable(segments_of_tensors))


def pass_on(node: Any, input_segments: list[Segments], returned: keras.KerasTensor) -> Segments:
    """Returns the segments of one output of a node's operation."""
    operation = node.operation
    kind = type(operation).__name__
    size = count_features(returned)
    is_alike = bool(input_segments) and all(segments == input_segments[0] for segments in input_segments)
    if getattr(operation, "weights", None):
        if kind == "EinsumDense" and re.match(r"\w*(\w),\w*\1\w*->\w*\1$", operation.equation):
            return input_segments[0]  # a separate dense layer for each feature
        return ((f"layer {operation.name}", size),)
    is_last = getattr(operation, "axis", -1) in (-1, len(returned.shape) - 1)
    if kind == "Concatenate" and is_last:
        return join_segments(input_segments)
    if kind == "Concatenate" and is_alike:
        return input_segments[0]
    if kind == "Stack" and is_last:
        return tuple((digest(kind, [segments]), 1) for segments in input_segments)
    features = sum(count for _, count in input_segments[0]) if is_alike else 0
    if features == size and kind in ELEMENTWISE:
        return input_segments[0]
    features = features if len(input_segments) == 1 else 0
    if features == size and kind in (*UNCHANGED, *FLAT):
        return input_segments[0]
    if features and len(input_segments[0]) == 1 and kind in ("GetItem", "OneHot"):  # such as x[:, 1:]
        key = node.arguments.args[1] if kind == "GetItem" else ()
        key = list(key) if isinstance(key, tuple) else key  # a loaded model has a list here
        what = "" if key == FIRST else f" {kind} {key}"  # x[:, :1] has the same name as an input with one feature
        return ((f"{input_segments[0][0][0]}{what}", size),)
    if features and kind in FLAT and size % features == 0:
        return repeat_segments(input_segments[0], size // features)
    return ((digest(kind, input_segments), size),)


def repeat_segments(segments: Segments, times: int) -> Segments:
    """Returns segments once for each position of a flattened tensor, with the position in their names."""
    repeated = []
    for n in range(times):
        for name, count in segments:
            repeated.append((f"{name} at {n}", count))
    return tuple(repeated)


def digest(kind: str, input_segments: list[Segments]) -> str:
    """Returns a name for an operation's result: a hash of its operands. The order of operands does not matter."""
    operands = []
    for segments in input_segments:
        operands.append(repr([name for name, _ in segments]))
    return hashlib.sha256(repr((kind, sorted(operands))).encode()).hexdigest()


def count_features(tensor: keras.KerasTensor) -> int:
    """Returns the size of the last axis; 1 if the batch is the only axis."""
    if len(tensor.shape) <= 1:
        return 1
    return tensor.shape[-1] or 0


def find_heads(model: keras.Model) -> dict[str, str]:
    """Returns the output layers: layer path -> name of the output that it computes."""
    graph = find_graph(model)
    if graph is None:
        return {}
    outputs = graph[1][0] if isinstance(graph[1], list | tuple) else graph[1]
    heads = {}
    for name, tensor in name_leaves(outputs).items():
        path = find_last_layer(tensor, "")
        if path is not None:
            heads[path] = name
    return heads


def find_last_layer(tensor: keras.KerasTensor, prefix: str) -> str | None:
    """Returns the path of the last layer with weights before a tensor; None without one, or if there are several."""
    node, index = find_node(tensor)
    operation = node.operation
    inner = find_functional(operation)
    if inner is not None:
        return find_last_layer(inner.outputs[index], f"{prefix}{operation.name}/")
    if getattr(operation, "weights", None):
        return prefix + str(operation.name)
    paths = {find_last_layer(operand, prefix) for operand in node.input_tensors}
    return paths.pop() if len(paths) == 1 else None


def label_inputs(grown: Collection[str], other: Collection[str] = ()) -> Callable[[str], str]:
    """Returns a function that names the segment of an input.

    Inputs in `grown` have a vocabulary that may be larger in the new model. Inputs in `other` mean something else in
    the new model, so their segments match none of the saved model's.
    """

    def label(name: str) -> str:
        if name in other:
            return f"other input {name}"
        return f"{WORDS if name in grown else 'input '}{name}"

    return label


Array = np.ndarray[Any, Any]

#: A range of a layer's input features: (name, number of features). The name of a segment that may grow starts with
#: `WORDS`.
Segment = tuple[str, int]
Segments = Sequence[Segment]
WORDS = "words "

#: (first old row, first new row, number of rows)
Move = tuple[int, int, int]

#: The initial logit of a new class is the mean of the known classes' logits minus this, so it never wins.
MARGIN = 0.1


def match_rows(old: Segments, new: Segments) -> list[Move]:
    """Returns (first old row, first new row, number of rows) for each segment that both models have.

    Segments must have the same size, except for words, where new rows may follow the old ones.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    start = 0
    for name, size in old:
        places.setdefault(name, []).append((start, size))
        start += size
    moves = []
    start = 0
    for name, size in new:
        first, old_size = places[name].pop(0) if places.get(name) else (0, 0)
        if old_size and (old_size == size or name.startswith(WORDS)):
            moves.append((first, start, min(old_size, size)))
        start += size
    return moves


def copy_rows(
    old: Array, fresh: Array, moves: Sequence[Move], convert: Callable[[Array, Array], Array] = lambda old, fresh: old
) -> Array:
    """Returns a copy of `fresh` [new rows, ...] in which rows of `old` [old rows, ...] replace the rows in `moves`.

    `convert` gets the corresponding rows of both arrays and returns the new rows.
    """
    result = np.array(fresh)
    for first, start, count in moves:
        result[start : start + count] = convert(old[first : first + count], result[start : start + count])
    return result


def match_classes(old: Outputs, new: Outputs) -> Mapping[int, int] | None:
    """Returns new column -> old column for each class that both outputs have; None if the outputs do not correspond.

    The classes of a binary output count as columns 0 and 1, although the model returns a single logit.
    """
    kinds = {"binary": "classification"} if new.kind == "classification" else {}
    if kinds.get(old.kind, old.kind) != new.kind or (new.kind == "binary" and old.names != new.names):
        return None
    if new.kind == "regression" or new.kind == "binary" or old.names is None or new.names is None:
        is_same = (old.shape, old.names, old.levels) == (new.shape, new.names, new.levels) and old.kind == new.kind
        is_same &= old.levels is None or old.scaling == new.scaling  # steps between quantiles cannot be rescaled
        return {n: n for n in range(new.shape[-1])} if is_same else None
    old_columns = {name: n for n, name in enumerate(old.names)}
    columns = {n: old_columns[name] for n, name in enumerate(new.names) if name in old_columns}
    if not columns or old.shape[:-1] != new.shape[:-1]:
        return None
    return columns


def copy_columns(
    value: Array, fresh: Array, is_bias: bool, old_outputs: Outputs, new_outputs: Outputs, columns: Mapping[int, int]
) -> Array:
    """Returns the kernel or bias of a new output layer [..., columns], with the saved weights of the known classes.

    - The logits of known classes stay the same. A binary output with logit z becomes the logits 0 and z, whose softmax
      is sigmoid(z).
    - A new class starts with the mean weights of the known classes and a slightly lower bias (`MARGIN`). Its logit is
      never the largest, so no prediction changes.
    - New labels of a multi-label output keep their fresh weights.
    - Values are rescaled to the new output's scaling.

    Args:
        value: the saved layer's weight, [..., old columns].
        fresh: the new layer's weight, [..., new columns].
        is_bias: whether the weight is a bias.
        old_outputs, new_outputs: the descriptions of the saved and the new output.
        columns: the result of `match_classes`.
    """
    if new_outputs.kind == "regression":
        return rescale(value, is_bias, old=old_outputs, new=new_outputs)
    if new_outputs.kind == "binary":
        return value
    if old_outputs.kind == "binary":
        value = np.concatenate([np.zeros_like(value), value], axis=-1)
    places = fresh.shape[-1] // new_outputs.shape[-1]  # a dense layer can compute the classes of several positions
    known = value.reshape(*value.shape[:-1], places, -1)
    result = np.array(fresh).reshape(*fresh.shape[:-1], places, -1)
    if new_outputs.kind == "classification":
        result[:] = known.mean(axis=-1, keepdims=True) - (MARGIN if is_bias else 0.0)
    for column, old_column in columns.items():
        result[..., column] = known[..., old_column]
    return result.reshape(fresh.shape)


def rescale(value: Array, is_bias: bool, old: Outputs, new: Outputs) -> Array:
    """Converts a kernel or bias to another scaling of the output. Values in the unit of the targets stay the same."""
    old_mean, old_deviation = old.scaling or (0.0, 1.0)
    mean, deviation = new.scaling or (0.0, 1.0)
    shift = old_mean - mean if is_bias else 0.0
    return (value * old_deviation + shift) / deviation


#: Layers with a matrix [..., rows, columns] and an optional bias [columns].
MATRIX_LAYERS = (keras.layers.Dense, keras.layers.Embedding, keras.layers.Conv1D, keras.layers.Conv2D)

#: (saved weight [..., old columns], fresh weight [..., new columns], whether it is a bias) -> new weight
Convert = Callable[[Array, Array, bool], Array]

#: The axis of a weight for the layer's input features (rows), and the axis for its output features (columns). None if
#: the weight has no such axis.
Axes = tuple[int | None, int | None]


@dataclass(frozen=True)
class SavedWeights:
    """The weights of a Keras file.

    Attributes:
        origin: the user's value of `model.init_from`.
        layers: layer path -> its weights. A path joins the names of the enclosing models and the layer with `/`.
        segments: layer path -> the segments of its input; see `find_segments`.
    """

    origin: str
    layers: Mapping[str, Sequence[Array]]
    segments: Mapping[str, Segments] = field(default_factory=dict)


class WeightMapping:
    """Maps the weights of a saved model to a new model.

    Args:
        model: the new model.
        saved: the saved weights.
        changes: differences in the learned state of the two runs; None if they are not known. Layers with equal shapes
            are then copied.

    Attributes:
        extended: path of a layer with new rows or columns -> the number of its weights that come from the saved model.

    Raises:
        ConfigError: if inputs or outputs changed, but the model does not show which layers use them.
    """

    def __init__(self, model: keras.Model, saved: SavedWeights, changes: LearnedChanges | None) -> None:
        self.extended: dict[str, int] = {}
        self._model = model
        self._saved = saved
        self._changes = changes
        has_changed = changes is not None and bool(changes.other_inputs or changes.other_outputs)
        if changes is not None and has_changed and find_graph(model) is None:
            raise ConfigError(
                f"model.init_from={saved.origin}: {changes.describe()}; but {type(model).__name__} is a subclass of "
                "keras.Model, which does not show which of its layers take these; use the first run's data, or build "
                "the model with keras.Model(inputs, outputs)"
            )

    def find_values(self, name: str, layer: keras.Layer, path: str) -> Sequence[Array] | None:
        """Returns the values for a layer's weights; None if the layer keeps its fresh weights.

        Args:
            name: the layer's path in the new model.
            layer: the layer.
            path: the corresponding layer's path in the saved model.
        """
        old = self._saved.layers[path]
        whole = old if list_shapes(layer.weights) == list_shapes(old) else None
        if self._changes is None:
            return whole
        if not self._changes.maps_rows:
            is_affected = any(f"{name}/".startswith(f"{affected}/") for affected in self._affected)
            return None if is_affected else whole
        old_segments = self._saved.segments.get(path)
        new_segments = self._segments.get(name)
        if isinstance(layer, keras.layers.Embedding):
            old_segments = describe_rows(old_segments, old[0])
            new_segments = describe_rows(new_segments, layer.weights[0])
        is_same = old_segments is None or new_segments is None or tuple(old_segments) == tuple(new_segments)
        head = self._heads.get(name)
        if is_same and head not in self._changes.other_outputs:
            return whole
        axes = find_axes(layer)
        convert = self._find_conversion(head)
        if axes is None or convert is None or len(old) != len(layer.weights):
            return None
        row = axes[0][0]
        rows = 1 if row is None else old[0].shape[row]
        moves = [(0, 0, rows)] if is_same else match_rows(old_segments or (), new_segments or ())
        return self._map(name, layer, old, axes=axes, moves=moves, convert=convert)

    def _map(
        self,
        name: str,
        layer: keras.Layer,
        old: Sequence[Array],
        axes: Sequence[Axes],
        moves: Sequence[Move],
        convert: Convert,
    ) -> Sequence[Array] | None:
        """Returns a layer's fresh weights with corresponding rows and columns replaced; None if that is impossible."""
        if not moves:
            return None
        is_head = convert is not keep_columns
        moved_rows = sum(count for _, _, count in moves)
        copied = 0
        mapped = []
        for old_weight, variable, weight_axes in zip(old, layer.weights, axes, strict=True):
            fresh = read_variable(variable)
            if not can_be_mapped(old_weight, fresh, weight_axes, is_head):
                return None
            row, _ = weight_axes
            sizes = [min(pair) for pair in zip(old_weight.shape, fresh.shape, strict=True)]
            if row is not None:
                sizes[row] = moved_rows
            copied += math.prod(sizes)
            mapped.append(map_weight(old_weight, fresh, weight_axes, moves, convert))
        self.extended[name] = copied
        return mapped

    def _find_conversion(self, head: str | None) -> Convert | None:
        """Returns the function that converts a layer's saved columns; None if the output changed beyond conversion."""
        assert self._changes is not None
        if head is None or head not in self._changes.other_outputs:
            return keep_columns
        before = self._changes.find_old(head)
        after = name_leaves(self._changes.new.outputs)[head]
        columns = None if before is None else match_classes(before, after)
        if before is None or columns is None:
            return None
        return partial(copy_columns, old_outputs=before, new_outputs=after, columns=columns)

    @cached_property
    def _segments(self) -> Mapping[str, Segments]:
        assert self._changes is not None
        return find_segments(self._model, label_inputs(self._changes.grown_inputs, self._changes.other_inputs))

    @cached_property
    def _heads(self) -> Mapping[str, str]:
        return find_heads(self._model)

    @cached_property
    def _affected(self) -> Sequence[str]:
        """The layers that use an input, or compute an output, whose meaning differs from the saved model."""
        assert self._changes is not None
        usual = find_segments(self._model, label_inputs(self._changes.grown_inputs))
        affected = [path for path, segments in usual.items() if segments != self._segments[path]]
        affected += [path for path, name in self._heads.items() if name in self._changes.other_outputs]
        return affected


def keep_columns(old: Array, fresh: Array, is_bias: bool) -> Array:
    return old


def find_axes(layer: keras.Layer) -> list[Axes] | None:
    """Returns the axes of each weight of a layer; None if they are not known."""
    count = len(layer.weights)
    if isinstance(layer, MATRIX_LAYERS):
        rank = len(layer.weights[0].shape)
        axes: list[Axes] = [(rank - 2, rank - 1), (None, 0)]
        return axes[:count]
    if not isinstance(layer, keras.layers.EinsumDense) or "." in layer.equation:
        return None
    input_letters, kernel_letters, output_letters = re.split(",|->", layer.equation)
    bias_letters = output_letters[min(map(output_letters.find, layer.bias_axes)) :] if layer.bias_axes else ""
    column = next((letter for letter in reversed(output_letters) if letter not in input_letters), None)

    def find(letters: str, letter: str | None) -> int | None:
        return None if letter is None or letter not in letters else letters.index(letter)

    return [
        (find(letters, input_letters[-1]), find(letters, column)) for letters in (kernel_letters, bias_letters)[:count]
    ]


def can_be_mapped(old: Array, fresh: Array, axes: Axes, is_head: bool) -> bool:
    """Returns whether two weights differ only in their numbers of rows (in an output layer also of columns)."""
    if old.ndim != fresh.ndim:
        return False
    free = axes if is_head else axes[:1]
    return all(old.shape[axis] == fresh.shape[axis] for axis in range(old.ndim) if axis not in free)


def map_weight(old: Array, fresh: Array, axes: Axes, moves: Sequence[Move], convert: Convert) -> Array:
    """Returns the fresh weight with the corresponding rows and columns of the saved one."""
    row, column = axes
    if column is not None:  # move the columns to the last axis
        old = np.moveaxis(old, column, -1)
        fresh = np.moveaxis(fresh, column, -1)
    if row is None:
        result = convert(old, fresh, True)
    else:
        if column is not None and column < row:
            row -= 1
        old_rows = np.moveaxis(old, row, 0)
        fresh_rows = np.moveaxis(fresh, row, 0)
        rows = copy_rows(old_rows, fresh_rows, moves, convert=lambda value, new: convert(value, new, False))
        result = np.moveaxis(rows, 0, row)
    if column is None:
        return result
    return np.moveaxis(result, -1, column)


def describe_rows(input_segments: Segments | None, table: Any) -> Segments | None:
    """Returns the segments of the rows of an embedding's table. The layer's inputs are row numbers."""
    if input_segments is None:
        return None
    name = input_segments[0][0] if len(input_segments) == 1 else "several inputs"
    return ((name, int(table.shape[0])),)


def read_variable(variable: keras.Variable) -> Array:
    """Reads a variable, or joins its shards (along axis 0) on parameter servers."""
    shards = getattr(variable.value, "variables", None)
    if not shards:
        return np.asarray(variable)
    return np.concatenate(list(map(np.asarray, shards)))


def list_shapes(weights: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in weights]
