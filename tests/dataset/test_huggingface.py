from __future__ import annotations

import functools
import io
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from tests.conftest import Command
from tests.dataset.files import examples, refused

if find_spec("datasets") is None:
    pytest.skip("the extra datasets is not installed", allow_module_level=True)


def write_folder(folder: Path, count: int = 20) -> str:
    """A dataset with every type of column, with the splits train and test."""
    import datasets
    from PIL import Image

    def encode(number: int) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.full((6, 8, 3), 10 * number, np.uint8)).save(file, "png")
        return file.getvalue()

    def rows(numbers: range) -> dict[str, Any]:
        return {
            "text": [f"number {n % 3}" for n in numbers],
            "image": [{"bytes": encode(n), "path": None} for n in numbers],
            "number": [n / 4 for n in numbers],
            "row": [[float(n), 1.0] for n in numbers],
            "ragged": [[1] * (n % 3) for n in numbers],
            "label": [n % 3 for n in numbers],
            "word": [["no", "yes"][n % 2] for n in numbers],
            "hole": [None if n == 3 else n for n in numbers],
        }

    features = datasets.Features(
        text=datasets.Value("string"),
        image=datasets.Image(),
        number=datasets.Value("float64"),
        row=datasets.List(datasets.Value("float32"), length=2),
        ragged=datasets.List(datasets.Value("int64")),
        label=datasets.ClassLabel(names=["a", "b", "c"]),
        word=datasets.Value("string"),
        hole=datasets.Value("int64"),
    )
    splits = {"train": range(count), "test": range(count, count + 4)}
    whole = datasets.DatasetDict(
        {split: datasets.Dataset.from_dict(rows(numbers), features=features) for split, numbers in splits.items()}
    )
    whole.save_to_disk(str(folder))
    whole["train"].save_to_disk(str(folder) + "-train")
    return str(folder)


def read(folder: str) -> Any:
    from scaleflow.dataset.huggingface import HuggingFace

    make = functools.partial(HuggingFace, data_dir=folder)
    single = make("row", "number")
    several = make(["image", "number"], "label", size=[4, 4])
    words = HuggingFace("text", "word", data_dir=f"{folder}-train", test=0.25)
    return (
        (single.inputs, single.outputs, tuple(single.splits), examples(single, "train")),
        (several.inputs, several.outputs, examples(several, "test")),
        (words.inputs, words.outputs, tuple(words.splits), [examples(words, split) for split in words.splits]),
        type(words.preprocessing).__name__,
    )


def test_columns_become_inputs_and_targets(isolated: Callable[..., Any], tmp_path: Path) -> None:
    single, several, words, preprocessing = isolated(read, write_folder(tmp_path / "data"))
    inputs, outputs, splits, (rows, targets) = single
    assert (inputs.shape, inputs.dtype, outputs.kind, outputs.shape, splits) == (
        (2,), "float32", "regression", (1,), ("train", "test"),
    )  # fmt: skip
    assert [row.tolist() for row in rows] == [[float(n), 1.0] for n in range(20)]
    assert [target.tolist() for target in targets] == [[n / 4] for n in range(20)]
    inputs, outputs, (rows, targets) = several
    assert (inputs["image"].shape, inputs["image"].dtype, inputs["number"].shape) == ((4, 4, 3), "uint8", ())
    assert (outputs.kind, outputs.names) == ("classification", ("a", "b", "c"))
    assert [row["image"][0, 0, 0] for row in rows] == [200, 210, 220, 230]
    assert [row["number"] for row in rows] == [5.0, 5.25, 5.5, 5.75]
    assert [int(target) for target in targets] == [2, 0, 1, 2]
    inputs, outputs, splits, ((train, train_targets), (test, _)) = words
    assert (inputs.dtype, outputs.kind, outputs.names, splits) == ("string", "binary", ("no", "yes"), ("train", "test"))
    assert preprocessing == "Text"
    assert (len(train), len(test)) == (15, 5)
    assert {text.decode() for text in train} == {"number 0", "number 1", "number 2"}
    assert {float(target[0]) for target in train_targets} == {0.0, 1.0}


def refusals(folder: str) -> list[str]:
    from scaleflow.dataset.huggingface import HuggingFace

    make = functools.partial(HuggingFace, data_dir=folder)
    return refused(
        [
            functools.partial(HuggingFace, "row", "number"),
            functools.partial(HuggingFace, "row", "number", data_dir=folder, name="imdb"),
            functools.partial(make, "row", "number", streaming=True),
            functools.partial(HuggingFace, "row", "number", data_dir=folder + "-none"),
            functools.partial(make, "rows", "number"),
            functools.partial(make, "row", "numbers"),
            functools.partial(make, "ragged", "number"),
            functools.partial(make, "row", "hole"),
            functools.partial(make, "row", "label", kind="binary"),
            functools.partial(make, "row", "number", kind="classification"),
            functools.partial(make, "row", "word", kind="regression"),
        ]
    )


