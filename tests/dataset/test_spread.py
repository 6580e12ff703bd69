"""The mean and the deviation of numbers, and whether float32 can hold them."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from scaleflow.dataset.reading.targets import find_mean_and_deviation, is_wide
from scaleflow.interfaces import Outputs
from scaleflow.serving.cells import match_names


@pytest.mark.parametrize("scale", [1e-300, 1e-12, 1.0, 1e12, 1e250])
def test_the_deviation_is_that_of_exact_fractions(scale: float) -> None:
    numbers = [scale * each for each in (1.0, 2.5, -3.0, 7.0)]
    mean, deviation = find_mean_and_deviation(np.array(numbers))
    assert mean == pytest.approx(scale * statistics.fmean(each / scale for each in numbers), rel=1e-12)
    assert deviation == pytest.approx(scale * statistics.pstdev([each / scale for each in numbers]), rel=1e-12)


def test_equal_numbers_have_no_deviation() -> None:
    """numpy says 1.4e-17 for some: a test row with another value would be 1e16 deviations away."""
    for count in (3, 10, 1000, 9999):
        assert find_mean_and_deviation(np.full(count, 0.1)) == (0.1, 0.0)


def test_numbers_are_wide_if_float32_moves_them_within_their_range() -> None:
    shares = np.linspace(-1, 1, 50)
    wide = {"unix seconds": 1.7e9 + 200 * shares, "julian days": 2.46e6 + shares, "utm": 5.4e6 + 100 * shares}
    narrow = {"plain": shares, "tiny": 1e-12 * shares, "long tail": np.exp(20 * shares), "constant": np.full(9, 1.7e9)}
    assert [is_wide(each) for each in wide.values()] == [True] * 3
    assert [is_wide(each) for each in narrow.values()] == [False] * 4
    assert is_wide(np.stack([shares, 1.7e9 + shares], axis=1))
    assert not is_wide(np.stack([shares, np.where(shares > 0, np.nan, shares)], axis=1))


def test_values_that_float32_cannot_tell_apart_have_outputs_of_float64() -> None:
    assert Outputs("regression", (1,), scaling=(1.7e9, 115.0)).dtype == "float64"
    assert Outputs("regression", (1,), scaling=(0.0, 1.0), limits=(-3.0, 1e9)).dtype == "float64"
    assert Outputs("regression", (1,), scaling=(180_000.0, 80_000.0), limits=(3e4, 7e5)).dtype == "float32"
    assert Outputs("regression", (1,)).dtype == Outputs("binary", (1,)).dtype == "float32"


def test_ids_of_seventeen_digits_stay_apart() -> None:
    known = ["9007199254740992", "1.50"]
    assert match_names(["9007199254740993", "9007199254740992.0", "1.5", "-0"], known) == [None, 0, 1, None]
