"""`scaleflow predict` reads pictures, texts, arrays, TFRecord files and folders of the library datasets."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from scaleflow.errors import ConfigError, RunError
from scaleflow.features.predict.inputs import open_input
from scaleflow.features.predict.reading import RowSource
from scaleflow.interfaces import Inputs, LearnedState, Outputs
from tests.conftest import Command


def take(inputs: Any, pictures: Sequence[str] = (), **reading: Any) -> LearnedState:
    """What a run learned whose model takes these inputs."""
    return LearnedState(inputs, Outputs("regression", (1,)), pictures=pictures, reading=reading)


PICTURE, TEXT, ROW = take(Inputs((8, 8, 3), "uint8"), [""]), take(Inputs((), "string")), take(Inputs((2,)))


def read_all(source: RowSource, columns: Sequence[str], skip: int = 0) -> Any:
    return pyarrow.concat_tables([rows.table for rows in source.read(columns, 2, skip)]).to_pydict()


def test_each_file_of_a_folder_of_texts_is_a_row(tmp_path: Path) -> None:
    for name, content in (("b/1.txt", b"one"), ("a.txt", "zwei ü".encode()), ("c.txt", b"\xff"), ("d.md", b"no")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    source = open_input(str(tmp_path), None, TEXT)
    assert (source.values, source.labels, source.rows) == (("text",), ("file",), 3)
    files = [str(tmp_path / name) for name in ("a.txt", "b/1.txt", "c.txt")]
    assert read_all(source, ["file", "text"]) == {"file": files, "text": ["zwei ü", "one", ""]}
    assert read_all(source, ["text"], skip=2) == {"text": [""]}
    (*_, last) = source.read(["text"], 2)
    assert (last.first, last.faults, source.name(2)) == (2, {2: "it is not UTF-8"}, files[2])


def test_pictures_are_taken_from_among_other_files_if_the_model_takes_pictures(tmp_path: Path) -> None:
    for name in ("1.JPG", "2.png", "notes.txt"):
        (tmp_path / name).write_bytes(name.encode())
    source = open_input(str(tmp_path), None, PICTURE)
    assert read_all(source, ["picture"]) == {"picture": [b"1.JPG", b"2.png"]}
    (tmp_path / "notes.txt").unlink()
    with pytest.raises(ConfigError, match="has pictures, and the model was trained on arrays of pixels"):
        open_input(str(tmp_path), None, ROW)


def test_arrays_of_one_length_are_columns(tmp_path: Path) -> None:
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    np.savez(tmp_path / "new.npz", points=rows, id=np.arange(5), other=np.zeros(3))
    path = str(tmp_path / "new.npz")
    with pytest.raises(ConfigError, match="the arrays are points, id, other; name that of the model with --columns"):
        open_input(path, None, ROW)
    for source in (
        open_input(path, None, ROW, ["points"]),
        open_input(path, None, take(Inputs((2,)), input="points")),
    ):
        assert source.values == ["points"]
        assert source.schema.names == ["points", "id"]
        assert read_all(source, ["id", "points"], skip=3) == {"id": [3, 4], "points": rows[3:].tolist()}
        assert (source.name(3), source.rows) == (f"{path}, row 4", 5)
    named = {"points": Inputs((2,)), "id": Inputs((), "int32")}
    assert open_input(path, None, take(named)).values == ()
    with pytest.raises(ConfigError, match="there is no array town; the arrays are"):
        open_input(path, None, take({**named, "town": Inputs((), "string")}))
    with pytest.raises(ConfigError, match="other, points have different lengths"):
        open_input(path, None, take({"points": Inputs((2,)), "other": Inputs((2,))}))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "new.npz").read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"^--input=.*cut.npz: is not a complete .npz file"):
        open_input(str(tmp_path / "cut.npz"), None, ROW)


def test_a_folder_of_the_library_datasets_is_read_in_its_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, 1]})
    datasets.DatasetDict({"train": rows, "test": rows.select([2, 0])}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"has the splits test, train; use --input .*saved/NAME"):
        open_input(str(tmp_path / "saved"), None, TEXT)
    source = open_input(str(tmp_path / "saved" / "test"), None, take(Inputs((), "string"), input="text"))
    assert (source.values, source.rows) == (["text"], 2)
    assert read_all(source, ["label", "text"]) == {"label": [1, 1], "text": ["c", "a"]}


def read_records_of(folder: Path) -> list[Any]:
    import tensorflow as tf

    def write(name: str, rows: Sequence[Sequence[float]]) -> None:
        with tf.io.TFRecordWriter(str(folder / name)) as file:
            for row in rows:
                feature = {"point": tf.train.Feature(float_list=tf.train.FloatList(value=row))}
                file.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())

    write("whole.tfrecord", [[0, 1], [2, 3], [4, 5]])
    content = (folder / "whole.tfrecord").read_bytes()
    (folder / "cut.tfrecord").write_bytes(content[:-5])
    write("other.tfrecord", [[0, 1], [2]])
    state = take(Inputs((2,)), input="point", features={"point": {"shape": [2]}}, compression="none")
    found: list[Any] = []
    for name in ("whole", "cut", "other"):
        source = open_input(str(folder / f"{name}.tfrecord"), None, state)
        try:
            found.append(read_all(source, ["point"], skip=1))
        except RunError as error:
            found.append(str(error))
    return found


def test_records_have_the_features_that_the_run_describes(isolated: Callable[..., Any], tmp_path: Path) -> None:
    whole, cut, other = isolated(read_records_of, tmp_path)
    assert whole == {"point": [[2.0, 3.0], [4.0, 5.0]]}
    assert cut == f"{tmp_path}/cut.tfrecord: record 3 is damaged, or the file is cut off there"
    assert other.startswith(f"{tmp_path}/other.tfrecord: a record is not as dataset.features says: Key: point.")
    with pytest.raises(ConfigError, match="whose features only a run of dataset=tfrecord describes"):
        open_input(str(tmp_path / "whole.tfrecord"), None, ROW)


@pytest.mark.slow  # the tests above read the files
def test_predictions_of_pictures_name_their_files_and_those_that_cannot_be_read(command: Command) -> None:
    from PIL import Image

    random = np.random.default_rng(0)
    for n in range(40):
        path = command.folder / "data" / ("cat", "dog")[n % 2] / f"{n}.{('png', 'jpg')[n % 4 > 1]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(100 * (n % 2), 256, (20, 24, 3)).astype(np.uint8)).save(path)
    words = ("dataset=image_folder", "dataset.data_dir=data", "dataset.size=[8,8]", "model.units=[8]", "hardware=cpu")
    ended = command(*words, "training.max_steps=3", "checkpoint=none", "evaluation=none", "hydra.run.dir=run")
    assert ended.returncode == 0, ended.stderr
    (command.folder / "data" / "dog" / "broken.png").write_text("no picture")

    def predict(*more: str) -> Any:
        return command.python("-m", "scaleflow", "predict", "run", "--input", "data/dog", "--output", "out.csv", *more)

    ended = predict()
    assert ended.returncode == 1
    assert "data/dog/broken.png: it is no whole JPEG, PNG, BMP or GIF" in ended.stderr
    ended = predict("--on-bad", "empty", "--logits", "--explain")
    assert ended.returncode == 0, ended.stderr
    with (command.folder / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = ["prediction", "probability", "probability_cat", "probability_dog", "logit", "reasons"]
    assert list(rows[0]) == ["file", *names]
    found = [row["file"] for row in rows]
    assert (len(found), found) == (21, sorted(found))
    by_file = {row["file"]: row for row in rows}
    assert by_file["data/dog/broken.png"]["prediction"] == by_file["data/dog/broken.png"]["reasons"] == ""
    grid = np.array(json.loads(by_file["data/dog/1.png"]["reasons"]))
    assert grid.shape == (8, 8)
    assert grid.any()
    good = by_file["data/dog/1.png"]
    chance = 1 / (1 + np.exp(-float(good["logit"])))
    assert float(good["probability_dog"]) == pytest.approx(chance, abs=1e-6)
    assert good["prediction"] == ("dog" if chance > 0.5 else "cat")
