"""Datasets of tensorflow-datasets, prepared in a folder of the test's: nothing here needs a network."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Dataset, Inputs, Outputs, Target
from tests.conftest import Command, make_once
from tests.processes import call

TRAIN, TEST = 40, 12


def prepare(folder: str, only: Sequence[str] = ()) -> None:
    """Prepares `mnist`, `imdb_reviews` (with a config, as the real one) and one with features of every kind."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    kind = tfds.features
    photo, row = kind.Image(shape=(None, None, 3)), kind.Tensor(shape=(3,), dtype=np.int64)
    letters, labels = kind.ClassLabel(names=["a", "b", "c"]), kind.Sequence(kind.ClassLabel(num_classes=4))
    several = {"photo": photo, "tags": labels, "row": row, "price": np.float64, "class": letters}

    def image(i: tf.Tensor) -> Any:
        return {"image": tf.fill([6, 6, 1], tf.cast(i, tf.uint8)), "label": i % 10}

    def review(i: tf.Tensor) -> Any:
        return {"text": tf.strings.join(["word ", tf.strings.as_string(i % 5)]), "label": i % 2}

    def thing(i: tf.Tensor) -> Any:
        grey = tf.fill([4 + i % 3, 5, 3], tf.constant(90, tf.uint8))
        price = tf.cast(i, tf.float64) / 2
        return {"photo": grey, "tags": tf.range(i % 3), "row": tf.stack([i, i, i]), "price": price, "class": i % 3}

    images = {"image": kind.Image(shape=(6, 6, 1)), "label": kind.ClassLabel(num_classes=10)}
    reviews = {"text": kind.Text(), "label": kind.ClassLabel(names=["neg", "pos"])}
    for name, features, example in (
        ("mnist/3.0.1", images, image),
        ("mnist/3.0.0", images, image),
        ("imdb_reviews/plain_text/1.0.0", reviews, review),
        ("kinds/1.0.0", several, thing),
    ):
        if only and name not in only:
            continue
        first, *config, version = name.split("/")
        tfds.dataset_builders.store_as_tfds_dataset(
            name=first,
            config=next(iter(config), None),
            version=version,
            features=kind.FeaturesDict(features),
            data_dir=folder,
            disable_shuffling=True,
            split_datasets={n: tf.data.Dataset.range(c).map(example) for n, c in (("train", TRAIN), ("test", TEST))},
        )
        if first != "kinds":
            supervise(Path(folder) / name / "dataset_info.json", list(features))


def supervise(file: Path, keys: list[str]) -> None:
    """Writes in what `store_as_tfds_dataset` does not."""
    info = json.loads(file.read_text())
    info["supervisedKeys"] = {"tuple": {"items": [{"featureKey": key} for key in keys]}}
    file.write_text(json.dumps(info))


@pytest.fixture
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_once(tmp_path_factory, "tfds", lambda folder: call(prepare, str(folder)))[0]


def read(cases: list[dict[str, Any]]) -> list[Any]:
    """For each case what the source says, and the arrays of its splits; or its refusal."""
    return [read_one(case) for case in cases]


def read_one(case: dict[str, Any]) -> Any:
    from scaleflow import dataset
    from scaleflow.dataset.tfds import Tfds

    validation, limit = case.pop("validation", None), case.pop("limit", None)
    options = Dataset(Target("dataset", "nowhere"), validation=validation, limit=limit)
    try:
        source = Tfds(**case)
        splits = dataset.prepare_splits(source, options, 0)
    except ConfigError as refusal:
        return str(refusal)
    arrays = {name: (each.inputs, each.targets) for name, each in splits.by_name().items()}  # type: ignore[union-attr]
    return source.inputs, source.outputs, source.splits, splits.inputs, arrays


@pytest.mark.slow
def test_a_prepared_dataset_is_read_as_its_features_say(prepared: Path, isolated: Callable[..., Any]) -> None:
    kinds = {"name": "kinds", "data_dir": str(prepared)}
    parts = {"train": "train[:75%]", "held": "train[75%:]"}
    mnist, part, reviews, photos, tags, row = isolated(
        read,
        [
            {"name": "mnist", "data_dir": str(prepared), "validation": "test"},
            {"name": "mnist", "data_dir": str(prepared), "splits": parts, "validation": "held", "limit": 25},
            {"name": "imdb_reviews", "data_dir": str(prepared), "vocabulary": 6, "tokens": 3},
            {**kinds, "input": "photo", "target": "class", "size": [2, 3]},
            {**kinds, "input": "row", "target": "tags", "version": "1.0.0"},
            {**kinds, "input": "row", "target": "price"},
        ],
    )
    inputs, outputs, splits, features, arrays = mnist
    assert inputs == features == Inputs((6, 6, 1), "uint8", scale=1 / 255)
    assert outputs == Outputs("classification", (10,), tuple("0123456789"))
    assert splits == ("train", "test")
    assert {name: len(x) for name, (x, _) in arrays.items()} == {"train": TRAIN, "validation": TEST, "test": TEST}
    images, labels = arrays["train"]
    assert (images.dtype, labels.dtype) == (np.uint8, np.int32)
    assert images[:, 0, 0, 0].tolist() == list(range(TRAIN))
    assert labels.tolist() == [number % 10 for number in range(TRAIN)]

    _, _, splits, _, arrays = part
    assert splits == ("train", "held", "test")
    assert arrays["train"][0][:, 0, 0, 0].tolist() == list(range(25))
    assert arrays["validation"][0][:, 0, 0, 0].tolist() == list(range(30, 40))

    inputs, outputs, _, features, arrays = reviews
    assert (inputs, features) == (Inputs((), "string"), Inputs((3,), "int32", vocabulary=6))
    assert outputs == Outputs("binary", (1,), ("neg", "pos"))
    assert arrays["train"][0].dtype == np.int32
    assert arrays["train"][0][0].tolist()[0] == 2
    assert arrays["train"][1].tolist() == [[number % 2] for number in range(TRAIN)]

    assert photos[0] == Inputs((2, 3, 3), "uint8", scale=1 / 255)
    assert photos[1] == Outputs("classification", (3,), ("a", "b", "c"))
    assert np.unique(photos[4]["test"][0]).tolist() == [90]

    assert (tags[0], tags[1].kind, tags[1].shape) == (Inputs((3,), "float32"), "multi_label", (4,))
    assert tags[4]["train"][1][:3].tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert row[1] == Outputs("regression", (1,))
    assert row[4]["test"][1][:3].tolist() == [[0], [0.5], [1]]


