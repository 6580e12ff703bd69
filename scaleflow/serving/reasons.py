"""Why a model predicts what it does: how much each column of a row takes the prediction from that for a typical row.

numpy only. These are Shapley values against one reference row (Sundararajan and Najmi 2020, "The many Shapley values
for model explanation"). Columns may be of any kind, and no gradient is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scaleflow.serving.answers import compute_probabilities, is_one_of_several, take_prediction

if TYPE_CHECKING:
    from scaleflow.interfaces import Outputs

Array = np.ndarray[Any, Any]
Columns = Mapping[str, Array]

#: With at most so many orders of the columns all are tried; else `SAMPLED` drawn ones and their reverses.
ALL_ORDERS, SAMPLED, SEED = 24, 8, 0x5EA50


#: Begins the names of the contributions, and the name of the prediction for the typical row: no column can have it.
REASON, TYPICAL = "reason_", "prediction_typical"


def name_reason(column: str) -> str:
    """Returns the name of the contribution of a column; of "", that of the prediction for the typical row."""
    return f"{REASON}{column}" if column else TYPICAL


def find_typical(schema: Mapping[str, Any], dtypes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a typical row: the median, or the most frequent category, of each column in training; no text, no date.

    Args:
        schema: as in `LearnedState.schema`.
        dtypes: of the inputs, by name.
    """
    columns, typical = schema.get("columns", {}), dict[str, Any]()
    for name, dtype in dtypes.items():
        described, is_number = columns.get(name, {}), dtype != "string" and np.dtype(dtype).kind in "fiu"
        if described.get("values"):
            value = max(described["values"].items(), key=lambda each: each[1])[0]
        else:
            edges, counts = described.get("edges") or [], np.cumsum(described.get("counts") or [1])
            starts = [described.get("min", math.nan), *edges]  # of the ranges; the median is in one of them
            middle = int(np.searchsorted(counts, counts[-1] / 2, side="right"))
            value = starts[min(middle, len(starts) - 1)] if is_number else ""
        typical[name] = np.array(value, dtype) if is_number else str(value)
    return typical


def find_missing_kind(
    shapes: Mapping[str, Sequence[int]], outputs: Mapping[str, Outputs], schema: Mapping[str, Any]
) -> str:
    """Returns the kind of model that is needed in place of this one; empty if its predictions can be explained."""
    (described, *others) = outputs.values()
    if others or not ((is_one_of_several(described) and len(described.shape) < 2) or described.shape in ((), (1,))):
        return "a model with one class or one number for each row"
    if "" in shapes or any(shapes.values()) or not schema.get("columns"):
        return "a model of a table, whose run knows what its columns look like"
    return ""


def list_orders(count: int) -> Sequence[Sequence[int]]:
    """Returns the orders in which columns are exchanged."""
    if math.factorial(min(count, 10)) <= ALL_ORDERS:
        return list(itertools.permutations(range(count)))
    random = np.random.default_rng([SEED, count])
    drawn = [random.permutation(count).tolist() for _ in range(SAMPLED)]
    return [order for each in drawn for order in (each, each[::-1])]


def count_predictions(columns: int) -> int:
    """Returns how many predictions the reasons of a row take."""
    return len(list_orders(columns)) * max(0, columns - 1) + 2


def explain_rows(compute: Callable[[Columns], Array], rows: Columns, typical: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the contribution of each column, [n] float64 by name, and that of the typical row under the name "".

    They sum to what `compute` returns for the rows.

    Args:
        compute: returns a number for each row, [n].
        rows: the columns, [n] each.
    """
    names, count = sorted(rows), len(next(iter(rows.values())))  # each door has the columns in its own order
    base = {name: np.full(count, typical[name], values.dtype) for name, values in rows.items()}
    first, last = (np.asarray(compute(each), np.float64) for each in (base, rows))
    orders, sums = list_orders(len(names)), {name: np.zeros(count) for name in names}
    for order in orders:
        mixed, before = dict(base), first
        for n, place in enumerate(order, 1):
            mixed[names[place]] = rows[names[place]]
            after = last if n == len(names) else np.asarray(compute(mixed), np.float64)
            sums[names[place]] += after - before
            before = after
    return {"": first, **{name: each / len(orders) for name, each in sums.items()}}


def find_explained(described: Outputs, outputs: Array) -> Callable[[Array], Array]:
    """Returns the function from outputs [n, ...] to the number that is explained, [n].

    The value, the probability of the second of two classes, or that of the class that is predicted for each row.
    """
    chances = compute_probabilities(described, outputs)
    if chances is None:
        return lambda values: take_prediction(described, values).reshape(len(values))
    classes = np.ones(len(chances), np.int64) if chances.shape[1] == 2 else chances.argmax(axis=1)

    def take(values: Array) -> Array:
        found = compute_probabilities(described, values)
        assert found is not None
        return np.asarray(found[np.arange(len(found)), classes])

    return take
