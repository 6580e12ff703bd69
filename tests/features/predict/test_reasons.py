"""Contributions of columns: Shapley values against a typical row, which sum to the prediction."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Outputs
from scaleflow.serving.reasons import (
    MAX_WORDS,
    Explainer,
    choose_measure,
    count_predictions,
    drop_word,
    explain_pictures,
    explain_rows,
    explain_texts,
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
    binary = choose_measure(Outputs("binary", (1,)), np.zeros((2, 1)))
    np.testing.assert_allclose(binary(np.array([[0.0], [np.log(3)]])), [0.5, 0.75], rtol=1e-6)
    several = choose_measure(Outputs("classification", (3,)), np.array([[0, 1, 0], [2, 0, 0]]))
    np.testing.assert_allclose(several(np.log([[1, 2, 1], [1, 2, 1]])), [0.5, 0.25], rtol=1e-6)


SCHEMA = {"columns": {"a": {}}}


@pytest.mark.parametrize(
    ("inputs", "outputs", "schema", "needed"),
    [
        ({"a": ((), "float32")}, {"": Outputs("regression", (1,))}, SCHEMA, ""),
        ({"a": ((), "float32")}, {"": Outputs("regression", (3,))}, SCHEMA, "one number"),
        ({"a": ((), "float32")}, {"": Outputs("classification", (7, 3))}, SCHEMA, "one class"),
        ({"a": ((), "float32")}, {"": Outputs("multi_label", (3,))}, SCHEMA, "one class"),
        ({"a": ((), "float32")}, {"x": Outputs("binary", (1,)), "y": Outputs("binary", (1,))}, SCHEMA, "one class"),
        ({"": ((64,), "float32")}, {"": Outputs("binary", (1,))}, SCHEMA, "of a table"),
        ({"a": ((8, 8), "uint8")}, {"": Outputs("binary", (1,))}, SCHEMA, "of a table"),
        ({"a": ((), "float32")}, {"": Outputs("binary", (1,))}, {}, "of a table"),
        ({"": ((7, 9, 3), "uint8")}, {"": Outputs("binary", (1,))}, {}, "a picture of 8 x 8 pixels or more"),
        ({"a": ((8, 8, 3), "uint8"), "b": ((), "float32")}, {"": Outputs("binary", (1,))}, SCHEMA, "of a table"),
        ({"": ((8, 8, 3), "uint8")}, {"": Outputs("binary", (1,))}, {}, ""),
        ({"": ((), "string")}, {"": Outputs("binary", (1,))}, {}, ""),
    ],
)
def test_other_models_are_named_by_what_they_lack(inputs: Any, outputs: Any, schema: Any, needed: str) -> None:
    if not needed:
        assert Explainer(inputs, outputs, schema).columns
        return
    with pytest.raises(ValueError, match=needed):
        Explainer(inputs, outputs, schema)


def test_a_category_alone_is_a_table_and_a_text_alone_has_reasons_of_words() -> None:
    kinds = {"category": ["prediction_typical", "reason_a"], "text": ["reasons"]}
    for kind, columns in kinds.items():
        schema = {"columns": {"a": {"kind": kind, "values": {"x": 2}}}}
        assert Explainer({"a": ((), "string")}, {"": Outputs("regression", ())}, schema).columns == columns


def test_words_count_as_what_the_prediction_loses_without_them() -> None:
    explainer = Explainer({"": ((), "string")}, {"": Outputs("regression", ())}, {})
    weights = {"good": 2.0, "bad": -3.0, "größe": 0.5}

    def compute(rows: Any) -> Any:
        return {"": np.array([sum(weights.get(word, 0.0) for word in text.split()) for text in rows[""]])}

    rows = {"": np.array(["good  and\nbad", "", "größe", " ".join(["good"] * 50)], object)}
    found = [json.loads(cell) for cell in explainer.explain(compute, rows, compute(rows))["reasons"]]
    assert found[:3] == [[["good", 2.0], ["and", 0.0], ["bad", -3.0]], [], [["größe", 0.5]]]
    assert found[3] == [["good", 2.0]] * MAX_WORDS
    without = [drop_word(" good  and\nbad ", place) for place in range(4)]  # lines and spaces stay as they are
    assert without == [" and\nbad ", " good  bad ", " good  and", " good  and\nbad "]
    assert len(explainer.make_empty()["reasons"]) == 0


def test_parts_of_a_picture_count_as_what_the_prediction_loses_when_they_are_covered() -> None:
    explainer = Explainer({"image": ((16, 24, 1), "uint8")}, {"": Outputs("binary", (1,))}, {})
    pictures = np.zeros((2, 16, 24, 1), np.uint8)
    pictures[0, 2:4, 21:24] = 192  # the part in the second row and the last column
    logits = pictures.max(axis=(1, 2, 3)).reshape(2, 1) / 96.0 - 1

    def compute(rows: Any) -> Any:
        assert rows["image"].dtype == np.uint8
        return {"": rows["image"].astype(np.float64).max(axis=(1, 2, 3)).reshape(-1, 1) / 96.0 - 1}

    rows = {"image": pictures}
    first, second = (np.array(json.loads(each)) for each in explainer.explain(compute, rows, {"": logits})["reasons"])
    expected = np.zeros((8, 8))
    chance, covered = (1 / (1 + np.exp(1 - value / 96)) for value in (192, 3))  # 3 is the mean of the picture
    expected[1, 7] = chance - covered
    np.testing.assert_allclose(first, expected, atol=1e-6)
    assert not second.any()


def test_small_numbers_have_all_their_digits() -> None:
    rows = {"": np.array(["a b c"], object)}
    (text,) = explain_texts(lambda given: np.array([len(each) * 1.2345678e-9 for each in given[""]]), rows)
    assert [effect for _, effect in json.loads(text)] == [2.46914e-09] * 3
    pictures = {"": np.linspace(0, 1, 64).reshape(1, 8, 8, 1)}
    weights = RANDOM.normal(size=(8, 8)) * 1e-9
    (found,) = explain_pictures(lambda given: (given[""][..., 0] * weights).sum(axis=(1, 2)), pictures)
    wanted = weights * (pictures[""][0, ..., 0] - 0.5)
    np.testing.assert_allclose(json.loads(found), wanted, rtol=1e-5)


def test_a_column_of_any_name_has_a_reason_of_its_own() -> None:
    columns = ["", "base", "typical", "reason", "prediction_typical"]
    assert len({name_reason(column) for column in columns}) == len(columns)