def refusals(folder: str) -> list[Any]:
    import importlib.util
    import socket

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        os.environ.pop(variable, None)
        os.environ.pop(variable.upper(), None)
    socket.create_connection = unreachable  # type: ignore[assignment]
    kinds = {"name": "kinds", "data_dir": folder}
    found = read(
        [
            {},
            {"name": "cifar10", "data_dir": folder},
            {"name": "cifr10", "data_dir": folder},
            {"name": "mnist", "data_dir": folder, "version": "9.9.9"},
            {"name": "mnist", "data_dir": folder, "splits": {"train": "train[:200%]"}},
            {"name": "mnist", "data_dir": folder, "validation": "held"},
            kinds,
            {**kinds, "input": "photo", "target": "class"},
            {**kinds, "input": "tags", "target": "class"},
            {**kinds, "input": "row", "target": "colour"},
            {**kinds, "size": 3},
        ]
    )
    importlib.util.find_spec = lambda *_: None  # type: ignore[assignment]
    return [*found, read_one({"name": "mnist"})]


def test_missing_data_is_refused_with_the_place_for_it(prepared: Path, isolated: Callable[..., Any]) -> None:
    wanted = [
        ["dataset.name=None: expected the name of a dataset"],
        ["dataset.name=cifar10: is not prepared", "www.cs.toronto.edu does not answer", "no network",
         f"put a prepared copy at {prepared}/cifar10/VERSION (dataset_info.json", "dataset.data_dir"],
        ["dataset.name=cifr10: tensorflow-datasets has no dataset of that name; did you mean cifar10?"],
        ["dataset.name=mnist with dataset.version=9.9.9: is not prepared", f"{prepared}/mnist/9.9.9"],
        ["dataset.splits.train=train[:200%]: Error parsing split"],
        ["dataset.validation=held: there is no such split; the splits are train, test"],
        ["dataset.input=null: choose a feature of kinds: ", "photo"],
        ["dataset.size=null: the images differ in size"],
        ["dataset.input=tags: expected an image, a text", "Sequence"],
        ["dataset.target=colour: choose a feature of kinds: "],
        ["dataset.size=3: expected [height, width]"],
        ["tensorflow-datasets is not installed; pip install 'scaleflow[tfds]'"],
    ]  # fmt: skip
    found = isolated(refusals, str(prepared))
    for words, message in zip(wanted, found, strict=True):
        assert isinstance(message, str), words
        for word in words:
            assert word in message
    assert not (prepared / "cifar10" / "3.0.2").exists()


def downloads(folder: str) -> tuple[int, str]:
    """How often several processes that need the same dataset prepare it, and where."""
    import threading

    import tensorflow_datasets as tfds

    from scaleflow.dataset import tfds as ours

    made: list[str] = []

    class Builder:
        url_infos = ()
        data_dir = f"{folder}/lacking/1.0.0"

        def download_and_prepare(self) -> None:
            made.append(self.data_dir)
            path = Path(self.data_dir)
            path.mkdir(parents=True)
            (path / "dataset_info.json").write_text("{}")

    tfds.builder = lambda *_, **__: Builder()
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(ours.download_dataset(Path(folder), "lacking", None)))
        for _ in "abc"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    return len(made), str(found[0])


def test_one_process_downloads_and_the_others_wait(tmp_path: Path, isolated: Callable[..., Any]) -> None:
    assert isolated(downloads, str(tmp_path)) == (1, f"{tmp_path}/lacking/1.0.0")


@pytest.mark.slow
def test_two_workers_train_on_mnist(prepared: Path, command: Command) -> None:
    ended = command(
        "dataset=mnist", f"dataset.data_dir={prepared}", "strategy=multi_worker", "hardware=cpu", "dataset.cache=none",
        "training.epochs=2", "training.batch_size=4", "dataset.validation=test", "tracking=none",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (params,) = [event["params"] for event in command.events() if event["event"] == "ready"]
    counts = [params[f"resolved.examples.{split}"] for split in ("train", "validation", "test")]
    assert counts == [str(TRAIN), str(TEST), str(TEST)]
    assert (command.run_folder() / "model" / "model.keras").is_file()
