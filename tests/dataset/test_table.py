"""Tables: types of columns, missing values, formats, what is refused, and a trained model that takes a DataFrame."""

from __future__ import annotations

import csv
import datetime
import decimal
import functools
import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.dataset.tables.files import find_last_row_end
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from tests.checkpoint.test_resume import course
from tests.dataset.files import holds, options, prepared, refused, write

WORDS = [
    "a",
    "quiet",
    "sunny",
    "house",
    "near",
    "the",
    "old",
    "school",
    "with",
    "garden",
    "and",
    "two",
    "large",
    "rooms",
]


def arrays(source: Any, split: str = "train") -> Any:
    """The rows of a split as arrays."""
    return source.load(split).head(1_000_000)


def make(data_dir: Path | str, target: str = "price", **changes: Any) -> Any:
    from scaleflow.dataset.table import Table

    return Table(str(data_dir), target, **changes)


def read_columns(folder: Path, name: str, *numeric: str) -> tuple[list[str], list[str]]:
    source = make(folder / name, "y", numeric=[*numeric] or None)
    return list(source.inputs), [note for note in source.notes if "an index" in note]


def list_columns(folder: Path) -> list[Any]:
    """In a child, of each table: its inputs, the columns that are not used, and the notes about them."""
    found: list[Any] = []
    for name, changes in (
        *(("table.csv", {}), ("table.parquet", {})),
        *(("table.csv", {"columns": ["n", "one", "a"]}), ("table.csv", {"categorical": ["one"]})),
    ):
        source = make(folder / name, "y", test=0, **changes)
        assert set(arrays(source).inputs) == set(source.inputs)
        found.append((list(source.inputs), source.reading["unused"], [n for n in source.notes if "not used" in n]))
    return [*found, refused([lambda: make(folder / "nothing.csv", "y")])]


def test_columns_that_tell_nothing_are_left_out_in_one_note(isolated: Callable[..., Any], tmp_path: Path) -> None:
    import pandas as pd

    count = np.arange(30)
    columns = {"n": count + 1, "a": count + 0.5, "one": 7, "word": "same", "empty": np.nan, "also": None}
    columns |= {"gaps": np.where(count % 3, 1.0, np.nan), "late": count + 1, "y": count * 2.5}
    frame = pd.DataFrame(columns)
    for name in ("table.csv", "table.parquet"):
        write_table(tmp_path / name, frame)
    write_table(tmp_path / "nothing.csv", frame[["n", "one", "y"]])
    csv, parquet, chosen, named, ((nothing,)) = isolated(list_columns, tmp_path)
    note = (
        "dataset: not used: n (the number of the row); one, word (the same value in every row); empty, also (no "
        "values); name a column in dataset.columns to use it"
    )
    assert csv == parquet == (["a", "gaps", "late"], ["n", "one", "word", "empty", "also"], [note])
    assert chosen[0] == ["n", "a", "one"]
    assert named[0] == ["a", "one", "gaps", "late"]
    assert nothing.startswith("dataset.data_dir: no column besides y is of use: n (the number of the row); one (")


