"""Tables are read in pieces, and their columns are found and converted, without TensorFlow."""

from __future__ import annotations

import gzip
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import feather, parquet

from scaleflow.dataset.tables import files as table_files
from scaleflow.errors import ConfigError, RunError
from scaleflow.evaluation.predictions import PredictionColumns
from scaleflow.features.predict.bad_rows import Problem, RowReport
from scaleflow.features.predict.chunks import Chunk, PredictionTask
from scaleflow.features.predict.inputs import open_table
from scaleflow.features.predict.output import MANIFEST, open_output
from scaleflow.features.predict.reading import InputForm, RowBatch, divide_rows, drop_unfit_names, match_columns
from scaleflow.interfaces import Inputs, LearnedPreprocessing, LearnedState, Outputs
from scaleflow.serving.cells import ColumnReader

ROWS = pyarrow.table({"x": list(range(10)), "word": [f"w\n{n}" for n in range(10)]})


def write(path: Path, table: pyarrow.Table = ROWS) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if ".csv" in path.name:
        text = "x,word\n" + "".join(f'{row["x"]},"{row["word"]}"\n' for row in table.to_pylist())
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    elif path.suffix == ".jsonl":
        path.write_text("".join(f'{{"x": {x}, "word": "w\\n{x}"}}\n' for x in table["x"].to_pylist()))
    elif path.suffix == ".feather":
        feather.write_feather(table, path)
    else:
        parquet.write_table(table, path, row_group_size=4)
    return str(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.jsonl", "a.csv", "a.csv.gz"])
def test_every_format_is_read_in_pieces_from_any_row(tmp_path: Path, name: str) -> None:
    source = open_table(write(tmp_path / name))
    for skip in (0, 3, 10):
        pieces = list(source.read(["word", "x"], 3, skip))
        assert [int(x) for piece in pieces for x in piece.table["x"].to_pylist()] == list(range(skip, 10))
        assert [word for piece in pieces for word in piece.table["word"].to_pylist()] == ROWS["word"].to_pylist()[skip:]
        assert [source.name(piece.first) for piece in pieces[:1]] == [f"{tmp_path / name}, row {skip + 1}"][: 10 - skip]
    assert source.rows == (10 if name.endswith(("parquet", "feather")) else None)


@pytest.mark.parametrize("text", ["a,b", "a,b\n"])
def test_a_header_without_rows_is_a_table_without_rows(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    source = open_table(str(tmp_path / "a.csv"))
    assert source.schema.names == ["a", "b"]
    assert [row for rows in source.read(["b"], 10) for row in rows.table.to_pylist()] == []


def test_rows_of_several_files_form_chunks_that_know_their_rows(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / f"{name}.parquet")
    source = open_table(f"{tmp_path}/*.parquet")
    chunks = list(divide_rows(source.read(["x"], 4, 8), 3, 5))
    assert [rows.first for rows in chunks] == [8, 10, 13, 15, 18]
    assert [rows.table["x"].to_pylist() for rows in chunks] == [[8, 9], [0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]
    (rows, *_) = divide_rows(source.read(["x"], 4, 8), 5, None)
    assert (rows.first, len(rows.table)) == (8, 5)
    assert (source.name(9), source.name(10)) == (f"{tmp_path}/a.parquet, row 10", f"{tmp_path}/b.parquet, row 1")


def test_a_delimiter_is_typed_or_that_of_the_run_or_follows_from_the_name(tmp_path: Path) -> None:
    texts = {"comma.csv": "a,b;c\n1,2;3\n", "tab.tsv": "a\tb\n1\t2\n", "mark.csv": '\ufeff"a,\nb",c\n1,2\n'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for name, words, expected in (
        ("comma.csv", (), ["a", "b;c"]),
        ("comma.csv", (None, {"delimiter": ";"}), ["a,b", "c"]),
        ("comma.csv", (",", {"delimiter": ";"}), ["a", "b;c"]),
        ("tab.tsv", (None, {"delimiter": ","}), ["a", "b"]),
        ("tab.tsv", (), ["a", "b"]),
        ("mark.csv", (), ["a,\nb", "c"]),
    ):
        assert open_table(str(tmp_path / name), *words).schema.names == expected
    for wrong in ("", "ab", "€"):
        with pytest.raises(ConfigError, match="expected one character"):
            open_table(str(tmp_path / "comma.csv"), wrong)


HEADERLESS = {"header": ["area", "town", "price"], "encoding": "latin-1", "target": "price"}
WITH_WEIGHTS = {**HEADERLESS, "header": ["area", "weight", "town", "price"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3,Köln,9\n5,Ulm,8\n", {"area": ["3", "5"], "town": ["Köln", "Ulm"]}),
        ("3,Köln\n", {"area": ["3"], "town": ["Köln"]}),  # without the target
        ('"town",id,"area"\nKöln,7,3\n', {"area": ["3"], "town": ["Köln"]}),  # with a header line
        ("3\n", "1 fields, and the run's dataset.header names 3: area, town, price; write a header line"),
    ],
)
def test_the_header_and_the_encoding_are_those_of_the_run(tmp_path: Path, text: str, expected: Any) -> None:
    path = tmp_path / "new.csv"
    path.write_bytes(text.encode("latin-1"))
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            open_table(str(path), None, HEADERLESS, ["area", "town"])
        return
    for reading in (HEADERLESS, WITH_WEIGHTS)[: 2 if text == "3,Köln\n" else 1]:
        (rows,) = open_table(str(path), None, reading, ["area", "town"]).read(["area", "town"], 10)
        assert rows.table.to_pydict() == expected


def test_text_of_another_encoding_is_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "TEXT_BLOCK", 1 << 10)
    path = tmp_path / "new.csv"
    path.write_bytes(b"area,town\n" + b"3,Ulm\n" * 1000 + b"3,K\x81ln\n")
    for encoding in ("utf8", "cp1252"):
        # pyarrow reads ahead, so the header may come with the error.
        with pytest.raises((ConfigError, RunError), match=r"new\.csv:? cannot be read"):
            list(open_table(str(path), None, {"encoding": encoding}).read(["town"], 10))


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
@pytest.mark.parametrize("header", [(), ("x", "word")])
def test_rows_with_a_wrong_number_of_fields_keep_their_place(
    tmp_path: Path, suffix: str, header: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_files, "TEXT_BLOCK", 1 << 10)
    wrong = {1, 7, 8, 400, 999}
    rows = ["1,2,3" if n in wrong else f'{n},"a\n{n}"' for n in range(1000)]
    text = "\n".join(rows if header else ["x,word", *rows])
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix == ".csv.gz" else text.encode())
    source = open_table(str(path), None, {"header": header}, () if header else ["x", "word"])
    for skip in (0, 8, 401):
        pieces = list(source.read(["x"], 100, skip))
        assert len(pieces) > 1
        found = [value for piece in pieces for value in piece.table["x"].to_pylist()]
        assert found == [None if n in wrong else str(n) for n in range(skip, 1000)]
        assert {place for piece in pieces for place in piece.faults} == {n for n in wrong if n >= skip}
    rows = next(divide_rows(source.read(["x"], 100, 395), 300, None))
    assert (rows.faults, source.name(400)) == ({400: "it has 3 field(s), expected 2"}, f"{path}, row 401")


def test_the_names_of_subfolders_are_columns(tmp_path: Path) -> None:
    for town in ("b", "a"):
        write(tmp_path / f"town={town}" / "part.parquet")
    (tmp_path / "_SUCCESS").touch()
    source = open_table(str(tmp_path))
    tables = [piece.table.to_pydict() for piece in source.read(["town", "x"], 100)]
    assert [town for table in tables for town in table["town"]] == 10 * ["a"] + 10 * ["b"]
    assert source.rows == 20


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ([], "a.csv", "there is no such file or folder"),
        ([], "*.csv", "no file matches it"),
        ([], "", "the folder has no files"),
        (["a.txt"], "a.txt", "does not end in .csv"),
        (["a.csv", "b.parquet"], "", "have different formats"),
        (["a.csv", "wrong.csv"], "", "have different columns: word is in one of them only"),
        (["broken.parquet"], "broken.parquet", "cannot be read"),
        (["empty.csv"], "empty.csv", "empty.csv cannot be read: the file is empty"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path, files: list[str], path: str, message: str) -> None:
    for name in files:
        if name == "empty.csv":
            (tmp_path / name).touch()
        elif name in ("wrong.csv", "a.txt", "broken.parquet"):
            (tmp_path / name).write_text("x,y\n1,2\n")
        else:
            write(tmp_path / name)
    with pytest.raises(ConfigError, match=message):
        open_table(f"{tmp_path}/{path}")


NAMED: Any = {"x": Inputs((), "any"), "word": Inputs((), "any")}
ARRAY: Any = Inputs((2, 2))


def take(inputs: Any, target: str | None = None) -> LearnedState:
    return LearnedState(inputs, Outputs("regression", (1,)), reading={"target": target})


def schema(**columns: Any) -> Any:
    return pyarrow.schema(list(columns.items()))


NUMBERS = {name: pyarrow.int64() for name in "abcd"}


@pytest.mark.parametrize(
    ("inputs", "columns", "selected", "expected"),
    [
        (NAMED, schema(id=pyarrow.int8(), word=pyarrow.string(), x=pyarrow.int8()), [], {"x": ["x"], "word": ["word"]}),
        (ARRAY, schema(**NUMBERS, price=pyarrow.int64()), [], {"": ["a", "b", "c", "d"]}),
        (ARRAY, schema(**NUMBERS, e=pyarrow.int64()), ["d", "c", "e", "b"], {"": ["d", "c", "e", "b"]}),
        (ARRAY, schema(pixels=pyarrow.list_(pyarrow.int64())), [], {"": ["pixels"]}),
        (Inputs((), "string"), schema(a=pyarrow.string(), b=pyarrow.string()), ["b"], {"": ["b"]}),
    ],
)
def test_columns_are_found_by_name_or_by_order(inputs: Any, columns: Any, selected: Any, expected: Any) -> None:
    assert match_columns(take(inputs, "price"), columns, selected) == expected


@pytest.mark.parametrize(
    ("inputs", "columns", "selected", "message"),
    [
        (NAMED, schema(x=pyarrow.int8(), y=pyarrow.int8()), [], "there is no column word, .* the table has x, y"),
        (NAMED, schema(x=pyarrow.int8(), Words=pyarrow.string()), [], "takes; did you mean Words\\? The table has"),
        (NAMED, schema(x=pyarrow.list_(pyarrow.int8()), word=pyarrow.string()), [], "takes one value of each row"),
        (NAMED, schema(x=pyarrow.binary(), word=pyarrow.string()), [], "x has the type binary"),
        (NAMED, schema(x=pyarrow.int8(), word=pyarrow.string()), ["x"], "takes columns by name: word, x"),
        (ARRAY, schema(path=pyarrow.string()), [], r"an array of shape \(2, 2\), float32: 4 columns .* has 1: path"),
        (ARRAY, schema(**NUMBERS), ["a", "z"], "--columns z: there is no such column"),
    ],
)
def test_a_table_that_the_model_cannot_take_is_refused(inputs: Any, columns: Any, selected: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        match_columns(take(inputs), columns, selected)


def test_outputs_become_columns_by_their_kind() -> None:
    outputs = {
        "kind": Outputs("classification", (3,), ("a", "b", "c")),
        "sold": Outputs("binary", (1,), ("no", "yes")),
        "tags": Outputs("multi_label", (2,)),
        "price": Outputs("regression", (1,)),
        "map": Outputs("classification", (2, 1, 3)),
    }
    logits = np.log(np.array([[0.2, 0.7, 0.1], [0.5, 0.25, 0.25]], np.float32))
    found = PredictionColumns(outputs).convert(
        {
            "kind": logits,
            "sold": np.array([[0.0], [-1000.0]], np.float32),
            "tags": np.array([[1.0, -1.0], [-2.0, 2.0]], np.float32),
            "price": np.array([[5.0], [6.0]], np.float32),
            "map": np.stack([logits, logits], axis=1)[:, :, None, :],
        }
    )
    plain = {name: column.to_pylist() for name, column in found.items()}
    assert plain["kind_prediction"] == ["b", "a"]
    assert plain["kind_probability"] == pytest.approx([0.7, 0.5])
    assert plain["kind_probability_c"] == pytest.approx([0.1, 0.25])
    assert plain["sold_prediction"] == ["no", "no"]
    assert plain["sold_probability_yes"] == pytest.approx([0.5, 0.0])
    assert plain["tags_prediction_0"] == [True, False]
    assert plain["tags_probability_1"] == pytest.approx([0.268941, 0.880797], abs=1e-5)
    assert plain["price_prediction"] == [5.0, 6.0]
    assert plain["map_prediction"] == [[[1], [1]], [[0], [0]]]
    assert PredictionColumns(outputs).make_schema().names == list(found)


def test_many_classes_get_columns_only_if_the_user_asks() -> None:
    outputs = {"": Outputs("classification", (30,))}
    values = {"": np.zeros((1, 30), np.float32)}
    assert list(PredictionColumns(outputs).convert(values)) == ["prediction", "probability"]
    assert "probability_29" in PredictionColumns(outputs, has_all=True).convert(values)


def test_a_folder_takes_one_command_at_a_time(tmp_path: Path) -> None:
    output = open_output(f"{tmp_path}/shards/", False, False)
    with output.lock(), pytest.raises(ConfigError, match="another command is writing"), output.lock():
        pass
    with output.lock():
        pass


COLUMNS = "scaleflow.dataset.tables.columns."

KINDS = {"age": "numbers", "sold": "dates", "town": "categories"}

STATE = LearnedState(
    {name: Inputs(()) for name in ("age", "sold", "town", "own", "raw")},
    Outputs("binary", (1,), ("no", "yes")),
    {
        "age": LearnedPreprocessing(f"{COLUMNS}Number", {}, {"mean": 1.0, "deviation": 2.0, "missing": False}),
        "sold": LearnedPreprocessing(f"{COLUMNS}Date", {}, {"mean": 1.0, "deviation": 2.0, "missing": True}),
        "town": LearnedPreprocessing(f"{COLUMNS}Category", {}, ["Aa", "Bb"]),
        "own": LearnedPreprocessing("my_code.Fill", {}, 3),
        "raw": LearnedPreprocessing(
            "scaleflow.dataset.batches.preprocessing.Normalise", {}, {"mean": [0.0], "deviation": [1.0]}
        ),
    },
    reading={"columns": KINDS, "target": "bought", "delimiter": ";", "header": [], "missing": ["-"]},
)


def test_a_new_table_is_read_as_the_record_says() -> None:
    form = InputForm(STATE, {})
    assert (form.filled, form.categories) == ({"age": False, "sold": True, "own": None}, ["town"])
    assert form.find_reader("town") == ColumnReader("categories", ["-"], None, ("Aa", "Bb"))
    assert form.find_reader("raw") == ColumnReader(missing=("-",))
    other = InputForm(LearnedState(Inputs(()), STATE.outputs, reading={"missing": 3, "columns": {"age": 3}}), {})
    assert (other.filled, other.find_reader("age")) == ({}, ColumnReader())


def test_names_that_do_not_fit_an_output_are_not_used() -> None:
    for names, is_used in ((("a", "b"), True), (("a", "a"), False), (("a",), False)):
        assert drop_unfit_names(Outputs("binary", (1,), names)).names == (names if is_used else None)


def test_the_last_lines_count_what_is_not_as_in_training_by_column() -> None:
    def name(row: int) -> str:
        return f"new.csv, row {row + 1}"

    def problem(column: str, *rows: int) -> Problem:
        return Problem(column, np.isin(np.arange(4), rows), lambda row: f"{column} is {row}\n")

    def make_report(on_bad: str) -> RowReport:
        return RowReport(on_bad, name, STATE)

    with pytest.raises(RunError, match=r"new\.csv, row 2: town is 1"):  # the first row, not the first column
        make_report("raise").add_problems([problem("age", 3), problem("town", 1)], 0)
    report = make_report("skip")
    assert list(report.describe(0, True)) == []
    for _ in range(2):
        report.add_problems([problem("age", 0, 3), problem("sold"), problem("town", 1)], 0)
        report.add_missing("age", 1, False)
        report.add_missing("sold", 2000, True)
        report.add_missing("other", 0, False)
        report.add_categories("town", np.array(["Paris", "Aa", "", "Paris"], object), ["Aa"])
        report.add_categories("size", np.array(["Aa"], object), ["Aa"])
        report.add_categories("make", np.array(["Aa", "rare"], object), ["Aa"], has_rare=True)
    report.add_categories("town", np.array([*"abcdef"], object), ["Aa"])
    assert list(report.describe(3, True)) == [
        ("counted", "in the rows of this command only"),
        ("bad rows", "3 left out"),
        ("", "age: 4, first new.csv, row 1: age is 0\\n"),
        ("", "town: 2, first new.csv, row 2: town is 1\\n"),
        ("unknown", 'make: 2 of categories that are rare in training, or not in it: "rare" (2)'),
        (
            "",
            'town: 12 of categories that training did not have: "Paris" (4), missing (2), "a", "b", "c" and 3 with '
            "others",
        ),
        ("imputed", "age: 2 missing, which training never had"),
        ("", "sold: 4,000 missing"),
    ]


def test_shards_continue_with_the_same_choice_for_bad_rows(tmp_path: Path) -> None:
    output = open_output(f"{tmp_path}/shards/", False, False)
    output.path.mkdir()
    for before, after in itertools.product(("raise", "skip", "empty"), repeat=2):
        output.begin({"on-bad": before}, 0)
        if before in ("raise", after):
            assert output.find_first({"on-bad": after}, True) == 0
        else:
            with pytest.raises(ConfigError, match="were made with another on-bad"):
                output.find_first({"on-bad": after}, True)
    output.shard(0).touch()
    output.begin({"on-bad": "skip"}, 1)
    assert output.shard(0).exists()
    assert (output.path / MANIFEST).read_text() == '{\n  "on-bad": "skip"\n}\n'


class NanModel:
    """Computes NaN for numbers below 0."""

    def predict(self, arrays: dict[str, Any], name: Any) -> dict[str, Any]:
        return {"": np.where(arrays["x"] < 0, np.nan, arrays["x"])[:, None]}

    def explain_failure(self, row: int) -> str:
        return "the model computes NaN"


def test_a_row_for_which_the_model_computes_nan_is_bad(tmp_path: Path) -> None:
    numbers, is_good = [1.0, None, -2.0, 3.0], np.array([True, False, True, True])
    predicted = PredictionColumns({"": Outputs("regression", (1,))})
    schema = pyarrow.schema([("x", pyarrow.float64()), *predicted.make_schema()])
    source = open_table(write(tmp_path / "a.parquet"))
    source = replace(source, name=lambda place: f"row {place}")
    task = PredictionTask(source, InputForm(STATE, {"x": ["x"]}), ["x"], predicted, schema, None)
    own = InputForm(replace(STATE, reading={"target": ["x"], "unused": ["word"]}), {"x": ["x"]})
    assert (task.list_columns_unknown_to_run(), replace(task, form=own).list_columns_unknown_to_run()) == ([], [])
    rows = RowBatch(4, pyarrow.table({"x": numbers}))
    chunk = Chunk(rows, {"x": np.array([1.0, -2.0, 3.0], np.float32)}, is_good)
    model: Any = NanModel()

    def predict(on_bad: str) -> Any:
        return chunk.predict(task, model, RowReport(on_bad, source.name, STATE))

    with pytest.raises(RunError, match="row 6: the model computes NaN"):
        predict("raise")
    table, count = predict("skip")
    assert (table.to_pydict(), count) == ({"x": [1.0, 3.0], "prediction": [1.0, 3.0]}, 2)
    table, count = predict("empty")
    assert (table.to_pydict(), count) == ({"x": numbers, "prediction": [1.0, None, None, 3.0]}, 2)