def test_wrong_uses_are_refused(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(refusals, write_folder(tmp_path / "data"))
    wanted = [
        "set dataset.data_dir=FOLDER",
        "set dataset.data_dir=FOLDER",
        "dataset.streaming=true: is for dataset.name",
        "cannot be read",
        "dataset.input=rows: there is no such column",
        "dataset.target=numbers: there is no such column",
        "dataset.input=ragged: is List",
        "the column hole of 'train' has 1 missing values",
        "dataset.kind=binary: label has 3 classes",
        "dataset.target=number: is Value",
        "dataset.target=word: is Value",
    ]
    for message, words in zip(found, wanted, strict=True):
        assert words in message


def without_the_library() -> str:
    import importlib.util

    from scaleflow.dataset.huggingface import HuggingFace

    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *_: None if name == "datasets" else found(name)
    return refused([functools.partial(HuggingFace, "row", "number", data_dir="/")])[0]


def test_without_the_library_the_refusal_names_the_extra(isolated: Callable[..., Any]) -> None:
    assert "pip install 'scaleflow[datasets]'" in isolated(without_the_library)


def streamed(folder: str) -> Any:
    import datasets

    from scaleflow.dataset.huggingface import HuggingFace

    def load_dataset(name: str, config: Any, streaming: bool) -> Any:
        """As the hub would answer, which tests cannot ask."""
        whole = datasets.load_from_disk(folder)
        counts = {split: datasets.SplitInfo(split, num_examples=len(rows)) for split, rows in whole.items()}
        found = datasets.IterableDatasetDict({split: rows.to_iterable_dataset() for split, rows in whole.items()})
        for rows in found.values():
            rows.info.splits = datasets.SplitDict(counts)
        return found

    datasets.load_dataset = load_dataset
    source = HuggingFace(["image", "text"], "label", name="some/name", streaming=True, size=[4, 4])
    return tuple(source.splits), examples(source, "test")


def test_a_dataset_of_the_hub_is_streamed(isolated: Callable[..., Any], tmp_path: Path) -> None:
    splits, (rows, targets) = isolated(streamed, write_folder(tmp_path / "data"))
    assert splits == ("train", "test")
    assert [row["image"][0, 0, 0] for row in rows] == [200, 210, 220, 230]
    assert rows[0]["text"] == b"number 2"
    assert [int(target) for target in targets] == [2, 0, 1, 2]


@pytest.mark.slow
def test_a_model_trains_on_texts(command: Command, tmp_path: Path) -> None:
    ended = command(
        "dataset=huggingface", f"dataset.data_dir={write_folder(tmp_path / 'data')}", "dataset.input=text",
        "dataset.target=label", "dataset.tokens=3", "model=text", "training.batch_size=4", "training.max_steps=3",
        "tracking=none",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


def read_floats(folder: str) -> Any:
    import datasets

    from scaleflow.dataset.huggingface import HuggingFace

    columns = {"halves": [0.0, 0.5], "marks": [0.0, 1.0], "signs": [-1.0, 1.0], "row": [[0.0, 1.0], [1.0, 0.0]]}
    columns["grades"] = [0.0, 1.0, 2.0, 1.0]
    rows = {name: values * (40 // len(values)) for name, values in columns.items()}
    made = datasets.Dataset.from_dict({"x": [float(each) for each in range(40)], **rows})
    made.cast_column("row", datasets.Sequence(datasets.Value("float32"), 2)).save_to_disk(folder)
    found = {}
    for name in columns:
        try:
            source = HuggingFace(data_dir=folder, input="x", target=name)
            targets = {float(np.ravel(each)[0]) for each in examples(source, "train")[1]}
            found[name] = source.outputs.kind, sorted(targets)
            found[f"{name} notes"] = source.notes
        except ConfigError as refusal:
            found[name] = str(refusal)
    return found


def test_floats_that_mark_classes_are_not_read_as_amounts(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(read_floats, str(tmp_path / "rows"))
    assert found["halves"] == ("regression", [0.0, 0.5])
    assert found["marks"] == ("binary", [0.0, 1.0])
    assert found["grades"] == ("regression", [0.0, 1.0, 2.0])
    assert "floats that are all whole numbers from 0 to 2" in found["grades notes"][0]
    assert found["halves notes"] == found["marks notes"] == ()
    assert found["signs"] == ("binary", [0.0, 1.0])
    assert "its rows have only 0 and 1; store the number of the class" in found["row"]
