"""Contributions of columns: Shapley values against a typical row, which sum to the prediction."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Outputs
from scaleflow.serving.reasons import (
    count_predictions,
    explain_rows,
    find_explained,
    find_missing_kind,
    find_typical,
    name_reason,
)

RANDOM = np.random.default_rng(0)


def compute(rows: Any) -> Any:
    """Numbers that meet in a product, and a category that matters."""
    towns = np.array([len(town) for town in rows["town"]])
    return 2 * rows["a"] + rows["a"] * rows["b"] - rows["c"] ** 2 + 3 * towns * rows["b"]


def shapley(values: dict[str, Any], typical: dict[str, Any], name: str) -> float:
    """The definition: the mean gain of a column over all sets of the others."""
    others = [each for each in values if each != name]
    total = 0.0
    for size in range(len(others) + 1):
        for chosen in itertools.combinations(others, size):
            weight = math.factorial(size) * math.factorial(len(others) - size) / math.factorial(len(values))
            without = {n: np.array([values[n] if n in chosen else typical[n]]) for n in values}
            total += weight * float((compute({**without, name: np.array([values[name]])}) - compute(without))[0])
    return total


def test_few_columns_get_their_exact_shapley_values() -> None:
    rows: dict[str, Any] = {name: RANDOM.normal(size=5) for name in "abc"} | {
        "town": np.array(["Ulm", "Rom", "", "Berlin", "x"], object)
    }
    typical = {"a": 0.5, "b": -1.0, "c": 0.0, "town": "Ulm"}
    found = explain_rows(compute, rows, typical)
    np.testing.assert_allclose(found[""], compute({name: np.array([each] * 5) for name, each in typical.items()}))
    for n in range(5):
        row = {name: each[n] for name, each in rows.items()}
        for name in rows:
            assert found[name][n] == pytest.approx(shapley(row, typical, name)), name


def test_many_columns_get_sampled_ones_that_sum_to_the_prediction() -> None:
    weights = RANDOM.normal(size=9)
    rows = {str(n): RANDOM.normal(size=20).astype(np.float32) for n in range(9)}

    def predict(columns: Any) -> Any:
        values = np.stack([columns[str(n)] for n in range(9)], axis=1).astype(np.float64)
        return values @ weights + values[:, 0] * values[:, 1]

    found = explain_rows(predict, rows, dict.fromkeys(rows, 0.0))
    np.testing.assert_allclose(sum(found.values()), predict(rows))
    for n in range(2, 9):
        np.testing.assert_allclose(found[str(n)], weights[n] * rows[str(n)], rtol=1e-6)
    half = rows["0"].astype(np.float64) * rows["1"] / 2  # an order and its reverse share the product
    np.testing.assert_allclose(found["0"], weights[0] * rows["0"] + half, rtol=1e-6)
    assert count_predictions(9) == 16 * 8 + 2
    turned = explain_rows(predict, dict(reversed(rows.items())), dict.fromkeys(rows, 0.0))
    assert all(np.array_equal(turned[name], found[name]) for name in found)  # whatever the order of the columns


def test_a_typical_row_has_medians_and_frequent_categories() -> None:
    from scaleflow.dataset.column_kinds import CATEGORY, NUMBER

    values = np.array([1.0] * 60 + [5.0] * 30 + [9.0] * 10)
    spread = np.arange(101.0)
    schema = {
        "columns": {
            "few": NUMBER.describe(values),
            "many": NUMBER.describe(spread),
            "town": CATEGORY.describe(np.array(["Ulm", "Rom", "Rom"], object)),
        }
    }
    dtypes = {"few": "float32", "many": "float64", "town": "object", "day": "object", "new": "float32"}
    found = find_typical(schema, dtypes)
    assert found["few"] == 1.0
    assert abs(found["many"] - 50) <= 10
    assert (found["town"], found["day"]) == ("Rom", "")
    assert np.isnan(found["new"])


def test_classes_are_explained_by_a_probability() -> None:
    binary = find_explained(Outputs("binary", (1,)), np.zeros((2, 1)))
    np.testing.assert_allclose(binary(np.array([[0.0], [np.log(3)]])), [0.5, 0.75], rtol=1e-6)
    several = find_explained(Outputs("classification", (3,)), np.array([[0, 1, 0], [2, 0, 0]]))
    np.testing.assert_allclose(several(np.log([[1, 2, 1], [1, 2, 1]])), [0.5, 0.25], rtol=1e-6)


SCHEMA = {"columns": {"a": {}}}


@pytest.mark.parametrize(
    ("shapes", "outputs", "schema", "needed"),
    [
        ({"a": ()}, {"": Outputs("regression", (1,))}, SCHEMA, ""),
        ({"a": ()}, {"": Outputs("regression", (3,))}, SCHEMA, "one number"),
        ({"a": ()}, {"": Outputs("classification", (7, 3))}, SCHEMA, "one class"),
        ({"a": ()}, {"": Outputs("multi_label", (3,))}, SCHEMA, "one class"),
        ({"a": ()}, {"x": Outputs("binary", (1,)), "y": Outputs("binary", (1,))}, SCHEMA, "one class"),
        ({"": (64,)}, {"": Outputs("binary", (1,))}, SCHEMA, "a model of a table"),
        ({"a": (8, 8)}, {"": Outputs("binary", (1,))}, SCHEMA, "a model of a table"),
        ({"a": ()}, {"": Outputs("binary", (1,))}, {}, "a model of a table"),
    ],
)
def test_other_models_are_named_by_what_they_lack(shapes: Any, outputs: Any, schema: Any, needed: str) -> None:
    found = find_missing_kind(shapes, outputs, schema)
    assert needed in found
    assert bool(needed) == bool(found)


def test_a_column_of_any_name_has_a_reason_of_its_own() -> None:
    columns = ["", "base", "typical", "reason", "prediction_typical"]
    assert len({name_reason(column) for column in columns}) == len(columns)
