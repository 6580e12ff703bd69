"""Which rows and columns of a saved weight matrix are which of a new one. No TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from scaleflow.interfaces import Outputs

Array = np.ndarray[Any, Any]

#: A part of what a layer takes: what it is, and its number of features. `WORDS` begins the name of one that may grow.
Segment = tuple[str, int]
Segments = Sequence[Segment]
WORDS = "words "

#: (first old row, first new row, number of rows)
Move = tuple[int, int, int]

#: How far the logit of a new class begins below the mean of the known ones, so that it never wins.
MARGIN = 0.1


def match_rows(old: Segments, new: Segments) -> list[Move]:
    """Returns (first old row, first new row, number of rows) of each segment that both have.

    A segment of words may have grown: its old rows are the first ones. Other segments must have the same size.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    start = 0
    for name, size in old:
        places.setdefault(name, []).append((start, size))
        start += size
    moves, start = [], 0
    for name, size in new:
        first, old_size = places[name].pop(0) if places.get(name) else (0, 0)
        if old_size and (old_size == size or name.startswith(WORDS)):
            moves.append((first, start, min(old_size, size)))
        start += size
    return moves


def copy_rows(
    old: Array, fresh: Array, moves: Sequence[Move], convert: Callable[[Array, Array], Array] = lambda old, fresh: old
) -> Array:
    """Returns `fresh` [new rows, ...] with the rows of `old` [old rows, ...] that `match_rows` names.

    `convert` gets such rows of both, and returns those of the result.
    """
    result = np.array(fresh)
    for first, start, count in moves:
        result[start : start + count] = convert(old[first : first + count], result[start : start + count])
    return result


def match_classes(old: Outputs, new: Outputs) -> Mapping[int, int] | None:
    """Returns the old column of each known new class; None if the outputs mean something else.

    Two classes count as columns 0 and 1 here, although the model returns a single logit for them.
    """
    kinds = {"binary": "classification"} if new.kind == "classification" else {}
    if kinds.get(old.kind, old.kind) != new.kind or (new.kind == "binary" and old.names != new.names):
        return None
    if new.kind == "regression" or new.kind == "binary" or old.names is None or new.names is None:
        is_same = (old.shape, old.names) == (new.shape, new.names) and old.kind == new.kind
        return {n: n for n in range(new.shape[-1])} if is_same else None
    places = {name: n for n, name in enumerate(old.names)}
    found = {n: places[name] for n, name in enumerate(new.names) if name in places}
    return found if found and old.shape[:-1] == new.shape[:-1] else None


def copy_columns(
    value: Array, fresh: Array, is_bias: bool, old_outputs: Outputs, new_outputs: Outputs, columns: Mapping[int, int]
) -> Array:
    """Returns a new output layer's kernel or bias [..., columns], with the weights of the known classes.

    The model computes the same as before for them: two classes become logits 0 and z, whose softmax is the sigmoid of
    z. A new class among several begins as the mean of the known ones, and the bias a little below: so none of its
    logits is the largest one, and no example changes its class. New labels keep their fresh weights.

    Args:
        value: of the saved layer, [..., old columns].
        fresh: of the new layer, [..., new columns].
        is_bias: whether it is a bias.
        old_outputs, new_outputs: of both.
        columns: as `match_classes` returns it.
    """
    if new_outputs.kind == "regression":
        return rescale(value, is_bias, old_outputs, new_outputs)
    if new_outputs.kind == "binary":
        return value
    if old_outputs.kind == "binary":
        value = np.concatenate([np.zeros_like(value), value], axis=-1)
    places = fresh.shape[-1] // new_outputs.shape[-1]  # positions of a segmentation that is computed by a dense layer
    known = value.reshape(*value.shape[:-1], places, -1)
    result = np.array(fresh).reshape(*fresh.shape[:-1], places, -1)
    if new_outputs.kind == "classification":
        result[:] = known.mean(axis=-1, keepdims=True) - (MARGIN if is_bias else 0.0)
    for column, old_column in columns.items():
        result[..., column] = known[..., old_column]
    return result.reshape(fresh.shape)


def rescale(value: Array, is_bias: bool, old: Outputs, new: Outputs) -> Array:
    """Returns a kernel or bias that gives the same values in the unit of the targets under another scaling."""
    (old_mean, old_deviation), (mean, deviation) = (each.scaling or (0.0, 1.0) for each in (old, new))
    shift = old_mean - mean if is_bias else 0.0
    return (value * old_deviation + shift) / deviation
