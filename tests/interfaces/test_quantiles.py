"""Weighted quantiles are those of NumPy, where NumPy has them."""

from __future__ import annotations

import numpy as np
import pytest

from scaleflow.interfaces.quantiles import weighted_quantiles

QUANTILES = [0.05, 0.5, 0.9, 0.95, 1.0]


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="NumPy has no weights before 2.0")
def test_they_are_those_of_numpy() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        size = int(draw.integers(1, 30))
        values, weights = draw.integers(0, 9, size) / 7, draw.integers(0, 4, size) + draw.choice([0, 0.25], size)
        weights[0] += 1
        expected = np.quantile(values, QUANTILES, weights=weights, method="inverted_cdf")
        assert (weighted_quantiles(values, QUANTILES, weights) == expected).all(), (values, weights)


def test_a_value_without_weight_is_none() -> None:
    assert weighted_quantiles(np.array([3, 1, 2]), [0.5, 1], np.array([1, 1, 0])).tolist() == [1, 3]
