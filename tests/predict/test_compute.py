"""The values of columns become what a model's inputs are, or are named as unusable."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow

MISSING = ("", "NA")


def converted(cases: list[tuple[Any, str, tuple[int, ...], Any]]) -> list[Any]:
    """The arrays of columns, or the error."""
    import tensorflow as tf

    from scaleflow.errors import RunError
    from scaleflow.predict.compute import convert_inputs
    from scaleflow.predict.source import Rows

    found: list[Any] = []
    for column, dtype, shape, missing in cases:
        rows = [Rows("a.csv", 5, pyarrow.table({"x": column}))]
        try:
            arrays = convert_inputs({"x": tf.TensorSpec([None, *shape], dtype)}, {"x": ["x"]}, rows, missing)
            found.append((arrays["x"].dtype.name, arrays["x"].tolist()))
        except RunError as error:
            found.append(str(error))
    return found


NOON = datetime.datetime(2024, 1, 31, 12, tzinfo=datetime.UTC)

CASES: list[tuple[Any, str, tuple[int, ...], Any, Any]] = [
    (pyarrow.array([1, None]), "float32", (), MISSING, ("float32", [1.0, np.nan])),
    (pyarrow.array([" 1.5", "NA", "true"]), "float32", (), MISSING, ("float32", [1.5, np.nan, 1.0])),
    (pyarrow.array(["1", "x"]), "float32", (), None, "a.csv, row 7: x is x, expected a finite number"),
    (pyarrow.array([2**24 + 1, 3]), "int32", (), None, ("int32", [2**24 + 1, 3])),
    (pyarrow.array(["7", "8"]), "uint8", (), None, ("uint8", [7, 8])),
    (pyarrow.array([7, 300]), "uint8", (), None, "a.csv, row 7: x is 300, expected a whole number (uint8)"),
    (pyarrow.array([7.0, 7.5]), "int64", (), None, "a.csv, row 7: x is 7.5, expected a whole number (int64)"),
    (pyarrow.array([7, None]), "int64", (), None, "a.csv, row 7: x is None, expected a whole number (int64)"),
    (pyarrow.array([True, False]), "bool", (), None, ("bool", [True, False])),
    (pyarrow.array([" a ", "NA", None]), "string", (), MISSING, ("object", ["a", "", ""])),
    (pyarrow.array([" a ", "NA", None]), "string", (), None, ("object", [" a ", "NA", ""])),
    (pyarrow.array(["a", "b"]).dictionary_encode(), "string", (), MISSING, ("object", ["a", "b"])),
    (pyarrow.array([3, None]), "string", (), MISSING, ("object", ["3", ""])),
    (pyarrow.array([NOON, None]), "string", (), MISSING, ("object", ["2024-01-31T12:00:00", ""])),
    (pyarrow.array([[[1], [2]], [[3], [4]]]), "float32", (2, 1), None, ("float32", [[[1], [2]], [[3], [4]]])),
    (pyarrow.array([[1, 2, 3, 4]]), "int32", (2, 2), None, ("int32", [[[1, 2], [3, 4]]])),
    (pyarrow.array([[[1, 2]], [[3], []]]), "int32", (2,), None, "a.csv, row 7: x has 1 values, expected 2"),
    (pyarrow.array([[1.0], None]), "float32", (1,), None, "a.csv, row 7: x has 0 values, expected 1"),
]


def test_values_are_converted_to_the_type_of_the_input(isolated: Callable[..., Any]) -> None:
    found = isolated(converted, [case[:4] for case in CASES])
    for (*case, expected), result in zip(CASES, found, strict=True):
        if isinstance(expected, str) or expected[0] == "object":
            assert result == expected, case
        else:
            assert result[0] == expected[0], case
            np.testing.assert_array_equal(result[1], expected[1])
