"""Finds the values of a new model's weights in saved ones: whole layers, or the rows and columns that both know."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import keras
import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.interfaces import LearnedChanges, name_leaves
from scaleflow.model.layer_segments import find_heads, find_segments, label_inputs
from scaleflow.model.make import find_graph
from scaleflow.model.row_mapping import Array, Move, Segments, copy_columns, copy_rows, match_classes, match_rows

#: Layers whose first weights are [..., rows, columns], and whose second are a bias [columns], if there are.
MATRIX_LAYERS = (keras.layers.Dense, keras.layers.Embedding, keras.layers.Conv1D, keras.layers.Conv2D)

#: (saved columns [..., old], fresh ones [..., new], whether they are a bias) -> the new columns
Convert = Callable[[Array, Array, bool], Array]

#: The axis of a weight along which are the features that its layer takes, and the one of what it returns.
Axes = tuple[int | None, int | None]


@dataclass(frozen=True)
class SavedWeights:
    """The weights of a Keras file.

    Attributes:
        origin: the user's value of `model.init_from`.
        layers: each layer's weights by its path: the names of the models around it and its own, joined with `/`.
        segments: what each layer takes, by its path; see `find_segments`.
    """

    origin: str
    layers: Mapping[str, Sequence[Array]]
    segments: Mapping[str, Segments] = field(default_factory=dict)


class WeightMapping:
    """Maps the weights of a saved model to those of a new one.

    Args:
        model: the new model.
        saved: the saved weights.
        changes: what the new run learned otherwise; None if that is not known: equal shapes are then taken.

    Attributes:
        extended: by the path of a layer that has new rows or columns, how many of its numbers are saved ones.

    Raises:
        ConfigError: if it cannot be known which layers take what was learned anew.
    """

    def __init__(self, model: keras.Model, saved: SavedWeights, changes: LearnedChanges | None) -> None:
        self.extended: dict[str, int] = {}
        self._model, self._saved, self._changes = model, saved, changes
        has_changed = changes is not None and bool(changes.other_inputs or changes.other_outputs)
        if changes is not None and has_changed and find_graph(model) is None:
            raise ConfigError(
                f"model.init_from={saved.origin}: {changes.describe()}; but {type(model).__name__} is a subclass of "
                "keras.Model, which does not show which of its layers take these; use the first run's data, or build "
                "the model with keras.Model(inputs, outputs)"
            )

    def find_values(self, name: str, layer: keras.Layer, path: str) -> Sequence[Array] | None:
        """Returns the values of a layer's weights; None if it keeps its new ones.

        Args:
            name: the layer's path in the new model.
            layer: the new layer.
            path: the layer's path in the saved model.
        """
        old = self._saved.layers[path]
        whole = old if list_shapes(layer.weights) == list_shapes(old) else None
        if self._changes is None:
            return whole
        if not self._changes.maps_rows:
            is_affected = any(f"{name}/".startswith(f"{each}/") for each in self._affected)
            return None if is_affected else whole
        taken, takes = self._saved.segments.get(path), self._segments.get(name)
        if isinstance(layer, keras.layers.Embedding):
            taken, takes = describe_rows(taken, old[0]), describe_rows(takes, layer.weights[0])
        is_same = taken is None or takes is None or tuple(taken) == tuple(takes)
        head = self._heads.get(name)
        if is_same and head not in self._changes.other_outputs:
            return whole
        axes, convert = find_axes(layer), self._find_conversion(head)
        if axes is None or convert is None or len(old) != len(layer.weights):
            return None
        row = axes[0][0]
        rows = 1 if row is None else old[0].shape[row]
        moves = [(0, 0, rows)] if is_same else match_rows(taken or (), takes or ())
        return self._map(name, layer, old, axes, moves, convert)

    def _map(
        self,
        name: str,
        layer: keras.Layer,
        old: Sequence[Array],
        axes: Sequence[Axes],
        moves: Sequence[Move],
        convert: Convert,
    ) -> Sequence[Array] | None:
        """Returns a layer's weights with the rows and columns that the saved ones have."""
        fresh = [read_variable(each) for each in layer.weights]
        parts = [*zip(old, fresh, axes, strict=True)]
        is_head = convert is not keep_columns
        if not moves or not all(can_be_mapped(*each, is_head) for each in parts):
            return None
        self.extended[name] = sum(
            math.prod(
                sum(move[2] for move in moves) if axis == row else min(before.shape[axis], after.shape[axis])
                for axis in range(before.ndim)
            )
            for before, after, (row, _) in parts
        )
        return [map_weight(*each, moves, convert) for each in parts]

    def _find_conversion(self, head: str | None) -> Convert | None:
        """Returns what gives the columns of a layer from the saved ones; None if that is not known."""
        assert self._changes is not None
        if head is None or head not in self._changes.other_outputs:
            return keep_columns
        before, after = self._changes.find_old(head), name_leaves(self._changes.new.outputs)[head]
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
        """The layers that take an input, or give an output, that means something else than in the saved model."""
        assert self._changes is not None
        usual = find_segments(self._model, label_inputs(self._changes.grown_inputs))
        outputs = [path for path, name in self._heads.items() if name in self._changes.other_outputs]
        return [*(path for path, each in usual.items() if each != self._segments[path]), *outputs]


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
    taken, kernel, returned = re.split(",|->", layer.equation)
    bias = returned[min(map(returned.find, layer.bias_axes)) :] if layer.bias_axes else ""
    column = next((letter for letter in reversed(returned) if letter not in taken), None)

    def find(letters: str, letter: str | None) -> int | None:
        return None if letter is None or letter not in letters else letters.index(letter)

    return [(find(letters, taken[-1]), find(letters, column)) for letters in (kernel, bias)[:count]]


def can_be_mapped(old: Array, fresh: Array, axes: Axes, is_head: bool) -> bool:
    """Returns whether only the rows of a weight differ, or its columns if it is an output layer's."""
    free = axes if is_head else axes[:1]
    pairs = zip(old.shape, fresh.shape, strict=False)
    return old.ndim == fresh.ndim and all(a == b for axis, (a, b) in enumerate(pairs) if axis not in free)


def map_weight(old: Array, fresh: Array, axes: Axes, moves: Sequence[Move], convert: Convert) -> Array:
    """Returns a new weight with the rows and columns of the saved one."""
    row, column = axes
    if column is not None:  # the columns last
        old, fresh = (np.moveaxis(each, column, -1) for each in (old, fresh))
    if row is None:
        result = convert(old, fresh, True)
    else:
        row -= column is not None and column < row
        old, fresh = (np.moveaxis(each, row, 0) for each in (old, fresh))
        result = np.moveaxis(copy_rows(old, fresh, moves, lambda value, new: convert(value, new, False)), 0, row)
    return result if column is None else np.moveaxis(result, -1, column)


def describe_rows(taken: Segments | None, table: Any) -> Segments | None:
    """Returns what the rows of an embedding's table are: it takes numbers of them."""
    if taken is None:
        return None
    name = taken[0][0] if len(taken) == 1 else "several inputs"
    return ((name, int(table.shape[0])),)


def read_variable(variable: keras.Variable) -> Array:
    """Reads a variable, or the shards (along axis 0) of a variable on parameter servers."""
    shards = getattr(variable.value, "variables", None)
    return np.concatenate([np.asarray(each) for each in shards]) if shards else np.asarray(variable)


def list_shapes(weights: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(w.shape) for w in weights]
