"""`scaleflow.run(..., data=frame, model=network)`: objects of a program train as their files do, or are refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import scaleflow
from scaleflow.errors import ConfigError
from tests.conftest import Command

if TYPE_CHECKING:
    import pandas as pd

WORDS = ("dataset=table", "dataset.target=price", "tracking=none", "hardware=cpu")


def table(rows: int = 300) -> pd.DataFrame:
    import pandas as pd

    number = np.arange(rows)
    area = np.where(number % 11 == 0, np.nan, number % 37)
    town = np.array(["Ulm", "Bonn", None], object)[number % 3]
    sold = pd.Timestamp("2024-01-01") + pd.to_timedelta(number, unit="D")
    return pd.DataFrame({"area": area, "town": town, "sold": sold, "price": (number % 37) * 1000.5 + number % 3})


def refuse(*words: str, data: Any = None, model: Any = None) -> str:
    with pytest.raises(ConfigError) as refusal:
        scaleflow.run(*words, data=data, model=model)
    return str(refusal.value)


def test_a_table_that_has_no_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame = table(9)
    assert "run(data=list): expected a pandas DataFrame or a pyarrow Table" in refuse(*WORDS, data=[1])
    assert "there is also dataset.data_dir=x" in refuse(*WORDS, "dataset.data_dir=x", data=frame)
    assert "add dataset=table" in refuse("dataset=digits", data=frame)
    assert "leave out data" in refuse("resume=x", data=frame)
    assert "the column 5 needs a name" in refuse(*WORDS, data=frame.rename(columns={"area": 5}))
    assert "values of several types" in refuse(*WORDS, data=frame.assign(x=["a", 1, 2] * 3))
    assert "a tuple of 1; give (x, y), or (x, y, weights)" in refuse(data=(np.ones(3),))
    pair = np.ones((3, 2)), np.ones(3)
    assert "data={'x_train': x, 'y_train': y" in refuse(data=(pair, pair))
    assert "x is no array of numbers or texts" in refuse(data=(np.array([[1], None], object), np.ones(2)))
    assert "the dataset is scaleflow.dataset.digits.Digits; add dataset=npz" in refuse(
        "dataset=digits", data=(np.ones((2, 1)), np.ones(2))
    )
    assert "run(model=int): expected a Keras model, or a function" in refuse(model=3)
    assert "run(model=function): expected a Keras model" in refuse(model=lambda inputs, outputs: None)
    assert "a separate process, which cannot import a script" in refuse(model=make_main_function())
    assert list(tmp_path.iterdir()) == []


def make_main_function() -> Any:
    def build(inputs: Any, outputs: Any) -> None:
        """As one that is defined in a notebook."""

    build.__module__, build.__qualname__ = "__main__", "build"
    return build


def refuse_compiled() -> list[str]:
    import keras

    from scaleflow.launcher.objects import plan_model_file

    network = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    network.compile(keras.optimizers.SGD(0.1), "mae", metrics=["mape"])
    raw = keras.Input((2,))
    several = keras.Model(raw, {"a": keras.layers.Dense(1)(raw), "b": keras.layers.Dense(1)(raw)})
    several.compile(loss={"a": "mse", "b": keras.losses.Huber()}, loss_weights={"a": 2.0})
    messages = []
    for model in (network, several):
        with pytest.raises(ConfigError) as refusal:
            plan_model_file(model)
        messages.append(str(refusal.value))
    return messages


def test_the_loop_of_scaleflow_refuses_a_compiled_model(isolated: Callable[..., Any]) -> None:
    """The feature `script` trains it with Keras. Without the feature nothing would use what it is compiled with."""
    one, two = isolated(refuse_compiled)
    assert "compiled with the loss mae and the optimizer SGD" in one
    assert "leave out model.compile(...) and write words such as objective.loss=mse and optimizer=adam" in one
    assert "the loss {a: mse, b: Huber} and the optimizer RMSprop" in two
    assert len(one.splitlines()) == 2


def train(folder: str) -> Any:
    import pyarrow

    os.chdir(folder)
    frame = table()
    short = (*WORDS, "debug=inline", "training.max_steps=3", "dataset.test=0.1")
    frame.to_csv("table.csv", index=False)
    frame.to_parquet("table.parquet")
    files = ("table.csv", "table.parquet")
    results = [
        *(scaleflow.run(*short, f"dataset.data_dir={name}", folder=f"{name}-run") for name in files),
        scaleflow.run(*short, data=frame, folder="frame"),
        scaleflow.run(*short, data=pyarrow.Table.from_pandas(frame.set_index("area").reset_index()), folder="arrow"),
    ]
    resumed = scaleflow.run("resume=frame", "training.max_steps=4")
    try:
        scaleflow.run(*short, data=frame.assign(town=[[1]] * len(frame)), folder="refused")
    except ConfigError as error:
        refused = str(error)
    names = [[path.name for path in Path(folder).glob("data-*")] for folder in ("frame", "arrow", "refused")]
    return [dict(result.metrics) for result in results], resumed.status, refused, names


@pytest.mark.slow
def test_a_csv_file_a_parquet_file_and_a_frame_have_equal_losses(isolated: Callable[..., Any], tmp_path: Path) -> None:
    metrics, resumed, refused, (frame, arrow, none) = isolated(train, str(tmp_path))
    first, *others = ([each[f"{split}/loss"] for split in ("train", "test")] for each in metrics)
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-6)
    assert resumed == "FINISHED"
    assert "the column town has the type list" in refused
    assert frame == arrow
    assert len(frame) == 1
    assert none == []


def build_network(inputs: Any, outputs: Any, width: int = 4) -> Any:
    import keras

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    return keras.Model(raw, keras.layers.Dense(*outputs.shape)(keras.layers.Dense(width, activation="tanh")(raw)))


def train_from_memory(folder: str) -> Any:
    import functools

    import keras

    os.chdir(folder)
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 3)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")
    short = ("training.max_steps=5", "tracking=none", "hardware=cpu", "debug=inline", "evaluation=none")
    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, trainable=False), keras.layers.Dense(1)])
    np.savez("rows.npz", x=x, y=y, w=np.ones(200))
    network.save("network.keras")
    words = (
        "dataset=npz",
        "dataset.data_dir=rows.npz",
        "dataset.weights=w",
        "model=keras_file",
        "model.path=network.keras",
    )
    results = [
        scaleflow.run(*words, *short, folder="files"),
        scaleflow.run(*short, data=(x, y, np.ones(200)), model=network, folder="objects"),
        scaleflow.run(*short, data={"x_train": x, "y_train": y}, model=functools.partial(build_network, width=7)),
    ]
    try:
        scaleflow.run(*short, data=(x[:, :2], y), model=network, folder="narrow")
    except ConfigError as error:
        refused = str(error)
    resumed = scaleflow.run("resume=objects", "training.max_steps=6")
    trained = keras.models.load_model(results[2].folder / "model" / "model.keras")
    sizes = [layer.units for layer in trained.layers if isinstance(layer, keras.layers.Dense)]
    kernel = network.get_weights()[0]
    saved = keras.models.load_model(results[1].folder / "model" / "model.keras")
    frozen = any(np.array_equal(kernel, each) for each in saved.get_weights())
    untouched = np.allclose(network.get_weights()[0], keras.models.load_model("network.keras").get_weights()[0])
    return [dict(each.metrics) for each in results], refused, resumed.status, sizes, untouched and frozen


@pytest.mark.slow
def test_arrays_and_models_of_a_program_train_as_their_files(isolated: Callable[..., Any], tmp_path: Path) -> None:
    (files, objects, _), refused, resumed, sizes, untouched = isolated(train_from_memory, str(tmp_path))
    assert {key: value for key, value in files.items() if "loss" in key} == {
        key: value for key, value in objects.items() if "loss" in key
    }
    assert "the model takes inputs of the shape (None, 3), and the dataset gives (None, 2)" in refused
    assert resumed == "FINISHED"
    assert sizes == [7, 1]
    assert untouched


OBJECTS = """
import keras, numpy, scaleflow

x = numpy.random.default_rng(0).normal(size=(200, 3)).astype("float32")
network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
words = ("training.max_steps=3", "hardware=cpu", "dataset.test=0.2", "evaluation=none")
scaleflow.run(*words, data=(x, (x[:, 0] > 0).astype("int64")), model=network, folder="run")
"""


@pytest.mark.slow
def test_commands_about_a_run_of_objects_work_when_its_folder_is_gone(command: Command) -> None:
    (command.folder / "objects.py").write_text(OBJECTS)
    made = command.python("objects.py")
    assert made.returncode == 0, made.stderr + made.stdout
    run_id = json.loads((command.folder / "run" / "record.json").read_text())["run_id"]
    shutil.rmtree(command.folder / "run")
    ended = command("evaluate", run_id)
    assert ended.returncode == 0, ended.stderr
    assert "evaluate/npz/accuracy" in ended.stdout
    ended = command("rerun", run_id, "--exact", "hydra.run.dir=again")
    assert "weights: equal" in ended.stdout, ended.stdout + ended.stderr
    copies = {path.suffix for path in (command.folder / "again").glob("*-????????????????.*")}
    assert copies == {".npz", ".keras"}