def test_columns_of_an_index_are_left_out_with_a_note(isolated: Callable[..., Any], tmp_path: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame({"a": np.arange(30) + 0.5, "y": np.arange(30) * 2.5}, index=np.arange(30)[::-1])
    frame.to_csv(tmp_path / "unnamed.csv")
    frame.to_parquet(tmp_path / "level.parquet")
    write(tmp_path / "ends.csv", "a,y,,\n" + "".join(f"{n}.5,{n}.25,,\n" for n in range(30)))
    for name, label in (("unnamed.csv", "''"), ("level.parquet", "__index_level_0__"), ("ends.csv", "''")):
        columns, (note,) = isolated(read_columns, tmp_path, name)
        assert columns == ["a"], name
        assert f": {label} (an index has such a name);" in note
    level = "__index_level_0__"
    assert isolated(read_columns, tmp_path, "level.parquet", level) == (["a", level], [])


def compare_written(folder: Path) -> None:
    """The same table as Python writes it, as Excel does in Germany, and in further forms and formats."""
    import pandas as pd

    random = np.random.default_rng(0)
    frame = pd.DataFrame({"x": random.normal(0, 5000, 60).round(2), "zip": random.choice(["01067", "10115"], 60)})
    frame["day"] = pd.Timestamp("2023-12-20 14:05") + pd.to_timedelta(range(60), unit="D")
    frame["price"] = (frame.x * 2 + 900).round(2)
    frame.to_csv(folder / "plain.csv", index=False)
    german = frame.assign(day=frame.day.dt.strftime("%d.%m.%Y %H:%M"))
    for name in ("x", "price"):
        german[name] = [f"{x:,.2f}".translate(str.maketrans(",.", ".,")) for x in frame[name]]
    text = german.to_csv(index=False, sep=";")
    (folder / "german.csv").write_text(text)
    (folder / "excel.csv").write_text(f"sep=;\n{text}", encoding="utf-8-sig")
    (folder / "pipe.csv").write_text(german.to_csv(index=False, sep="|") + "too|few\n")
    plain = make(folder / "plain.csv")
    assert any("codes, not numbers: zip;" in note for note in plain.notes)
    assert (plain.inputs["x"].dtype, plain.inputs["zip"].dtype, plain.outputs.kind) == (
        "float64",
        "string",
        "regression",
    )
    german.assign(x=german.x.astype("category")).to_parquet(folder / "german.parquet")
    german.to_feather(folder / "german.feather")
    german.to_json(folder / "german.jsonl", orient="records", lines=True)
    frame.assign(day=frame.day.dt.strftime("%Y-%m-%d %H:%M")).to_json(
        folder / "iso.jsonl", orient="records", lines=True
    )
    dates = {".parquet": "%d.%m.%Y %H:%M", ".jsonl": "%d.%m.%Y", "iso.jsonl": "%Y-%m-%d %H:%M"}
    for name in (
        "german.csv",
        "excel.csv",
        "pipe.csv",
        "german.parquet",
        "german.feather",
        "german.jsonl",
        "iso.jsonl",
    ):
        found = make(folder / name, dates=dates.get(name) or dates.get(Path(name).suffix))
        assert found.reading["columns"] == plain.reading["columns"], name
        for split in ("train", "test"):
            np.testing.assert_equal(*(arrays(each, split).inputs for each in (found, plain)))
            np.testing.assert_equal(*(arrays(each, split).targets for each in (found, plain)))
    (fault,) = make(folder / "pipe.csv").load("train").reader.faults
    assert fault == f"{folder}/pipe.csv, row 61: it has 2 field(s), expected 4"
    check_doors(make(folder / "german.csv", test=0.0), german)
    (folder / "named.csv").write_text("".join(f"{n},word {n}\n" for n in range(60)))
    with pytest.raises(ConfigError, match="is no number; dataset"):
        make(folder / "named.csv", "target", header=["x", "target"])


def check_doors(source: Any, frame: Any) -> None:
    """`predict` and the logged model read the same cells as the run."""
    import pyarrow
    import tensorflow as tf

    from scaleflow.serving.cells import ColumnReader
    from scaleflow.serving.loader import to_tensor

    for name, trained in arrays(source).inputs.items():
        spec = tf.TensorSpec([None], source.inputs[name].dtype)
        column = pyarrow.chunked_array([pyarrow.array(frame[name])])
        reader = ColumnReader(source.reading["columns"][name], [""], source.reading["forms"].get(name))
        predicted, is_bad, _ = reader.convert(column, np.dtype(spec.dtype.as_numpy_dtype))
        served = to_tensor(spec, frame[name], name, reader).numpy()
        plain = [each.decode() if isinstance(each, bytes) else each for each in served.tolist()]
        assert not is_bad.any()
        assert predicted.tolist() == trained.tolist() == plain, name


def test_tables_are_read_as_people_write_them(isolated: Callable[..., Any], tmp_path: Path) -> None:
    isolated(compare_written, tmp_path)


#: Ordinary cells of columns, from which a table learns, and strange ones.
ORDINARY: dict[str, Callable[[int], str]] = {
    "price": lambda n: f"{n + 1}.163,{n % 90 + 10} €",
    "size": lambda n: f"{n / 4 + 0.3:.2f}",
    "day": lambda n: f"{n % 28 + 1:02}.01.2024",
    "town": lambda n: str(n % 3),
}
STRANGE = {
    "price": [
        " 12,5 € ",
        "(3,00 €)",
        "\u22127",
        "5-",
        "EUR 8",
        "$9",
        "1%",
        "NA",
        "?",
        "1.2.3",
        "word",
        "1e3",
        "1,5e400",
    ],
    "size": ["+5", ".5", " 7 ", "1e400", "nan", "TRUE", "false", "0x1F", "1,5", "007", "1E2", "-0", "inf"],
    "day": ["31.02.2024", "1.2.2024", "2024-01-31", "2024-01-31T12:00:00+01:00", "soon", "NA", " 01.02.2024 ", "45000"],
    "town": ["1.0", "True", "NA", " 2 ", "\uff12", "", "Ulm", "1e0", "0.10"],
}


def read_strange_cells(folder: Path) -> None:
    """Training, `predict` and the logged model read the same cells, and refuse the same ones."""
    import pyarrow
    from pyarrow import parquet

    count = max(map(len, STRANGE.values()))
    cells = {name: [make(n) for n in range(60)] + STRANGE[name] for name, make in ORDINARY.items()}
    columns = {name: values + values[:1] * (60 + count - len(values)) for name, values in cells.items()}
    rows = zip(*columns.values(), range(60 + count), strict=True)
    with (folder / "strange.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[*columns, "y"], *rows])
    source = make(folder / "strange.csv", "y", test=0.0, learn_on=60, numeric=["price"], categorical=["town"])
    kinds = {"price": "numbers", "size": "numbers", "day": "dates", "town": "categories"}
    assert source.reading["columns"] == kinds
    check_readers(source, {name: pyarrow.array(values) for name, values in columns.items()})

    words = ["Ulm", " Ulm ", "NA", None] * 15
    moment = datetime.datetime(2024, 1, 31, 12, 30, 1, 999_999)
    typed = {
        "exact": pyarrow.array([decimal.Decimal("0.10"), None, decimal.Decimal("-7.25")] * 20),
        "yes": pyarrow.array([True, False, None] * 20),
        "small": pyarrow.array([-128, 127, None] * 20, pyarrow.int8()),
        "large": pyarrow.array([2**53 + 1, -(2**62), 0] * 20),
        "half": pyarrow.array(np.array([0.1, 65504, np.nan] * 20, np.float16)),
        "dictionary": pyarrow.array(words).dictionary_encode(),
        "long": pyarrow.array(words, pyarrow.large_string()),
        "zone": pyarrow.array([moment, None, moment] * 20, pyarrow.timestamp("us", "Europe/Berlin")),
        "date": pyarrow.array([datetime.date(2024, 2, 29), None, datetime.date(1, 1, 1)] * 20),
    }
    parquet.write_table(pyarrow.table({**typed, "y": pyarrow.array(range(60))}), folder / "typed.parquet")
    check_readers(make(folder / "typed.parquet", "y", test=0.0), typed)


def check_readers(source: Any, columns: dict[str, Any]) -> None:
    """Compares the rows of a table with what its readers make of the same columns in `predict` and a logged model."""
    import pyarrow
    import tensorflow as tf
    from mlflow.exceptions import MlflowException

    from scaleflow.serving.cells import make_readers
    from scaleflow.serving.loader import to_tensor

    rows = source.load("train").reader
    trained, faults = rows.read(0)
    words = {name: sorted(set(trained.inputs[name])) for name in columns if source.inputs[name].dtype == "string"}
    readers = make_readers(source.reading, words)
    is_refused = np.zeros(len(trained.targets), bool)
    for name, column in columns.items():
        dtype = trained.inputs[name].dtype
        predicted, is_bad, _ = readers[name].convert(pyarrow.chunked_array([column]), dtype)
        np.testing.assert_array_equal(predicted, trained.inputs[name], name)
        is_refused |= is_bad
        spec = tf.TensorSpec([None], source.inputs[name].dtype)
        cells = column.to_pandas()
        for row, value in enumerate(trained.inputs[name]):
            try:
                (served,) = to_tensor(spec, cells[row : row + 1], name, readers[name]).numpy()
            except MlflowException:
                assert is_bad[row], (name, row)
                continue
            assert not is_bad[row], (name, row)
            np.testing.assert_equal(served.decode() if isinstance(served, bytes) else served, value, f"{name}, {row}")
    assert sorted(faults) == np.flatnonzero(is_refused).tolist()


def test_strange_cells_are_read_alike_in_training_and_in_serving(isolated: Callable[..., Any], tmp_path: Path) -> None:
    isolated(read_strange_cells, tmp_path)


def read_several_units(folder: Path) -> list[Any]:
    """A table whose last rows have another currency: notes, missing numbers and refusals."""
    rows = [f"${n}.50,{n % 2}" for n in range(40)] + [f"{n}.50 €,{n % 2}" for n in range(20)]
    path = write(folder / "mixed.csv", "\n".join(["x,y", *rows]))
    write(folder / "splits/train.csv", "\n".join(["x,y", *rows[:40]]))
    write(folder / "splits/test.csv", "\n".join(["x,y", *rows[30:]]))
    messages = refused([functools.partial(make, path, name) for name in ("x", "y")])
    messages += refused([functools.partial(make, path, "y", learn_on=20)])
    numeric = [make(path, "y", numeric=["x"], test=0.0, learn_on=learn_on) for learn_on in (None, 20)]
    missing = [int(np.isnan(arrays(each).inputs["x"]).sum()) for each in numeric]
    notes = [note for each in numeric for note in each.notes if "count as missing" in note]
    splits = make(folder / "splits", "y")
    splits.load("test")
    return [messages, missing, notes, splits.load_notes]


def test_a_table_with_several_currencies_is_refused_or_noted(isolated: Callable[..., Any], tmp_path: Path) -> None:
    messages, missing, notes, load_notes = isolated(read_several_units, tmp_path)
    assert ["x has numbers with several units: $" in message for message in messages] == [True] * 3
    assert ["dataset.numeric" in message for message in messages] == [False, True, True]  # x is the target first
    assert missing == [20, 20]
    assert notes == ["dataset: x: 20 numbers are not in $, but in EUR (20); they count as missing"] * 2
    assert load_notes == [f"{notes[0]} (split 'test')"]


def test_an_encoding_is_named(isolated: Callable[..., Any], tmp_path: Path) -> None:
    text = "größe,y\n" + "".join(f"{n}.5,{n}.25\n" for n in range(30))
    (tmp_path / "latin.csv").write_bytes(text.encode("latin-1"))
    (tmp_path / "data.csv").write_bytes(("a,b,y\n" + "ä,1,2.5\n" * 9).encode("latin-1"))
    (tmp_path / "wide.csv").write_bytes(text.encode("utf-16"))
    for name, reason in (
        ("latin", "dataset.encoding=latin-1"),
        ("data", "dataset.encoding=latin-1"),
        ("wide", "UTF-16"),
    ):
        (message,) = isolated(refused, [functools.partial(make, tmp_path / f"{name}.csv", "y")])
        assert reason in message, name


def table(rows: int = 60) -> Any:
    """Columns of every type as a DataFrame; each but `new` and the target has missing values."""
    import pandas as pd

    random = np.random.default_rng(0)
    number = np.arange(rows)
    frame = pd.DataFrame(
        {
            "Size (m²)": number + 0.25,
            "new": number % 3 == 0,
            "town": np.array(["Ulm", "Köln", "Bonn"])[number % 3],
            "text": [" ".join(random.choice(WORDS, 6)) for _ in number],
            "sold": pd.Timestamp("2023-12-30 06:30:00") + pd.to_timedelta(number, unit="D"),
            "file": number % 7,
            "price": 1000.5 * (number % 10) + 200000,
        }
    ).astype({"town": object, "text": object})
    for place, name in enumerate(("Size (m²)", "town", "text", "sold")):
        frame.loc[place + 1, name] = None
    return frame


def write_table(path: Path, frame: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writers: dict[str, Callable[[], Any]] = {
        ".parquet": lambda: frame.to_parquet(path),
        ".feather": lambda: frame.to_feather(path),
        ".jsonl": lambda: frame.to_json(path, orient="records", lines=True, date_format="iso"),
        ".tsv": lambda: frame.to_csv(path, index=False, sep="\t"),
    }
    writers.get(path.suffix, lambda: frame.to_csv(path, index=False))()
    return path


# ---------------------------------------------------------------------------------------------
# Columns
# ---------------------------------------------------------------------------------------------

CSV = """id,area,new,town,note,sold,seen,rooms,price
1,100.5,true,Ulm,"quiet, but
near the station",2024-02-29,2024-02-29T10:30:00Z,3,1.5
2, NA ,false,,"a ""nice"" house with garden",2024-03-01 12:00:00,,2,2.5e0
3,60,true, Bonn ,,,2024-03-01T00:00:00Z,2,-3
4,80,false,Ulm,two rooms and a cellar,2024-03-02,2024-03-02T00:00:00Z,1,4
"""


def read_types(base: Path) -> Any:
    from scaleflow import dataset

    path = write(base / "houses.csv", CSV)
    source = make(path, test=0, drop=["id"], categorical=["rooms"])
    splits = dataset.prepare_splits(source, options(), 0)
    zipped = write(base / "zipped.csv.gz", gzip.compress(CSV.encode()))
    is_same = arrays(make(zipped, test=0, drop=["id"], categorical=["rooms"])).inputs["note"].tolist()
    embedded = make(path, test=0, drop=["id", "seen"], text=["note"], embed=True, tokens=4)
    numbers = dataset.prepare_splits(embedded, options(), 0)
    return (
        source.notes,
        source.inputs,
        arrays(source),
        splits.inputs,
        splits.train.inputs,
        is_same,
        (numbers.inputs, numbers.train.inputs["note"], numbers.train.inputs["town"]),
    )


def test_each_column_is_an_input_of_its_type(isolated: Callable[..., Any], tmp_path: Path) -> None:
    (note,), inputs, raw, features, x, zipped, embedded = isolated(read_types, tmp_path)
    assert note == (
        "dataset=table: numbers area, new; categories town, rooms; texts note; dates sold, seen; target price "
        "(regression)"
    )
    assert {name: (each.shape, each.dtype) for name, each in inputs.items()} == {
        **dict.fromkeys(("area", "new"), ((), "float64")),
        **dict.fromkeys(("town", "note", "sold", "seen", "rooms"), ((), "string")),
    }
    np.testing.assert_array_equal(raw.inputs["area"], np.array([100.5, np.nan, 60, 80]))
    assert raw.inputs["new"].tolist() == [1, 0, 1, 0]
    assert raw.inputs["town"].tolist() == ["Ulm", "", "Bonn", "Ulm"]
    assert raw.inputs["note"].tolist() == zipped
    assert zipped[:3] == ["quiet, but\nnear the station", 'a "nice" house with garden', ""]
    assert raw.inputs["sold"].tolist() == ["2024-02-29T00:00:00", "2024-03-01T12:00:00", "", "2024-03-02T00:00:00"]
    assert raw.inputs["seen"][0] == "2024-02-29T10:30:00"
    assert raw.targets.tolist() == [[1.5], [2.5], [-3], [4]]

    shapes = {"area": (2,), "new": (1,), "town": (4,), "rooms": (4,), "sold": (8,), "seen": (8,)}
    assert {name: features[name].shape for name in shapes} == shapes
    assert all(each.dtype == "float32" for each in features.values())
    area = np.array([100.5, 60, 80])
    np.testing.assert_allclose(x["area"][[0, 2, 3], 0], (area - area.mean()) / area.std(), atol=1e-6)
    assert x["area"][:, 1].tolist() == [0, 1, 0, 0]
    assert x["area"][1, 0] == 0
    assert x["town"].argmax(axis=1).tolist() == [3, 1, 2, 3]  # 0 is for unknown words, then "", Bonn, Ulm
    assert x["note"].sum(axis=1).tolist() == [5, 5, 0, 5]
    assert x["sold"][2].tolist() == [0] * 7 + [1]

    specs, note_numbers, towns = embedded
    assert (specs["note"].shape, specs["note"].dtype, specs["note"].vocabulary) == ((4,), "int32", 16)
    assert (specs["town"].shape, specs["town"].dtype, specs["town"].vocabulary) == ((), "int32", 4)
    assert (note_numbers[0] > 1).all()
    assert note_numbers[2].tolist() == [0, 0, 0, 0]
    assert towns.tolist() == [3, 1, 2, 3]


def read_schemas(base: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    dates = [datetime.datetime(2024, 1, 5, 10, 30), None, datetime.datetime(2024, 7, 5, 10, 30)]
    columns = {
        "code": pyarrow.array(["b", None, "a"]).dictionary_encode(),
        "long": pyarrow.array(["NA", " y ", "z"], pyarrow.large_string()),
        "money": pyarrow.array([decimal.Decimal("1.5"), None, decimal.Decimal("2.5")]),
        "count": pyarrow.array([1, None, 3], pyarrow.int16()),
        "day": pyarrow.array(dates, pyarrow.timestamp("ns")).cast(pyarrow.date32(), safe=False),
        "zone": pyarrow.array(dates, pyarrow.timestamp("us")).cast(pyarrow.timestamp("us", "Europe/Berlin")),
        "price": pyarrow.array([1.0, 2.0, 3.0], pyarrow.float16()),
    }
    parquet.write_table(pyarrow.table(columns), base / "table.parquet")
    source = make(base / "table.parquet", test=0)
    with pyarrow.CompressedOutputStream(str(base / "table.csv.zst"), "zstd") as file:
        file.write(CSV.encode())
    zipped = make(base / "table.csv.zst", test=0, drop=["id"])
    return {name: values.tolist() for name, values in arrays(source).inputs.items()}, len(zipped.load("train"))


def test_types_of_a_schema_are_kept(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found, rows = isolated(read_schemas, tmp_path)
    assert rows == 4
    np.testing.assert_array_equal(found.pop("money"), [1.5, np.nan, 2.5])
    np.testing.assert_array_equal(found.pop("count"), [1, np.nan, 3])
    assert found == {
        "code": ["b", "", "a"],
        "long": ["", "y", "z"],
        "day": ["2024-01-05T00:00:00", "", "2024-07-05T00:00:00"],
        "zone": ["2024-01-05T10:30:00", "", "2024-07-05T10:30:00"],
    }


DATES = ["1970-01-01", "2024-02-29", "2024-12-31 23:59:59", "1900-03-01T00:00:00", "2100-07-16T12:00:00.123456789"]
NO_DATES = ["2024-13-01", "2024-1-1", "31.12.2024", "2024-01-01 10:00", "2024-01-01T10:00:00+02:00", "2024-01-32", "x"]


def read_dates() -> Any:
    import tensorflow as tf

    from scaleflow.dataset.tables.columns import Date, parse_dates

    preprocessing = Date()
    learned = preprocessing.learn([np.array(DATES[:4], object), np.array([b""], object)])
    layer = preprocessing.layer(learned)
    outcomes = []
    for wrong in NO_DATES:
        try:
            outcomes.append(str(layer(tf.constant([wrong]))))
        except tf.errors.InvalidArgumentError as error:
            outcomes.append(error.message)
    seconds, share = parse_dates(tf.constant(DATES))
    return learned, np.asarray(seconds), np.asarray(share), np.asarray(layer(tf.constant([*DATES, ""]))), outcomes


def test_dates_become_numbers(isolated: Callable[..., Any]) -> None:
    learned, seconds, share, features, outcomes = isolated(read_dates)
    expected = np.array([np.datetime64(date, "s").astype(np.int64) for date in DATES], np.float64)
    assert seconds.tolist() == expected.tolist()
    assert learned["missing"]
    np.testing.assert_allclose(learned["mean"], expected[:4].mean())
    np.testing.assert_allclose(features[:5, 0], (expected - expected[:4].mean()) / expected[:4].std(), rtol=1e-5)
    np.testing.assert_allclose(share, [0, (1 + 28 / 31) / 12, (11 + 30 / 31) / 12, 2 / 12, (6 + 15 / 31) / 12])
    weekdays = np.array([3, 3, 1, 3, 4]) + np.array([0, 0, 86399 / 86400, 0, 0.5])  # Monday is 0
    np.testing.assert_allclose(features[:5, 3], np.sin(2 * np.pi * weekdays / 7), atol=1e-5)
    np.testing.assert_allclose(features[4, 5:7], [0, -1], atol=1e-5)  # noon
    assert features[:, 7].tolist() == [0, 0, 0, 0, 0, 1]
    assert features[5].tolist() == [0] * 7 + [1]
    for wrong, message in zip(NO_DATES, outcomes, strict=True):
        assert wrong in message, (wrong, message)


#: The target's values, what kind they are taken for, the names of the classes, the option.
KINDS: dict[str, tuple[list[Any], str, Any, str]] = {
    "words": (["b", "a", "c"] * 4, "classification", ("a", "b", "c"), "auto"),
    "booleans": ([True, False] * 6, "binary", ("false", "true"), "auto"),
    "few whole numbers": ([10, 9, 2] * 4, "classification", ("2", "9", "10"), "auto"),
    "many whole numbers": (list(range(30)), "regression", None, "auto"),
    "few numbers": ([0.5, 1.5] * 6, "regression", None, "auto"),
    "two classes": ([0.5, 1.5] * 6, "classification", ("0.5", "1.5"), "classification"),
    "counts": ([1, 2, 3] * 4, "regression", None, "regression"),
}


def read_kinds(base: Path) -> Any:
    import pandas as pd

    found = {}
    for name, (values, _, _, kind) in KINDS.items():
        frame = pd.DataFrame({"x": np.arange(len(values)), "price": values})
        for suffix in (".parquet", ".csv"):
            source = make(write_table(base / f"{name}{suffix}", frame), kind=kind, test=0)
            found[name, suffix] = source.outputs, arrays(source).targets
    unscaled = make(base / "counts.csv", kind="regression", scale_target=False).outputs.scaling
    return found, unscaled


def test_the_kind_follows_from_the_target(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found, unscaled = isolated(read_kinds, tmp_path)
    assert unscaled is None
    for (name, suffix), (outputs, targets) in found.items():
        values, kind, classes, _ = KINDS[name]
        if name == "booleans" and suffix == ".csv":
            classes = ("False", "True")  # the words of the file
        assert (outputs.kind, outputs.names) == (kind, classes), name
        if kind == "regression":
            assert targets[:, 0].tolist() == values
            np.testing.assert_allclose(outputs.scaling, (np.mean(values), np.std(values)))
        else:
            words = [str(value) if classes[0] == "False" else str(value).lower() for value in values]
            assert np.ravel(targets).tolist() == [classes.index(word) for word in words], name
            assert outputs.shape == ((1,) if kind == "binary" else (len(classes),)), name


# ---------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------


def read_files(base: Path) -> Any:
    frame = table()
    for n in range(3):
        part = frame.iloc[n * 20 : n * 20 + 20]
        write_table(base / f"parts/{n}.parquet", part)
        write_table(base / f"splits/{'train' if n < 2 else 'test'}/{n}.feather", part)
    write_table(base / "order/1.csv", frame[:30])
    write_table(base / "order/2.csv", frame[30:][frame.columns[::-1]])
    files = pytest.MonkeyPatch()
    files.setattr("scaleflow.dataset.tables.files.TEXT_BLOCK", 500)  # several blocks
    sources = {
        "folder": make(base / "parts"),
        "glob": make(f"{base}/parts/*.parquet"),
        "tsv": make(write_table(base / "table.tsv", frame)),
        "jsonl": make(write_table(base / "table.jsonl", frame)),
        "csv": make(write_table(base / "table.csv", frame)),
        "feather": make(write_table(base / "table.feather", frame)),
        "splits": make(base / "splits"),
        "other order": make(base / "order"),
    }
    return {
        name: {split: arrays(source, split).inputs["Size (m²)"] for split in source.splits}
        for name, source in sources.items()
    }


def test_files_folders_and_globs_are_read_and_divided(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(read_files, tmp_path)
    for name in ("glob", "tsv", "jsonl", "csv", "feather", "other order"):
        for split, values in found["folder"].items():
            np.testing.assert_array_equal(found[name][split], values, err_msg=name)
    assert [len(values) for values in found["folder"].values()] == [48, 12]
    together = np.sort(np.concatenate(list(found["folder"].values())))
    np.testing.assert_array_equal(together, np.sort(table()["Size (m²)"].to_numpy()))
    assert [len(values) for values in found["splits"].values()] == [20, 40]
    assert found["splits"]["test"][0] == 40.25


GOOD = "".join(f"{n},{n % 5},t{n % 3},{n / 7}\n" for n in range(30))


def read_partitions(base: Path) -> Any:
    import pyarrow
    from pyarrow import dataset

    frame = table(12)[["file", "town", "price"]].assign(year=2020 + np.arange(12) % 2, kind="a b/c")
    frame["price"] += np.arange(12)
    frame.loc[3, "town"] = None
    rows = pyarrow.Table.from_pandas(frame, preserve_index=False)
    found = []
    for form in ("parquet", "csv", "feather"):
        dataset.write_dataset(
            rows, base / form, format=form, partitioning=["year", "town", "kind"], partitioning_flavor="hive"
        )
        source = make(base / form, test=0, numeric=["year"])
        x, y = arrays(source).parts
        y = y[:, 0]
        order = np.lexsort([y, x["year"]])
        found.append((source.notes[0], {name: array[order].tolist() for name, array in x.items()}, y[order].tolist()))
    (base / "csv" / "year=2020").rename(base / "csv" / "year=NA")
    sampled = make(base / "csv", test=0, columns=["file", "year"], learn_on=4)
    found.append(np.sort(arrays(sampled).inputs["year"]).tolist())
    write(base / "uneven" / "long.csv", "x,y\n" + "1,2\n" * 9)
    write(base / "uneven" / "short.csv", "x,y\n3,4\n")
    assert not any("learn_on" in note for note in make(base / "uneven", "y", test=0).notes)  # from all rows
    one = make(base / "parquet" / "year=20*" / "**" / "*.parquet", test=0, columns=["year"])
    (base / "parquet" / "year=2020" / "odd").mkdir()
    frame.assign(year=1).to_parquet(base / "parquet" / "year=2020" / "odd" / "more.parquet")
    (message,) = refused([lambda: make(base / "parquet")])
    return found, arrays(one).inputs, message, frame


def test_the_names_of_folders_are_columns(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found, years, message, frame = isolated(read_partitions, tmp_path)
    frame = frame.sort_values(["year", "price"])
    assert np.array_equal(found.pop(), [2021.0] * 6 + [np.nan] * 6, equal_nan=True)
    for note, x, y in found:
        assert note == "dataset=table: numbers file, year; categories town, kind; target price (regression)"
        assert x["year"] == frame.year.tolist()
        assert x["town"] == frame.town.fillna("").tolist()
        assert x["kind"] == ["a b/c"] * 12
        assert x["file"] == frame.file.tolist()
        assert y == frame.price.tolist()
    assert sorted(years["year"].tolist()) == frame.year.tolist()
    assert message.endswith("more.parquet: two columns have the name 'year'; rename one of them")


def read_bad_rows(base: Path) -> Any:
    rows = GOOD + "1,two,t1,4\n1,2,t1,\n1,2,t1,four\n"
    path = write(base / "bad.csv", f"area,rooms,town,price\n{rows}")
    of = functools.partial(make, path, kind="regression", numeric=["rooms"], test=0)
    frame = table()
    frame.loc[7, "Size (m²)"] = np.inf
    infinite = functools.partial(make, write_table(base / "infinite.parquet", frame), test=0, columns=["Size (m²)"])
    write(base / "classes/train.csv", "x,sold,price\n" + "1,2024-01-01,a\n2,2024-01-02,b\n" * 5)
    write(base / "classes/test.csv", "x,sold,price\n1,2024-01-03,a\n2,2024-01-04,c\n3,soon,b\n")
    classes = functools.partial(make, base / "classes")
    return (
        [prepared(of), prepared(infinite), prepared(classes)],
        [prepared(each, on_bad_example="skip") for each in (of, infinite, classes)],
    )


def test_rows_that_cannot_be_used_are_named_or_left_out(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found, skipped = isolated(read_bad_rows, tmp_path)
    bad, infinite, classes = (tmp_path / name for name in ("bad.csv", "infinite.parquet", "classes/test.csv"))
    holds(
        found,
        [
            [
                f"{bad}, row 31: rooms is two, expected a finite number",
                f"{bad}, row 33: its target price is four, expected a finite number",
                "dataset.on_bad_example=skip",
            ],
            [f"{infinite}, row 8: Size (m²) is inf, expected a finite number"],
            [
                f"{classes}, row 2: its target price is c, expected a class of the training split (a, b)",
                f"{classes}, row 3: sold is soon, expected a date",
            ],
        ],
    )
    assert [counts for counts, _ in skipped] == [{"train": 30}, {"train": 59}, {"train": 10, "test": 1}]
    notes = [next(note for note in each if "=skip: left out" in note) for _, each in skipped]
    for note, left_out in zip(notes, ("2 of the 32", "1 of the 60", "2 of the 3"), strict=True):
        assert f"left out {left_out} examples" in note
    assert f"dataset: left out: in 'train', 1 of 33 rows have no target price ({bad}, row 32)" in skipped[0][1]
    assert f"{bad}, row 31 (rooms is two, expected a finite number)" in notes[0]


def leave_out_rows(base: Path) -> Any:
    """In a child, of tables that are learned from as a whole and in part: what is left out, in each split."""
    found = []
    for name, learn_on in (("gaps.csv", None), ("gaps.parquet", None), ("gaps.parquet", 10), ("gaps.csv", 10)):
        of = functools.partial(make, base / name, "y", learn_on=learn_on, kind="regression")
        source = of()
        rows = {split: arrays(source, split).parts for split in ("train", "test")}
        numbers = {split: sorted(x["n"].tolist()) for split, (x, _) in rows.items()}
        targets = {split: y[:, 0].tolist() for split, (_, y) in rows.items()}
        counts, notes = prepared(of)
        assert counts == prepared(of, on_bad_example="skip")[0] == {split: len(each) for split, each in numbers.items()}
        kept = np.concatenate([*numbers.values()])
        assert np.array_equal(kept * 2.5, np.concatenate([np.sort(each) for each in targets.values()]))
        found.append(
            (sorted(kept), [note for note in notes if "no target" in note], prepared(of, on_bad_example="raise"))
        )
    return found, refused([functools.partial(make, base / "split", "y")])


def test_rows_without_a_target_are_left_out_and_counted(isolated: Callable[..., Any], tmp_path: Path) -> None:
    import pandas as pd
    import pyarrow
    from pyarrow import parquet

    numbers = np.arange(7.0, 67.0)
    frame = pd.DataFrame(
        {"n": numbers, "word": ["a", "b", "c"] * 20, "y": np.where(numbers % 5 == 3, np.nan, numbers * 2.5)}
    )
    frame.to_csv(tmp_path / "gaps.csv", index=False, na_rep="NA")
    table = pyarrow.table({name: pyarrow.array(frame[name]) for name in frame})  # NaN, not null
    parquet.write_table(table, tmp_path / "gaps.parquet", row_group_size=13)
    write(tmp_path / "split/train.csv", "x,y\n1,a\n2,b\n" * 4)
    write(tmp_path / "split/test.csv", "x,y\n1,\n2,NA\n")
    found, (empty,) = isolated(leave_out_rows, tmp_path)
    for kept, notes, refusal in found:
        assert kept == [n for n in numbers if n % 5 != 3]
        counts = [(note.split("'")[1], int(note.split(", ")[1].split()[0])) for note in notes]
        assert [split for split, _ in counts] == ["train", "test"]
        assert sum(count for _, count in counts) == 12
        assert refusal.startswith("dataset.on_bad_example=raise: in 'train', ")
        assert "row 2" in refusal
    assert "dataset.target=y: no row of the split 'test' has one" in empty


def read_sorted(base: Path) -> Any:
    """In a child, of tables that are sorted by the target, of which the first rows are learned from: what it is."""
    found = []
    for name in ("sorted.csv", "sorted.parquet"):
        for target in ("word", "few", "many"):
            others = [each for each in ("word", "few", "many") if each != target]
            outputs = make(base / name, target, learn_on=12, drop=others).outputs
            counts, _ = prepared(functools.partial(make, base / name, target, learn_on=12, drop=others))
            found.append((outputs.kind, outputs.names, sum(counts.values())))
    return found


def test_a_table_that_is_sorted_by_its_target_has_all_classes(isolated: Callable[..., Any], tmp_path: Path) -> None:
    import pandas as pd

    numbers = np.arange(90)
    frame = pd.DataFrame({"x": numbers[::-1] + 0.5, "word": np.array([*"abcdef"])[numbers // 15], "few": numbers // 9})
    frame["many"] = numbers // 3
    frame.to_csv(tmp_path / "sorted.csv", index=False)
    frame.to_parquet(tmp_path / "sorted.parquet", row_group_size=50)
    few = tuple(map(str, range(10)))
    wanted = [("classification", tuple("abcdef"), 90), ("classification", few, 90), ("regression", None, 90)]
    assert isolated(read_sorted, tmp_path) == wanted * 2


def count_rare(base: Path) -> Any:
    """In a child: the words that are learned of a column, with the notes."""
    found = []
    for embed in (False, True):
        source = make(base / "rare.csv", "y", most_values=3, embed=embed, drop=["own"] if embed else None)
        words = source.preprocessing["word"].learn([arrays(source).inputs["word"]])
        layer = source.preprocessing["word"].layer(words)
        codes = [np.asarray(layer(np.array([word]))).ravel().tolist() for word in ("c", "rare 1", "never", "")]
        found.append((words, codes, source.reading["many_words"], [note for note in source.notes if "rare" in note]))
    return found, source.reading["unused"], make(base / "rare.csv", "y", most_values=3).reading["unused"]


def test_rare_words_of_a_column_are_one_as_unknown_ones_are(isolated: Callable[..., Any], tmp_path: Path) -> None:
    words = [*"aaaaaaaabbbbbbccccc", *(f"rare {n % 9}" for n in range(20)), ""] * 5
    rows = "".join(f"{word},name{n},{n % 7}.5\n" for n, word in enumerate(words))
    write(tmp_path / "rare.csv", f"word,own,y\n{rows}")
    found, _, unused = isolated(count_rare, tmp_path)
    assert unused == ["own"]
    for (learned, codes, many, (note,)), wanted in zip(
        found, ([[0, 0, 0, 0, 1], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 0, 0, 0]], [[4], [0], [0], [1]]), strict=True
    ):
        assert learned == ["", "a", "b", "c"]
        assert codes == wanted
        assert many == {"word": 12}
        assert note.startswith(
            "dataset.rare=other: the 3 most frequent of 12 words of word are used; the others are one"
        )


def read_quotes(base: Path) -> Any:
    rows = [['5" pipe', 1], ["two\nlines", 2], ['6" and 7"', 3], ['a "word",\nmore', 4], ["x", 5]] * 5

    def field(text: str) -> str:
        return '"' + text.replace('"', '""') + '"' if "\n" in text else text

    text = "note,price\n" + "".join(f"{field(note)},{price}\n" for note, price in rows)
    paths = [write(base / "quotes.csv", text), write(base / "quotes.csv.gz", gzip.compress(text.encode()))]
    found = [arrays(make(path, kind="regression", test=0, categorical=["note"])) for path in paths]
    open_text = text + 'x,7\n"no end,8\ny,9\n'
    left_open = [write(base / "open.csv", open_text), write(base / "open.csv.gz", gzip.compress(open_text.encode()))]
    return (
        rows,
        [(x["note"].tolist(), y[:, 0].tolist()) for x, y in (each.parts for each in found)],
        refused([functools.partial(make, path) for path in left_open]),
    )


def test_a_quote_in_a_field_is_text(isolated: Callable[..., Any], tmp_path: Path) -> None:
    rows, found, refusals = isolated(read_quotes, tmp_path)
    assert found == [([note for note, _ in rows], [price for _, price in rows])] * 2
    line = 2 + sum(1 + str(note).count("\n") for note, _ in rows) + 1
    holds(refusals, [[f"open.csv{end}: the row at line {line} has a field that begins with"] for end in ("", ".gz")])


def test_rows_end_where_the_csv_module_ends_them() -> None:
    """Text is cut at the end of a row: both parts have the rows of the whole, whatever quotes are in it."""
    random = np.random.default_rng(0)

    def parse(text: str) -> list[list[str]]:
        return list(csv.reader(io.StringIO(text, newline="")))

    for _ in range(2000):
        text = "".join(random.choice(list('a,"\n"\n,'), random.integers(1, 14)))
        end, is_open = find_last_row_end(text.encode(), ",")
        assert parse(text) == parse(text[:end]) + parse(text[end:]), text
        assert is_open == (parse(f"{text}\nz")[-1] != ["z"]), text


def refusals(base: Path) -> list[str]:
    import pandas as pd

    frame = table()
    good = write_table(base / "good.parquet", frame)
    nested = write_table(base / "nested.parquet", frame.assign(size=[{"a": 1}] * 60, bytes=b"x", empty=None))
    write(base / "empty.csv", "")
    write(base / "no_rows.csv", "a,price\n")
    write(base / "latin.csv", "a,price\ngröße,2\n".encode("latin-1"))
    write(base / "few.csv", "a,price\n1,2.5\n3\n")
    write(base / "twice.csv", "a,a,price\n1,2,3\n")
    write(base / "unnamed.csv", ",km/h,price\n1,2,3\n2,3,4\n")
    write(base / "mostly.csv", "x,price\n" + "1,2.5\n" * 30 + "one,2.5\n")
    write(base / "names.csv", "x,price\n" + "".join(f"name {n},{n}.5\n" for n in range(9)))
    write(base / "many.csv", "x,price\n" + "".join(f"{n % 7}.5,word {n % 30}\n" for n in range(119)))
    write(base / "table.xlsx", "")
    write(base / "damaged.parquet", b"PAR1")
    write_table(base / "differ/1.csv", frame)
    write_table(base / "differ/2.csv", frame.rename(columns={"new": "old"}))
    write_table(base / "types/1.parquet", frame)
    write_table(base / "types/2.parquet", frame.assign(new="yes"))
    write_table(base / "formats/1.csv", frame)
    write_table(base / "formats/2.parquet", frame)
    dates = write_table(base / "dates.parquet", pd.DataFrame({"x": range(9), "price": frame["sold"][:9]}))

    def of(path: Path | str, *words: str, **changes: Any) -> Callable[[], Any]:
        return functools.partial(make, base / path, *words, **changes)

    make(base / "types", drop=["new"])
    make(base / "differ", drop=["new"])
    left = {"drop": ["bytes", "empty"]}
    found = refused(
        [
            of("nowhere.parquet"),
            of("table.xlsx"),
            of("empty.csv"),
            of("no_rows.csv"),
            of("latin.csv"),
            of("few.csv"),
            of("twice.csv"),
            of("damaged.parquet"),
            of("unnamed.csv"),
            of("unnamed.csv", columns=["km/h"]),
            of("differ"),
            of("types"),
            of("formats"),
            of(good, "cost"),
            of(good, drop=["price"]),
            of(good, columns=["file", "garden"]),
            of(good, columns=["price"]),
            of(good, columns=["file"], drop=["file"]),
            of(good, columns=[]),
            of(good, drop=["garden"]),
            of(nested, **left),
            of(nested, columns=["bytes"]),
            of(nested, columns=["empty"]),
            of(nested, numeric=["size"], **left),
            of(good, numeric=["sold"]),
            of(good, numeric=["file"], categorical=["file"]),
            of(good, text=["price"]),
            of(good, delimiter=";"),
            of("mostly.csv", delimiter=", "),
            of("mostly.csv"),
            of("names.csv", most_values=5, rare="refuse"),
            of(good, categorical=["file"], most_values=6, rare="refuse"),
            of("names.csv", most_values=5),
            of("many.csv", most_values=25),
            of(dates),
            of(dates, kind="regression"),
            of(good, "town", kind="binary"),
            of(good, tokens=5),
            of(good, kind="multi_label"),
            of(good, embed="yes"),
            of(good, scale_target=1),
        ]
    )
    assert list(make(nested, drop=["size", "bytes", "empty"]).inputs) == list(frame.columns[:-1])
    return found


def test_files_and_options_that_do_not_fit_are_refused(isolated: Callable[..., Any], tmp_path: Path) -> None:
    holds(
        isolated(refusals, tmp_path),
        [
            ["nowhere.parquet: there is no such file or folder"],
            ["table.xlsx does not end in .csv, .tsv, .parquet"],
            ["empty.csv cannot be read: the file is empty"],
            ["dataset.data_dir: the files have no rows"],
            ["latin.csv cannot be read", "invalid UTF8"],
            ["few.csv, row 2: it has 1 field(s), expected 2"],
            ["twice.csv: two columns have the name 'a'"],
            ["damaged.parquet cannot be read"],
            [
                "no column is left besides the target",
                "not used: '' (an index has such a name); km/h (rename it: it has a /)",
            ],
            ["a column has a / in its name, km/h", "dataset.drop=['km/h']"],
            [f"{tmp_path}/differ/2.csv and {tmp_path}/differ/1.csv have different columns: new is in one"],
            [f"{tmp_path}/types/2.parquet and {tmp_path}/types/1.parquet have different columns", "new"],
            ["formats/2.parquet and", "formats/1.csv have different formats"],
            ["dataset.target=cost: there is no such column; the columns are Size (m²), new, town"],
            ["dataset.target=price: dataset.drop leaves it out"],
            ["dataset.columns=garden: there is no such column"],
            ["dataset.columns: price is the target"],
            ["dataset.columns: no column is left"],
            ["dataset.columns=[]: expected at least one column, or null for all"],
            ["dataset.drop=garden: there is no such column"],
            ["the column size has the type struct<a: int64>", "dataset.drop=[size]"],
            ["the column bytes has the type binary"],
            ["the column empty has no values", "leave it out"],
            ["dataset.numeric: the column size has the type struct"],
            ["dataset.numeric: the column sold has the type timestamp"],
            ["dataset.categorical: file is in dataset.numeric, too"],
            ["dataset.text=price: is not an input column"],
            ["dataset.delimiter=;", "is no CSV file"],
            ["dataset.delimiter=, : expected a single character"],
            ["the column x has 'one'", "mostly.csv, row 31", "30 of its 31 values", "dataset.missing", "dataset.drop"],
            ["the column x has 9 different words", "dataset.most_values=5", "dataset.text"],
            ["the column file has 7 different words", "dataset.most_values=6", "dataset.rare=other"],
            ["no column besides price is of use: x (a word of its own in nearly every row)"],
            ["has 30 classes, more than dataset.most_values=25; the rarest", "word 29 (3), word 0 (4), word 1 (4)"],
            ["dataset.target=price: has the type timestamp"],
            ["dataset.target=price: no row of the training split has a number"],
            ["dataset.target=town: has 3 different value(s), expected 2 classes"],
            ["dataset.tokens=5: is for dataset.embed=true"],
            ["dataset.kind=multi_label: expected one of"],
            ["dataset.embed=yes: expected true or false"],
            ["dataset.scale_target=1: expected true or false"],
        ],
    )


# ---------------------------------------------------------------------------------------------
# Training and serving
# ---------------------------------------------------------------------------------------------


def train(base: Path, plan: Plan) -> Any:
    """The losses of three updates, and what MLflow's model gives."""
    import keras
    import mlflow

    from scaleflow.tracking.mlflow_model import write_mlflow_model
    from scaleflow.worker.build import build_training
    from tests.training.fake_engine import ignore, take

    frame = table()
    write_table(base / "table.csv", frame)
    built = build_training(plan, ignore)
    losses = take(built.engine, built.feeds.train, 3).losses
    built.export(base / "exported")
    (base / "logged").mkdir()
    write_mlflow_model(base / "exported", base / "logged", run_id="0" * 32, model_id="m-" + "0" * 32)
    model = mlflow.pyfunc.load_model(str(base / "logged"))
    given = frame.drop(columns="price")
    other = given[given.columns[::-1]].assign(unused=1)
    forms = {
        "frame": given,
        "other order": other,
        "texts": other.assign(sold=other["sold"].astype(str).replace("NaT", ""), file=other["file"].astype(float)),
        "other index": given.set_index(given.index + 100),
        "example": None,
    }
    inputs = {name: model.input_example if each is None else each for name, each in forms.items()}
    found = {name: model.predict(each).to_numpy() for name, each in inputs.items()}
    found["from row 1"] = model.predict(given[1:]).to_numpy()  # the first row has a missing value
    try:
        model.predict(given.drop(columns="town"))
    except mlflow.MlflowException as error:
        found["missing"] = str(error)
    loaded = keras.models.load_model(base / "exported" / "model.keras")
    layers = {each.name for each in loaded.layers[-1].operations}
    return losses, found, loaded.count_params(), layers


@pytest.mark.slow  # predict/test_command.py gives frames to the logged model of a table
def test_a_table_trains_and_the_model_takes_a_frame(
    isolated: Callable[..., Any], plan: Callable[..., Plan], tmp_path: Path
) -> None:
    words = ("dataset=table", "dataset.target=price", "model=mlp", "hardware=cpu", "training.batch_size=8")
    made = plan(*words, f"dataset.data_dir={tmp_path}/table.csv")
    losses, found, parameters, layers = isolated(train, tmp_path, made)
    assert len(losses) == 3
    assert max(losses) < 1e8  # in the unit of the target, squared: it begins at its mean of about 200,000
    frame = found["frame"]
    assert frame.shape == (60, 1)
    assert (abs(np.asarray(frame) - 204500) < 60000).all()
    for name in ("other order", "texts", "other index"):
        np.testing.assert_allclose(found[name], frame, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(found["from row 1"], frame[1:], rtol=1e-5)
    assert len(found["example"]) == 2
    assert "missing inputs ['town']" in found["missing"]
    assert parameters > 0
    assert any(name.startswith(("rescaling", "multiply")) for name in layers)


def scale() -> Any:
    import keras
    import tensorflow as tf

    from scaleflow.interfaces import Inputs, Outputs
    from scaleflow.model import make_model
    from scaleflow.objective import make_objective

    outputs = Outputs("regression", (1,), scaling=(100.0, 10.0))

    def factory(inputs: Any, outputs: Any) -> Any:
        raw = keras.Input(inputs.shape)
        return keras.Model(raw, keras.layers.Dense(1, kernel_initializer="ones", name="dense")(raw))

    class Subclass(keras.Model):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

    x = tf.constant([[0.0], [2.0]])
    models = [make_model(each, Inputs((1,)), outputs) for each in (factory, lambda *_: Subclass())]
    scaled = [np.ravel(model(x)).tolist() for model in models]
    batch = tf.constant([[110.0], [100.0]]), tf.constant([[100.0], [120.0]])
    goal = make_objective(outputs)
    return scaled, [layer.name for layer in models[0].layers], np.asarray(goal.loss(*batch)).tolist()


def test_a_scaled_target_is_learned_standardised_and_returned_in_its_unit(isolated: Callable[..., Any]) -> None:
    scaled, layers, minimised = isolated(scale)
    assert scaled == [[100.0, 120.0]] * 2
    assert "dense" in layers
    assert minimised == [1.0, 4.0]


SKIP = "dataset.on_bad_example=skip"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dropped", "words"),
    [
        ("new", ("dataset.embed=true", "model=dlrm")),
        ("new,file,text", ("model=linear", "training.engine=fit", "dataset.target=town", "dataset.cache=none", SKIP)),
        ("new,file", ("strategy=mirrored", "hardware.logical_devices=2", "precision=mixed")),
        ("new,file,sold", ("strategy=pipeline", "strategy.stages=2", "hardware.logical_devices=2")),
        ("new,file", ("strategy=multi_worker", "dataset.cache=none", "dataset.learn_on=20")),
        ("new,file,sold", ("strategy=parameter_server", "cluster.workers=1", "dataset.cache=none")),
    ],
    ids=["embeddings", "fit", "mirrored", "pipeline", "multi_worker", "parameter_server"],
)
def test_a_table_trains_everywhere(command: Any, dropped: str, words: tuple[str, ...]) -> None:
    write_table(command.folder / "table.parquet", table())
    common = ("dataset=table", "dataset.data_dir=table.parquet", "dataset.target=price", f"dataset.drop=[{dropped}]")
    short = ("training.max_steps=3", "training.batch_size=8", "checkpoint=none", "tracking=none")
    units = () if "model=linear" in words else ("model.units=[8,8]",)
    ended = command(*common, *short, *units, "hardware=cpu", *words)
    assert ended.returncode == 0, ended.stderr
    assert "dataset=table: numbers " in ended.stdout + ended.stderr


#: A streamed table of which 20 of 120 rows are learned from; 11 steps are an epoch.
STREAMED = (
    *("dataset=table", "dataset.data_dir=bad.parquet", "dataset.target=price", "dataset.cache=none"),
    *("dataset.learn_on=20", "dataset.shuffle=18", "training.batch_size=8", "model=mlp", "model.units=[8]"),
    *("hardware=cpu", "hardware.deterministic=true", "tracking=none"),
)
SKIPPING = (SKIP, "training.max_steps=15", "training.steps_per_loop=2")


def stream(folder: str, plan: Plan) -> Any:
    """A streamed run, its two parts if it is stopped, and what is said of a bad row in the middle of a run."""
    import os

    import pyarrow
    from pyarrow import parquet

    import scaleflow

    os.chdir(folder)
    frame = table(120)[["Size (m²)", "town", "price"]]
    frame.loc[66, "Size (m²)"] = np.inf
    parquet.write_table(pyarrow.Table.from_pandas(frame), "bad.parquet", row_group_size=14)
    whole = course(plan, "whole")
    parts = course(plan, "parts", stop_after=7), course(plan, "parts", goes_on=True)
    try:
        scaleflow.run(*STREAMED, "training.max_steps=11", folder="bad")
    except scaleflow.ConfigError as refusal:  # the rows for the baselines have it
        error = str(refusal)
    return whole, parts, error


@pytest.mark.slow
def test_a_streamed_table_resumes_exactly_and_names_a_bad_row(
    isolated: Callable[..., Any], plan: Callable[..., Plan], tmp_path: Path
) -> None:
    whole, (part, last), error = isolated(stream, str(tmp_path), plan(*STREAMED, *SKIPPING))
    assert part.stopped
    assert 11 < part.points[-1][0] < 15  # in the second epoch
    assert part.points + last.points == whole.points
    assert {name for _, values in whole.points for name in values} >= {"train/loss", "val/loss", "test/loss"}
    for name, value in whole.state.items():
        np.testing.assert_array_equal(last.state[name], value, name)
    assert "dataset: bad.parquet, row 67 of 'train' cannot be read: Size (m²) is inf, expected a finite number" in error


def test_a_class_that_is_a_word_of_missing_is_said(isolated: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "x,y\n" + "".join(f"{n}.5,{('None', 'brick', 'stone')[n % 3]}\n" for n in range(60)))
    _, notes = isolated(prepared, functools.partial(make, tmp_path / "a.csv", "y"))
    hint = ": dataset.missing has None (20 rows); if it is a class, leave it out there"
    assert len([note for note in notes if note.endswith(hint)]) == 2  # of both splits
    counts, _ = isolated(prepared, functools.partial(make, tmp_path / "a.csv", "y", missing=[""]))
    assert counts == {"train": 48, "test": 12}
    write(tmp_path / "b.csv", "x,y\n" + "".join(f"{n} kg,{('None', 'brick')[n % 2]}\n" for n in range(60)))
    (message,) = isolated(refused, [functools.partial(make, tmp_path / "b.csv", "y")])
    assert "expected at least 2 classes: dataset.missing has None (30 rows)" in message


def read_long(folder: Path) -> list[str]:
    """Reads JSON lines in small blocks, whose later lines have other types and keys; gives a refusal."""
    import json

    from scaleflow.dataset.tables import files
    from scaleflow.features.predict.inputs import open_table

    files.TEXT_BLOCK = 2000
    rows = [{"wide": n, "none": None, "day": "2024-01-31", "y": n / 2} for n in range(100)]
    rows += [{"wide": n + 0.5, "none": 1.5, "day": "", "late": n, "y": n / 2} for n in range(100)]
    path = write(folder / "a.jsonl", "\n".join(map(json.dumps, rows)))
    source = make(path, "y", test=0.0)
    inputs = arrays(source).inputs
    assert {name: each.dtype for name, each in source.inputs.items()} == {
        "wide": "float64",
        "none": "float64",
        "late": "float64",
        "day": "string",
    }
    for name in ("wide", "none", "late"):
        np.testing.assert_array_equal(inputs[name], np.array([row.get(name) for row in rows], float))
    assert inputs["day"].tolist() == ["2024-01-31T00:00:00"] * 100 + [""] * 100
    table = open_table(str(path))
    assert set(table.schema.names) == {"wide", "none", "day", "late", "y"}
    found = [value for part in table.read(["late"], 50) for value in part.table["late"].to_pylist()]
    assert found == [row.get("late") for row in rows]
    mixed = write(folder / "b.jsonl", "\n".join(json.dumps({"x": n if n < 900 else "a", "y": n}) for n in range(1000)))
    return refused([functools.partial(make, mixed, "y")])


def test_json_lines_change_their_types_and_keys_late(isolated: Callable[..., Any], tmp_path: Path) -> None:
    (message,) = isolated(read_long, tmp_path)
    assert "Column(/x) changed from number to string" in message
