"""`python -m scaleflow predict`: real runs, and predictions that are those of MLflow's and Keras's model."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import csv, parquet

from tests.conftest import Command, make_once
from tests.launcher.test_supervisor import wait_for
from tests.processes import CommandProcess, call

SIZES = ("big", "mid", "small")

TABLE = ("dataset=table", "dataset.data_dir=houses.parquet")


def make_houses(rows: int, seed: int = 0) -> pyarrow.Table:
    random = np.random.default_rng(seed)
    area = random.uniform(20, 200, rows).round(1)
    return pyarrow.table(
        {
            "id": [f"{n:06d}" for n in range(rows)],
            "area": [None if n % 10 == 3 else float(value) for n, value in enumerate(area)],
            "town": [None if n % 15 == 4 else ("Aa", "Bb", "Cc")[n % 3] for n in range(rows)],
            "sold": pyarrow.array(random.integers(10_000, 19_000, rows), pyarrow.int32()).cast(pyarrow.date32()),
            "size": [SIZES[int(value < 120) + int(value < 60)] for value in area],
            "price": area * 1000,
        }
    )


class Trained:
    """A folder with a store, three runs (of the sizes, the prices, digits) and a table of new rows.

    The model of the prices is described as those that were logged before a run recorded what it learned.
    """

    def __init__(self, folder: Path, runs: Sequence[str]) -> None:
        self.command = Command(folder)
        self.folder = folder
        self.new = make_houses(75, 1)
        self.sizes, self.prices, self.digits = runs

    def predict(self, run: str, table: str, output: str, *words: str, code: int = 0) -> str:
        """Runs the command; returns what it prints: its standard error if it fails."""
        ended = self.command.python("-m", "scaleflow", "predict", run, "--input", table, "--output", output, *words)
        assert ended.returncode == code, ended.stderr
        path = self.folder / output
        names = ".*.part" if code == 0 and path.is_dir() else f".{path.name}*.part"  # others may write next to it
        assert not list((path if code == 0 and path.is_dir() else path.parent).glob(names))
        return ended.stderr if code else ended.stdout

    def read(self, output: str) -> dict[str, list[Any]]:
        path = self.folder / output
        table = csv.read_csv(path) if path.suffix == ".csv" else parquet.read_table(path)
        return dict(table.to_pydict())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(*make_once(tmp_path_factory, "predict", train_three))


#: How the CSV file is written, unlike other CSV files: without a header line, and with dates in a time zone.
CSV_FORM = (
    "dataset.header=[area,town,sold,size]",
    'dataset.delimiter=";"',
    "dataset.encoding=latin-1",
    'dataset.missing=["-"]',
)


def write_lines(houses: pyarrow.Table) -> bytes:
    rows = houses.select(["area", "town", "sold", "size"]).to_pylist()
    lines = (f"{row['area'] or '-'};{row['town'] or '-'};{row['sold']} 12:30+01:00;{row['size']}\n" for row in rows)
    return "".join(lines).replace("Aa", "Ää").encode("latin-1")


def train_three(folder: Path) -> list[str]:
    """Writes the tables and trains; returns the runs' ids."""
    parquet.write_table(make_houses(120), folder / "houses.parquet")
    parquet.write_table(make_houses(75, 1), folder / "new.parquet")
    csv.write_csv(make_houses(75, 1), folder / "new.csv")
    runs: list[tuple[str, str]] = call(
        train_each,
        folder,
        [
            (*TABLE, "dataset.target=size", "dataset.drop=[id,price]"),
            (*TABLE, "dataset.target=price", "dataset.drop=[id,size]", "model=mlp"),
            ("dataset=digits",),
        ],
    )
    return [run for run, _ in runs]


