"""The schema of data: what each column looks like in the training split. It is kept with what the run learned."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from scaleflow.data_checks.sample import ARRAY, CATEGORY, DATE, NUMBER, PICTURE, TEXT, SplitSample

#: The ends of ranges that each have about a tenth of the numbers, for histograms that are compared.
QUANTILES = np.arange(1, 10) / 10

#: The most categories that are kept, and the most characters of one.
MOST_CATEGORIES, MOST_LETTERS = 1000, 100

Array = np.ndarray[Any, Any]
Column = dict[str, Any]


def make_schema(sample: SplitSample) -> dict[str, Any]:
    """Returns the schema of a split, as values that JSON can hold: its `columns` and `targets`, by name."""
    return {
        "rows": len(sample),
        "columns": {name: describe_column(values, sample.kinds[name]) for name, values in sample.columns.items()},
        "targets": {
            f"target {name}".strip(): describe_column(values, CATEGORY if values.dtype == object else NUMBER)
            for name, values in sample.targets.items()
        },
    }


def describe_column(values: Array, kind: str) -> Column:
    """Describes a column: its kind, the share that is missing, and how its values are distributed."""
    if kind in (PICTURE, ARRAY):
        shape = [int(size) for size in values.shape[1:]]
        return {"kind": kind, "shape": shape, "missing": 0.0, **summarise_numbers(reduce_values(values, kind))}
    if kind == NUMBER:
        return {"kind": kind, **summarise_numbers(values)}
    missing = float(np.mean(values == "")) if len(values) and values.dtype == object else 0.0
    known = values[values != ""] if values.dtype == object else values
    described: Column = {"kind": kind, "missing": missing}
    if kind == DATE:
        return described | {"min": min(known, default=""), "max": max(known, default="")}
    if kind == TEXT:
        numbers = summarise_numbers(reduce_values(known, kind))
        return {**numbers, **described, "distinct": len(set(known.tolist()))}
    counts = Counter(str(value)[:MOST_LETTERS] for value in known.tolist())
    kept = dict(counts.most_common(MOST_CATEGORIES))
    return described | {"distinct": len(counts), "values": kept, "others": sum(counts.values()) - sum(kept.values())}


def reduce_values(values: Array, kind: str) -> Array:
    """Returns the number by which values are compared, [n]: brightness, length, or mean."""
    if kind == NUMBER:
        return values.astype(np.float64)
    if kind == TEXT:
        return np.array([len(text) for text in values], np.float64)
    return np.asarray(values.reshape(len(values), -1).mean(axis=1, dtype=np.float64))


def summarise_numbers(values: Array) -> Column:
    """Returns the range, the mean, the deviation and the histogram of numbers."""
    numbers = values.astype(np.float64)
    known = numbers[np.isfinite(numbers)]
    described: Column = {"missing": 1 - len(known) / max(1, len(numbers)), "distinct": len(np.unique(known))}
    if len(known):
        edges = np.unique(np.quantile(known, QUANTILES))
        counts = np.bincount(np.searchsorted(edges, known, side="right"), minlength=len(edges) + 1)
        described |= {"min": float(known.min()), "max": float(known.max()), "mean": float(known.mean())}
        described |= {"deviation": float(known.std()), "edges": edges.tolist(), "counts": counts.tolist()}
    return described
