"""Sums of tensors broadcast as NumPy's do, whatever the sizes are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

SHAPES = [
    ((8, 8), (8, 1)),
    ((8, 8), (1, 8)),
    ((8, 8), (8,)),
    ((1, 8), (8, 1)),
    ((1, 1, 8), (1, 8, 1)),
    ((3, 8, 5), (8, 1)),
    ((3, 8, 5), (3, 1, 1)),
    ((8, 4, 4, 8), (8, 1, 1, 1)),
    ((2, 8, 4, 4), (1, 8, 1, 1)),
    ((2, 3), (1, 1, 3)),
]


def sums_of(shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[float]:
    """How far each sum is from NumPy's."""
    import keras

    from scaleflow.model.keras_ops import correct_keras_add

    correct_keras_add()
    correct_keras_add()
    generator = np.random.default_rng(0)
    pairs = [[generator.normal(size=shape).astype("float32") for shape in pair] for pair in shapes]
    return [float(np.max(np.abs(np.asarray(keras.ops.add(a, b)) - (a + b)))) for a, b in pairs]


def test_keras_adds_as_numpy_does(isolated: Callable[..., Any]) -> None:
    assert isolated(sums_of, SHAPES) == [0.0] * len(SHAPES)


def are_misread(pairs: list[tuple[tuple[int | None, ...], tuple[int | None, ...]]]) -> list[bool]:
    from scaleflow.model.keras_ops import is_misread_as_bias

    return [is_misread_as_bias(*pair) for pair in pairs]


def test_a_bias_is_told_from_a_column(isolated: Callable[..., Any]) -> None:
    pairs: dict[tuple[tuple[int | None, ...], tuple[int | None, ...]], bool] = {
        ((8, 8), (8, 1)): True,
        ((None, 8), (None, 1)): False,
        ((None, 8), (8,)): False,
        ((2, 8, 4, 4), (1, 8, 1, 1)): False,
        ((2, 8, 4, 4), (8, 1, 1)): False,
        ((8, 4, 4, 8), (8, 1, 1, 1)): True,
    }
    assert isolated(are_misread, list(pairs)) == list(pairs.values())