def train_each(folder: Path, commands: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """In a child: the ids of the runs, and the ends of the addresses of their models."""
    import scaleflow

    os.chdir(folder)
    small = ("model.units=[8]", "training.max_steps=3", "checkpoint=none", "evaluation=none")
    rest = ("tracking.system_metrics=false", "hardware=cpu", "debug=inline")
    found = [scaleflow.run(*words, *small, *rest) for words in commands]
    return [(str(run.run_id), str(run.model_uri).replace("models:/", "models/")) for run in found]


def compute_elsewhere(folder: Path, run: str, table: Any) -> tuple[Any, Any]:
    """What MLflow's model gives for a DataFrame or an array, and what Keras's gives for MLflow's conversion of it."""
    import keras
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    (output,) = mlflow.get_run(run).outputs.model_outputs
    frame = table if isinstance(table, np.ndarray) else table.to_pandas()
    by_pyfunc = mlflow.pyfunc.load_model(f"models:/{output.model_id}").predict(frame, params={"output": "logits"})
    (file,) = folder.glob(f"mlartifacts/*/models/{output.model_id}/artifacts/data/model.keras")
    model = keras.models.load_model(file)
    if isinstance(table, np.ndarray):
        return by_pyfunc, np.asarray(model(table))
    given = {
        "area": [np.nan if x is None else x for x in table["area"].to_pylist()],
        "town": [x or "" for x in table["town"].to_pylist()],
        "sold": [str(x) for x in table["sold"].to_pylist()],
    }
    return by_pyfunc, np.asarray(model({name: keras.ops.convert_to_tensor(each) for name, each in given.items()}))


def test_classes_and_probabilities_are_those_of_the_logged_model(
    trained: Trained, isolated: Callable[..., Any]
) -> None:
    trained.predict(trained.sizes, "new.parquet", "whole.parquet", "--keep", "id,sold")
    found = trained.read("whole.parquet")
    assert list(found) == ["id", "sold", "prediction", "probability", *(f"probability_{name}" for name in SIZES)]
    assert (found["id"], found["sold"]) == (trained.new["id"].to_pylist(), trained.new["sold"].to_pylist())
    for logits in isolated(compute_elsewhere, trained.folder, trained.sizes, trained.new):
        chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        assert found["prediction"] == [SIZES[best] for best in chances.argmax(axis=1)]
        np.testing.assert_allclose(found["probability"], chances.max(axis=1), atol=1e-5)
        np.testing.assert_allclose(np.stack([found[f"probability_{name}"] for name in SIZES], 1), chances, atol=1e-5)

    trained.predict(trained.sizes, "new.csv", "whole.csv", "--keep", "all", "--batch-size", "7")
    trained.predict(
        trained.sizes, "new.parquet", "shards/", "--shard-rows", "20", "--batch-size", "4",
        *("hardware=cpu", "hardware.logical_devices=2", "strategy=mirrored"),
    )  # fmt: skip
    shards = sorted(path.name for path in (trained.folder / "shards").glob("part-*"))
    assert shards == [f"part-0000{n}.parquet" for n in range(4)]
    for output in ("whole.csv", "shards"):
        other = trained.read(output)
        assert other["prediction"] == found["prediction"], output
        np.testing.assert_allclose(other["probability_mid"], found["probability_mid"], atol=1e-5, err_msg=output)
    assert list(trained.read("whole.csv"))[:6] == trained.new.column_names


def explain_elsewhere(folder: Path, run: str) -> Any:
    """What the served model says of the rows: the contributions of their columns."""
    import mlflow
    import pandas as pd

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    (output,) = mlflow.get_run(run).outputs.model_outputs
    model = mlflow.pyfunc.load_model(f"models:/{output.model_id}")
    return model.predict(pd.read_parquet(folder / "new.parquet"), params={"output": "explain"}).to_dict("list")


def read_elsewhere(folder: Path, run: str, layer: str) -> Any:
    """What the served model says a layer returns, and what the rest of the network makes of it."""
    import keras
    import mlflow
    import pandas as pd

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    (output,) = mlflow.get_run(run).outputs.model_outputs
    (file,) = folder.glob(f"mlartifacts/*/models/{output.model_id}/artifacts/data/model.keras")
    *_, last, scale = keras.models.load_model(file).get_layer("mlp").layers
    served = mlflow.pyfunc.load_model(f"models:/{output.model_id}")
    values = served.predict(pd.read_parquet(folder / "new.parquet"), params={"output": f"layer:{layer}"})
    with pytest.raises(
        mlflow.exceptions.MlflowException, match="layer:dens: there is no such layer; the model has mlp/dense"
    ):
        served.predict(pd.read_parquet(folder / "new.parquet"), params={"output": "layer:dens"})
    return values, np.asarray(scale(last(values)))[:, 0]


@pytest.mark.slow
def test_a_layer_of_the_model_is_written(trained: Trained, isolated: Callable[..., Any]) -> None:
    trained.predict(trained.prices, "new.parquet", "layer.parquet", "--layer", "dense", "--keep", "id")
    found = trained.read("layer.parquet")
    assert list(found) == ["id", "prediction", *(f"dense_{n}" for n in range(8))]
    values, prediction = isolated(read_elsewhere, trained.folder, trained.prices, "mlp/dense")
    np.testing.assert_allclose(np.stack([found[f"dense_{n}"] for n in range(8)], axis=1), values, atol=1e-6)
    np.testing.assert_allclose(found["prediction"], prediction, rtol=1e-5)

    trained.predict(trained.sizes, "new.parquet", "deep.parquet", "--layer", "hidden1_piecewise", "--explain")
    deep = trained.read("deep.parquet")
    assert np.ndim(deep["hidden1_piecewise"]) == 3  # of each member
    assert "reason_area" in deep
    refused = trained.predict(trained.sizes, "new.parquet", "none.csv", "--layer", "hidden1_piecewise", code=2)
    assert "the column hidden1_piecewise has lists, which a CSV file cannot hold" in refused
    refused = trained.predict(trained.sizes, "new.parquet", "none.parquet", "--layer", "", code=2)
    assert "--layer : there is no such layer; the model has tabular" in refused
    refused = trained.predict(trained.sizes, "new.parquet", "none.parquet", "--layer", "hidden9", code=2)
    assert "--layer hidden9: there is no such layer; the model has tabular/hidden" in refused


def test_reasons_of_predictions_sum_to_them_on_every_door(trained: Trained, isolated: Callable[..., Any]) -> None:
    text = trained.predict(trained.sizes, "new.parquet", "reasons.parquet", "--explain")
    found = trained.read("reasons.parquet")
    names = ["prediction_typical", "reason_area", "reason_sold", "reason_town"]
    assert list(found)[-4:] == names
    np.testing.assert_allclose(np.sum([found[name] for name in names], axis=0), found["probability"], atol=1e-5)
    assert np.ptp(found["reason_area"]) > np.ptp(found["reason_town"])  # the size follows from the area
    assert "note: --explain: 14 predictions for each row; prediction_typical is that for a" in text
    served = isolated(explain_elsewhere, trained.folder, trained.sizes)
    for name in names:
        np.testing.assert_allclose(served[name], found[name], atol=1e-5, err_msg=name)
    refused = trained.predict(trained.digits, "new.parquet", "none.parquet", "--explain", "--columns", "area", code=2)
    assert refused.count("--explain") + refused.count("--input") == 1


def load_and_predict(folder: Path, run: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What MLflow's model gives for the same rows in each form of a DataFrame, and how it refuses wrong values."""
    from decimal import Decimal

    import mlflow
    import pandas as pd
    import tensorflow as tf

    from scaleflow.serving import loader

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    (output,) = mlflow.get_run(run).outputs.model_outputs
    model = mlflow.pyfunc.load_model(f"models:/{output.model_id}")
    frame = pd.read_parquet(folder / "new.parquet")
    area = frame["area"]
    forms = {
        "numpy": frame,
        "nullable": frame.convert_dtypes(),
        "pyarrow": pd.read_parquet(folder / "new.parquet", dtype_backend="pyarrow"),
        "Decimal": frame.assign(area=[None if pd.isna(x) else Decimal(str(x)) for x in area]),
        "text": frame.assign(area=["NA" if pd.isna(x) else f" {x}" for x in area], sold=frame["sold"].astype(str)),
        "as in files": frame.assign(
            town=["NA" if pd.isna(x) else f" {x} " for x in frame["town"]],
            sold=[f"{x} 01:00+01:00" for x in frame["sold"]],
        ),
        "zone": frame.assign(sold=pd.to_datetime(frame["sold"]).dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo")),
    }
    wrong = {
        "number": lambda: model.predict(frame.assign(area=[*area[:-1], "12 m"])),
        "date": lambda: model.predict(frame.assign(sold=[*frame["sold"].astype(str)[:-1], "31.12.2024"])),
        "day": lambda: model.predict(frame.assign(sold=[*frame["sold"].astype(str)[:-1], "2024-02-30"])),
        "whole": lambda: loader.to_tensor(tf.TensorSpec([None], tf.int32), [1.0, 2.5], "rooms"),
        "range": lambda: loader.to_tensor(tf.TensorSpec([None, 2], tf.uint8), np.array([[1, 2], [3, 256]]), ""),
        "absent": lambda: loader.to_tensor(tf.TensorSpec([None], tf.int64), pd.array([1, None], "Int64"), "rooms"),
        "size": lambda: loader.to_tensor(tf.TensorSpec([None, 2]), [[1, 2], [3]], "point"),
    }
    refused = {}
    for name, predict in wrong.items():
        with pytest.raises(mlflow.MlflowException) as error:
            predict()
        refused[name] = str(error.value)
    return {name: model.predict(each, params={"output": "logits"}) for name, each in forms.items()}, refused


def test_the_logged_model_takes_the_types_of_a_data_frame_and_names_a_wrong_value(
    trained: Trained, isolated: Callable[..., Any]
) -> None:
    found, refused = isolated(load_and_predict, trained.folder, trained.sizes)
    for form, logits in found.items():
        np.testing.assert_allclose(logits, found["numpy"], rtol=1e-5, err_msg=form)
    assert refused == {
        "number": "row 74: area is '12 m', expected a finite number",
        "date": "row 74: sold is '31.12.2024', expected a date",
        "day": "row 74: sold is '2024-02-30', expected a date",
        "whole": "row 1: rooms is '2.5', expected a whole number (int32)",
        "range": "row 1: value 1 is '256', expected a whole number (uint8)",
        "absent": "row 1: rooms is missing, expected a whole number (int64)",
        "size": "row 1: point has 1 values, expected 2",
    }


def test_numbers_are_in_the_unit_of_the_target(trained: Trained, isolated: Callable[..., Any]) -> None:
    trained.predict(trained.prices, "new.csv", "prices.parquet")
    found = trained.read("prices.parquet")
    assert list(found) == ["prediction"]
    assert 20_000 < np.mean(found["prediction"]) < 200_000
    for values in isolated(compute_elsewhere, trained.folder, trained.prices, trained.new):
        np.testing.assert_allclose(found["prediction"], values[:, 0], rtol=1e-5)


@pytest.mark.slow
def test_a_model_of_arrays_takes_columns_in_order_or_lists(trained: Trained, isolated: Callable[..., Any]) -> None:
    pixels = np.random.default_rng(0).uniform(0, 16, (9, 64)).round().astype(np.float32)
    names = [f"p{n}" for n in range(64)]
    columns = {name: pixels[:, n] for n, name in enumerate(names)}
    parquet.write_table(pyarrow.table({"id": range(9), **columns}), trained.folder / "pixels.parquet")
    parquet.write_table(pyarrow.table({"pixels": pixels.tolist()}), trained.folder / "lists.parquet")
    trained.predict(trained.digits, "pixels.parquet", "by_column.parquet", "--columns", ",".join(names))
    trained.predict(trained.digits, "lists.parquet", "by_list.parquet")
    found = trained.read("by_column.parquet")
    assert trained.read("by_list.parquet") == found
    by_pyfunc, by_keras = isolated(compute_elsewhere, trained.folder, trained.digits, pixels.reshape(9, 8, 8, 1))
    np.testing.assert_allclose(by_pyfunc, by_keras, atol=1e-5)
    assert found["prediction"] == by_pyfunc.argmax(axis=1).tolist()  # its classes have no names
    parquet.write_table(pyarrow.table({"pixels": [[1.0] * 64, [1.0] * 63]}), trained.folder / "short.parquet")
    message = trained.predict(trained.digits, "short.parquet", "short_out.parquet", code=1)
    assert "short.parquet, row 2: pixels has 63 values, expected 64" in message

    blank = {name: [None, 0.0] if name == "p3" else [1.0, 0.0] for name in names}
    parquet.write_table(pyarrow.table(blank), trained.folder / "blank.parquet")
    message = trained.predict(trained.digits, "blank.parquet", "blank_out.parquet", code=1)
    assert "blank.parquet, row 1: p3 is missing, expected a finite number" in message
    trained.predict(trained.digits, "blank.parquet", "blank_out.parquet", "--on-bad", "empty")
    filled = trained.read("blank_out.parquet")
    assert [filled["prediction"][0], filled["probability_3"][0]] == [None, None]
    assert None not in (filled["prediction"][1], filled["probability_3"][1])


@pytest.mark.slow
def test_a_command_that_was_stopped_goes_on_after_its_finished_shards(trained: Trained) -> None:
    rows, size = 20_000, 200
    parquet.write_table(make_houses(rows, 2), trained.folder / "many.parquet", row_group_size=4700)
    output = trained.folder / "stopped"
    same = (trained.sizes, "--input", "many.parquet", "--output", "stopped/", "--shard-rows", str(size))
    finished: dict[Path, int] = {}

    def stop(number: int, *more: str) -> tuple[int | None, str]:
        """Stops a command after two shards; returns its exit code and standard error."""
        words = ("scaleflow", "predict", *same, "--keep", "id", "--batch-size", "1", *more)  # it takes seconds
        with CommandProcess(words, trained.folder, trained.command.environment) as process:
            second = output / f"part-{len(finished) + 1:05d}.parquet"
            wait_for(lambda: second.exists() or process.poll() is not None)
            process.send_signal(number)
            _, err = process.communicate(timeout=240)
        assert {path: path.stat().st_mtime_ns for path in finished} == finished
        found = {path: path.stat().st_mtime_ns for path in sorted(output.glob("part-*.parquet"))}
        assert len(finished) + 2 <= len(found) < rows / size
        assert {parquet.read_metadata(path).num_rows for path in found} == {size}
        finished.update(found)
        return process.returncode, err

    assert stop(signal.SIGKILL)[0] == -9
    code, err = stop(signal.SIGINT, "--resume")
    assert code == 130
    assert f"stopped by SIGINT; {len(finished)} shard(s) are whole, --resume continues" in err

    message = trained.predict(trained.sizes, "many.parquet", "stopped/", code=2)
    assert "--resume continues them, --overwrite replaces them" in message
    other = (trained.sizes, "many.parquet", "stopped/", "--shard-rows", str(size), "--resume")
    assert "were made with another output columns; type the same command" in trained.predict(*other, code=2)

    again = ("--keep", "id", "--resume", "--shard-rows", str(size))  # in larger batches
    trained.predict(trained.sizes, "many.parquet", "stopped/", *again)
    trained.predict(trained.sizes, "many.parquet", "stopped/", *again)  # there is nothing left
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert len(list(output.glob("part-*.parquet"))) == rows / size
    found = trained.read("stopped")
    assert found["id"] == [f"{n:06d}" for n in range(rows)]
    trained.predict(trained.sizes, "many.parquet", "many_out.parquet", "--overwrite")
    np.testing.assert_allclose(found["probability"], trained.read("many_out.parquet")["probability"], atol=1e-5)


def test_a_value_that_is_no_number_is_named_by_its_row(trained: Trained) -> None:
    csv.write_csv(trained.new.set_column(1, "area", [["12"] * 40 + ["wide"] + ["NA"] * 34]), trained.folder / "bad.csv")
    message = trained.predict(trained.sizes, "bad.csv", "bad_out.csv", code=1)
    assert message == "scaleflow: bad.csv, row 41: area is wide, expected a finite number\n"
    csv.write_csv(trained.new.set_column(3, "sold", [["soon"] * 75]), trained.folder / "bad.csv")
    message = trained.predict(trained.sizes, "bad.csv", "bad_out.csv", code=1)
    assert message == "scaleflow: bad.csv, row 1: sold is soon, expected a date\n"
    assert not (trained.folder / "bad_out.csv").exists()


@pytest.mark.slow  # dataset/test_earlier.py reads files as a run did
def test_the_file_of_the_training_is_read_as_in_training(trained: Trained, isolated: Callable[..., Any]) -> None:
    (trained.folder / "lines.csv").write_bytes(write_lines(make_houses(120)))
    words = ("dataset=table", "dataset.data_dir=lines.csv", "dataset.target=size", "model=mlp", *CSV_FORM)
    ((run, _),) = isolated(train_each, trained.folder, [words])
    trained.predict(run, "lines.csv", "lines.parquet")
    found = trained.read("lines.parquet")
    houses = make_houses(120)
    sold = [f"{day}T11:30:00" for day in houses["sold"].to_pylist()]
    town = pyarrow.array([None if town is None else town.replace("Aa", "Ää") for town in houses["town"].to_pylist()])
    plain = pyarrow.table({"area": houses["area"], "town": town, "sold": sold})
    for logits in isolated(compute_elsewhere, trained.folder, run, plain):
        chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(np.stack([found[f"probability_{name}"] for name in SIZES], 1), chances, atol=1e-5)
    (trained.folder / "comma.csv").write_bytes(b"town,area,sold\nBb,-,2024-01-31\n")  # a header line, in another order
    summary = trained.predict(run, "comma.csv", "comma.parquet", "--delimiter", ",")
    assert "imputed  area: 1 missing\n" in summary


def test_bad_rows_are_left_out_or_empty_and_all_that_is_new_is_counted(trained: Trained) -> None:
    rows = trained.new.select(["id", "area", "town", "sold"]).to_pylist()
    lines = [f"{row['id']},{row['area'] or ''},{row['town'] or ''},{row['sold']}" for row in rows]
    lines[3], lines[17], lines[18] = "x,wide,Aa,2024-01-31", "y,1,Aa,2024-02-30", "z,1"
    lines[5], lines[60], lines[61] = "5,12,Paris,", "60,12,Paris,2024-01-31T10:00Z", "61,12,aa,2024-01-31 10:00"
    lines[70:75] = 5 * ["b,?!,Aa,2024-01-31"]
    (trained.folder / "mixed.csv").write_text("\n".join(["id,area,town,sold", *lines]))
    bad = {3, 17, 18, *range(70, 75)}
    counts = [
        "bad rows  8 {}",
        "          area: 6, first mixed.csv, row 4: area is wide, expected a finite number",
        "          fields: 1, first mixed.csv, row 19: it has 2 field(s), expected 4",
        "          sold: 1, first mixed.csv, row 18: sold is 2024-02-30, expected a date",
        'unknown   town: 3 of categories that training did not have: "Paris" (2), "aa"',
        "imputed   area: 6 missing",
        "          sold: 1 missing, which training never had",
    ]

    def count(summary: str) -> list[str]:
        return [
            line for line in summary.splitlines() if line[:10] in ("bad rows  ", "unknown   ", "imputed   ", 10 * " ")
        ]

    message = trained.predict(trained.sizes, "mixed.csv", "mixed.parquet", code=1)
    assert message == "scaleflow: mixed.csv, row 4: area is wide, expected a finite number\n"
    summary = trained.predict(trained.sizes, "mixed.csv", "mixed.parquet", "--on-bad", "empty", "--keep", "id")
    assert count(summary) == [line.format("with empty predictions") for line in counts]
    empty = trained.read("mixed.parquet")
    assert [n for n, best in enumerate(empty["prediction"]) if best is None] == sorted(bad)
    assert [n for n, chance in enumerate(empty["probability_mid"]) if chance is None] == sorted(bad)
    assert empty["id"] == [None if n == 18 else line.partition(",")[0] for n, line in enumerate(lines)]

    same = (trained.sizes, "mixed.csv", "mixed/", "--shard-rows", "5", "--keep", "id")
    trained.predict(*same, code=1)  # with --on-bad raise
    assert not list((trained.folder / "mixed").glob("part-*"))
    summary = trained.predict(*same, "--on-bad", "skip", "--resume")
    assert count(summary) == [line.format("left out") for line in counts]
    good = [n for n in range(75) if n not in bad]
    assert trained.read("mixed") == {name: [values[n] for n in good] for name, values in empty.items()}
    shards = [trained.folder / "mixed" / f"part-{n:05d}.parquet" for n in range(15)]
    assert [parquet.read_metadata(path).num_rows for path in shards] == [4, 5, 5, 3, *10 * [5], 0]
    assert "were made with another on-bad" in trained.predict(*same, "--resume", code=2)
    whole = trained.read("mixed")
    for path in shards[12:]:
        path.unlink()
    summary = trained.predict(*same, "--on-bad", "skip", "--resume")
    assert trained.read("mixed") == whole
    assert "rows      15, after 57 that were there, " in summary
    assert "counted   in the rows of this command only" in summary
    assert "bad rows  5 left out" in summary


def test_a_table_without_rows_gives_columns_without_rows(trained: Trained) -> None:
    parquet.write_table(trained.new.slice(0, 0), trained.folder / "empty.parquet")
    trained.predict(trained.sizes, "empty.parquet", "of_empty.parquet", "--keep", "id")
    names = ["id", "prediction", "probability", *(f"probability_{name}" for name in SIZES)]
    assert trained.read("of_empty.parquet") == {name: [] for name in names}


class NoTensorFlow:
    """Fails whoever imports TensorFlow."""

    def find_spec(self, name: str, *arguments: Any) -> None:
        if name in ("keras", "tensorflow"):
            raise AssertionError(f"{name} is imported")


def predict_without_tensorflow(folder: Path, commands: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    """How each command ends, and its standard error. `EMPTY` is a run without a model."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("keras", "scaleflow", "tensorflow"):  # as if this process had not been forked
            del sys.modules[name]
    sys.meta_path.insert(0, NoTensorFlow())  # type: ignore[arg-type]
    os.chdir(folder)
    from mlflow import MlflowClient

    from scaleflow.features.predict.command import main

    client = MlflowClient("sqlite:///mlflow.db")
    empty = client.create_run("0", tags={"scaleflow.folder": "/gone"}, run_name="empty").info.run_id
    client.log_text(empty, "seed: 0", "config.yaml")
    found = []
    for words in commands:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            code = main([empty if word == "EMPTY" else word for word in words])
        found.append((code, err.getvalue()))
    return found


def test_invalid_config_is_refused_before_tensorflow_is_imported(
    trained: Trained, isolated: Callable[..., Any]
) -> None:
    (trained.folder / "there.csv").touch()
    (trained.folder / "full").mkdir()
    (trained.folder / "full" / "mine.txt").touch()
    parquet.write_table(trained.new.drop_columns(["town"]), trained.folder / "no_town.parquet")
    parquet.write_table(pyarrow.table({"photo": [b"x"]}), trained.folder / "photos.parquet")
    lists = trained.new.set_column(1, "area", [[[1.0]] * 75])
    parquet.write_table(lists, trained.folder / "lists_of_area.parquet")
    run, table = trained.sizes, "new.parquet"
    cases = [
        (("abc", table, "o.csv"), "abc: expected the id of a run"),
        (("0" * 32, table, "o.csv"), f"has no run {'0' * 32}"),
        (("EMPTY", table, "o.csv"), "the run empty has no model"),
        ((run, "gone.csv", "o.csv"), "--input gone.csv: there is no such file"),
        ((run, "no_town.parquet", "o.csv"), "there is no column town, which the model takes; the table has id, area"),
        ((run, "lists_of_area.parquet", "o.csv"), "area has the type list<element: double>, and the model takes one"),
        ((trained.digits, "photos.parquet", "o.csv"), "an array of shape (8, 8, 1), float32: 64 columns"),
        ((run, table, "gone/o.csv"), "there is no folder gone; create it first"),
        ((run, table, "o.xlsx"), "expected a file that ends in .parquet, .pq, .csv, or a folder"),
        ((run, table, "there.csv"), "the file exists; --overwrite replaces it"),
        ((run, table, "full/"), "the folder has files that are no predictions"),
        ((run, table, "o.csv", "--resume"), "--resume: works with a folder of shards; use --output o/"),
        ((run, table, "o/", "--resume", "--overwrite"), "use one of them"),
        ((run, table, "o.csv", "--shard-rows", "5"), "--shard-rows 5: is for a folder"),
        (
            (run, table, "o.csv", "--keep", "id,ide"),
            "--keep ide: there is no such column; did you mean id? The table has",
        ),
        ((run, "lists_of_area.parquet", "o.csv", "--keep", "area"), "and the model takes one value"),
        ((run, table, "o.csv", "--columns", "area"), "takes columns by name: "),
        ((run, table, "o.csv", "--delimiter", ";"), "--delimiter ;: new.parquet is no CSV file"),
        ((run, table, "o.csv", "model=cnn"), "model=cnn: this command takes one value each of hardware"),
        ((run, table, "o.csv", "hardware.xla=true"), "hardware.xla=true: this command takes"),
        ((run, table, "o.csv", "strategy=parameter_server"), "predictions are computed in one process"),
        ((run, table, "o.csv", "strategy=miror"), "did you mean mirrored?"),
        ((run, table, "o.csv", "tracking.uri=sqlite:///gone.db"), "there is no such store"),
    ]
    commands = [[run, "--input", table, "--output", output, *more] for (run, table, output, *more), _ in cases]
    found = isolated(predict_without_tensorflow, trained.folder, commands)
    for (words, expected), (code, message) in zip(cases, found, strict=True):
        assert code == 2, (words, message)
        assert expected in message, words
        assert message.startswith("scaleflow: "), words
        assert len(message.splitlines()) <= 2, words
    assert not (trained.folder / "o.csv").exists()
    assert not (trained.folder / "o").exists()
