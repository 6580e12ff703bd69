"""The values of columns become what a model's inputs are, or are named as unusable."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

MISSING = ("", "NA")


def converted(cases: list[tuple[Any, str, tuple[int, ...], Any, str | None, bool]]) -> list[Any]:
    """The arrays of columns, or the error."""
    import tensorflow as tf

    from scaleflow.errors import RunError
    from scaleflow.features.predict.bad_rows import RowReport
    from scaleflow.features.predict.compute import convert_to_inputs
    from scaleflow.features.predict.reading import InputForm, RowBatch
    from scaleflow.interfaces import Inputs, LearnedPreprocessing, LearnedState, Outputs

    found: list[Any] = []
    for column, dtype, shape, missing, kind, is_filled in cases:
        reading = {"missing": missing, "columns": {"x": kind} if kind else {}}
        own = {"x": LearnedPreprocessing("my_code.Fill" if is_filled else "scaleflow.Other", {}, None)}
        state = LearnedState(Inputs(shape, dtype), Outputs("regression", (1,)), own, reading=reading)
        specs = {"x": tf.TensorSpec([None, *shape], dtype)}
        rows = RowBatch(5, pyarrow.table({"x": column}))
        results = []
        for on_bad in ("raise", "skip"):
            try:
                report = RowReport(on_bad, lambda place: f"a.csv, row {place + 1}", state)
                arrays, is_good = convert_to_inputs(specs, InputForm(state, {"x": ["x"]}), rows, report)
                results.append((arrays["x"].dtype.name, arrays["x"].tolist(), is_good.tolist()))
            except RunError as error:
                results.append(str(error))
        found.append(results)
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
    (pyarrow.array([7, None]), "int64", (), None, "a.csv, row 7: x is missing, expected a whole number (int64)"),
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
    found = isolated(converted, [(*case[:4], None, True) for case in CASES])
    for (*case, expected), (result, skipped) in zip(CASES, found, strict=True):
        if isinstance(expected, str):
            assert result == expected, case
            assert skipped[2] == [True, False], case
            continue
        assert result == skipped or np.isnan(expected[1][-2:]).any(), case
        if expected[0] == "object":
            assert result[:2] == expected, case
        else:
            assert result[0] == expected[0], case
            np.testing.assert_array_equal(result[1], expected[1])


DATES = ["2024-01-31", "2024-01-31 12:30", "2024-01-31T13:30:00+01:00", "2024-01-31T12:30:00.123456789Z", "NA", ""]
SAME = "2024-01-31T12:30:00"
WRONG = ["31.1.2024", "2024-02-30", "0000-01-01", "2024-01-31T25:00", "soon"]
UNIX = pyarrow.array([1_706_704_200, None], pyarrow.int64())

#: A column, its dtype, what training took it for, whether the model replaces missing values; error, good values.
READ_AS: list[tuple[Any, str, str | None, bool, str | None, list[Any]]] = [
    (pyarrow.array([*DATES, *WRONG]), "string", "dates", True, "row 12: x is 31.1.2024, expected a date",
     ["2024-01-31T00:00:00", SAME, SAME, SAME, "", ""]),
    (pyarrow.array(["2024-01-31 12:30", "NA"]), "string", "dates", True, None, [SAME, ""]),
    (pyarrow.array([NOON, None]), "string", "dates", True, None, ["2024-01-31T12:00:00", ""]),
    (UNIX, "string", "dates", True, "row 6: x is 1706704200, expected a date", [""]),
    (pyarrow.array([" Ulm ", "NA"]), "string", "categories", False, None, ["Ulm", ""]),
    (pyarrow.array([3, None]), "string", "categories", False, None, ["3", ""]),
    (pyarrow.array(["1", "NA", "two"]), "float32", "numbers", True, "row 8: x is two, expected a finite", [1, np.nan]),
    (pyarrow.array(["1", "NA"]), "float32", None, False, "row 7: x is missing, expected a finite number", [1]),
    (pyarrow.array([None, 2.0, np.nan]), "float32", None, False, "row 6: x is missing", [2]),
]  # fmt: skip


def read_codes() -> list[Any]:
    """Categories that training had as 1, 2 and 007, in cells of other types, for `predict` and for the served model."""
    import tensorflow as tf

    from scaleflow.serving.cells import make_readers
    from scaleflow.serving.loader import to_tensor

    form = make_readers({"columns": {"x": "categories"}}, {"x": ["1", "2", "007"]})["x"]
    cells = [[1.0, None, 7.0], ["1", " NA ", "7"], [1, 3, 7]]
    served = [
        to_tensor(tf.TensorSpec([None], tf.string), each, "x", form).numpy().astype(str).tolist() for each in cells
    ]
    columns = (pyarrow.chunked_array([pyarrow.array(each)]) for each in cells)
    return [served, [form.convert(column, np.dtype(object))[0].tolist() for column in columns]]


def read_units() -> list[Any]:
    """Numbers with units of which training had one, for `predict` and the served model, and what is said about them."""
    import logging

    import tensorflow as tf

    from scaleflow.features.predict.bad_rows import RowReport
    from scaleflow.features.predict.compute import convert_to_inputs
    from scaleflow.features.predict.reading import InputForm, RowBatch
    from scaleflow.interfaces import Inputs, LearnedPreprocessing, LearnedState, Outputs
    from scaleflow.serving.loader import logger, to_tensor

    form = {"decimal": ".", "thousands": ",", "unit": "$"}
    reading = {"columns": {"x": "numbers"}, "forms": {"x": form}}
    learned = {"x": LearnedPreprocessing("scaleflow.dataset.tables.columns.Number", {}, {"missing": False})}
    state = LearnedState(Inputs((), "float64"), Outputs("regression", (1,)), learned, reading=reading)
    inputs = InputForm(state, {"x": ["x"]})
    report = RowReport("skip", str, state)
    cells = ["$1,100.00", "100.00 €", "£100", "7", None, "word"]
    spec = tf.TensorSpec([None], "float64")
    rows = RowBatch(0, pyarrow.table({"x": pyarrow.array(cells)}))
    predicted, _ = convert_to_inputs({"x": spec}, inputs, rows, report)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    served = to_tensor(spec, cells[:-1], "x", inputs.find_reader("x")).numpy()
    return [predicted["x"], served, list(report.describe(1, False))[2:], said]


def test_numbers_in_another_currency_are_counted_as_unknown(isolated: Callable[..., Any]) -> None:
    predicted, served, lines, said = isolated(read_units)
    for found in (predicted, served):
        np.testing.assert_array_equal(found, [1100, np.nan, np.nan, 7, np.nan])
    units = "training did not have: EUR (1), GBP (1); they count as missing"
    assert lines == [
        ("unknown", f"x: 2 with units that {units}"),
        ("imputed", "x: 1 missing, which training never had"),
    ]
    assert said == [f"x: 2 numbers have units that {units}"]


def read_picture() -> Any:
    """The input of a model that takes pictures, whose columns have no name that the model knows."""
    import tensorflow as tf

    from scaleflow.features.predict.bad_rows import RowReport
    from scaleflow.features.predict.compute import convert_to_inputs
    from scaleflow.features.predict.reading import InputForm, RowBatch
    from scaleflow.interfaces import Inputs, LearnedState, Outputs

    state = LearnedState(Inputs((2, 2, 1), "uint8"), Outputs("regression", (1,)), {}, pictures=("",))
    rows = RowBatch(0, pyarrow.table({"picture": pyarrow.array([b"one", b"two"])}))
    specs = {"": tf.TensorSpec([None, 2, 2, 1], "uint8")}
    form, report = InputForm(state, {"": ["picture"]}), RowReport("raise", str, state)
    arrays, _ = convert_to_inputs(
        specs, form, rows, report, decode=lambda given: tf.ones([len(given), 2, 2, 1], "uint8")
    )
    return arrays[""]


def test_pictures_are_converted(isolated: Callable[..., Any]) -> None:
    np.testing.assert_array_equal(isolated(read_picture), np.ones((2, 2, 2, 1)))


def write_natively(path: Path) -> None:
    """Writes to standard error as libjpeg and as Python do, while native errors are diverted and afterwards."""
    import contextlib
    import os
    import sys

    from scaleflow.errors import RunError
    from scaleflow.features.predict.command import divert_native_errors

    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    with divert_native_errors():
        os.write(2, b"Corrupt JPEG data\n")
        print("a warning of Python", file=sys.stderr)
    os.write(2, b"later\n")
    for error in (RunError("a bad row"), KeyError("unexpected")):
        with contextlib.suppress(RunError, KeyError), divert_native_errors():
            os.write(2, f"before {type(error).__name__}\n".encode())
            raise error


def test_what_libjpeg_writes_is_not_shown(isolated: Callable[..., Any], tmp_path: Path) -> None:
    isolated(write_natively, tmp_path / "errors")
    shown = "a warning of Python\nlater\nbefore KeyError\n"
    assert (tmp_path / "errors").read_text() == shown


def test_an_own_dataset_may_describe_its_reading_with_the_words_of_a_table() -> None:
    from scaleflow.serving.cells import make_readers

    for kinds in (3, ["x"], {"x": 3}, {"x": ["numbers"]}, {"x": "waves"}):
        assert make_readers({"columns": kinds, "forms": 5, "missing": 7}, {}) == {}, kinds


def test_categories_that_are_written_in_another_way_are_known(isolated: Callable[..., Any]) -> None:
    assert isolated(read_codes) == 2 * [[["1", "", "007"], ["1", "", "007"], ["1", "3", "007"]]]


def test_values_are_read_as_in_training_and_what_the_model_cannot_replace_is_bad(isolated: Callable[..., Any]) -> None:
    found = isolated(converted, [(column, dtype, (), MISSING, kind, fill) for column, dtype, kind, fill, *_ in READ_AS])
    for (*_, message, good), (result, (_, values, is_good)) in zip(READ_AS, found, strict=True):
        assert (message in result) if message else (result[1] == good), (message, result)
        np.testing.assert_array_equal(values, good)
        assert sum(is_good) == len(good)


def test_empty_lists_beside_others_can_be_read_from_parquet(tmp_path: Path) -> None:
    from pyarrow import parquet

    from scaleflow.evaluation.predictions import to_column

    values = np.arange(12.0).reshape(2, 3, 2)
    column = to_column(values).take(pyarrow.array([0, 0, 1], mask=np.array([False, True, False])))  # a bad row
    parquet.write_table(pyarrow.table({"layer": column}), tmp_path / "a.parquet")
    found = parquet.read_table(tmp_path / "a.parquet")["layer"].to_pylist()
    assert found == [values[0].tolist(), None, values[1].tolist()]


def compute_with_layer(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns of a model whose output `size` is ten times its layer `size`, and its outputs."""
    import keras
    import tensorflow as tf

    from scaleflow.features.predict.compute import DistributedModel
    from scaleflow.features.predict.reasons import ExtendedColumns
    from scaleflow.interfaces import Outputs

    given = keras.Input((2,))
    values = keras.layers.Dense(1, name="size")(given)
    model = keras.Model(given, {"size": keras.layers.Rescaling(10.0)(values), "other": keras.layers.Dense(1)(given)})
    model.save(folder / "model.keras")
    model.export(folder / "saved_model", verbose=False)
    distributed = DistributedModel(folder / "saved_model", tf.distribute.get_strategy())
    distributed.add_layer(folder / "model.keras", "size")
    x = np.ones((3, 2), np.float32)
    found = distributed.predict({"": x}, str)
    columns = ExtendedColumns(
        {name: Outputs("regression", (1,)) for name in ("size", "other")}, extra=distributed.extra
    )
    return columns.convert(found), {name: np.asarray(each) for name, each in model(x).items()}


def test_a_layer_with_the_name_of_an_output_is_not_the_output(isolated: Callable[..., Any], tmp_path: Path) -> None:
    columns, outputs = isolated(compute_with_layer, tmp_path)
    assert list(columns) == ["size_prediction", "other_prediction", "size"]
    for name, each in outputs.items():
        np.testing.assert_allclose(columns[f"{name}_prediction"], each[:, 0], rtol=1e-6)
    np.testing.assert_allclose(np.ravel(columns["size"]), outputs["size"][:, 0] / 10, rtol=1e-6)
