"""Sums of tensors broadcast as NumPy's do, whatever the sizes are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.model.broadcasting import is_misread_as_bias

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

    from scaleflow.model.broadcasting import correct_keras_add

    correct_keras_add()
    correct_keras_add()
    generator = np.random.default_rng(0)
    pairs = [[generator.normal(size=shape).astype("float32") for shape in pair] for pair in shapes]
    return [float(np.max(np.abs(np.asarray(keras.ops.add(a, b)) - (a + b)))) for a, b in pairs]


def test_keras_adds_as_numpy_does(isolated: Callable[..., Any]) -> None:
    assert isolated(sums_of, SHAPES) == [0.0] * len(SHAPES)


@pytest.mark.parametrize(
    ("shape", "other", "is_wrong"),
    [
        ((8, 8), (8, 1), True),
        ((None, 8), (None, 1), False),
        ((None, 8), (8,), False),
        ((2, 8, 4, 4), (1, 8, 1, 1), False),
        ((2, 8, 4, 4), (8, 1, 1), False),
        ((8, 4, 4, 8), (8, 1, 1, 1), True),
    ],
)
def test_a_bias_is_told_from_a_column(
    shape: tuple[int | None, ...], other: tuple[int | None, ...], is_wrong: bool
) -> None:
    assert is_misread_as_bias(shape, other) is is_wrong
