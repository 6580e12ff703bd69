"""Histograms of a model's weights, for plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

BUCKETS = 30


def compute_histograms(model: keras.Model) -> Mapping[str, Mapping[str, Any]]:
    """Computes a histogram of each finite trainable variable, as JSON values, under `weights/<path>`."""
    weights = {f"weights/{v.path}": np.asarray(v.numpy(), np.float64) for v in model.trainable_variables}
    return {name: compute_histogram(values) for name, values in weights.items() if np.isfinite(values).all()}


def compute_histogram(values: np.ndarray[Any, Any]) -> Mapping[str, Any]:
    """Computes the histogram of finite values; `limits` are the upper ends of the buckets."""
    counts, edges = np.histogram(values, BUCKETS)
    return {
        "min": float(values.min()),
        "max": float(values.max()),
        "sum": float(values.sum()),
        "sum_squares": float(np.square(values).sum()),
        "limits": [float(edge) for edge in edges[1:]],
        "counts": [int(count) for count in counts],
    }
