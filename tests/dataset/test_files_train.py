"""A run on each kind of files: trained for some steps, exported, and asked for an answer to raw inputs."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Plan
from tests.conftest import Command
from tests.dataset.files import picture, plain, write
from tests.dataset.test_tfrecord import numbered, written

ROWS = "".join(f'{n * 7 % 90},"town, {n % 3}",{n % 7},{n / 9}\n' for n in range(90))


def files(base: Path) -> dict[str, tuple[str, ...]]:
    """Small files of every kind, and what a command says of them."""
    for split, count in (("train", 6), ("test", 2)):
        for number, name in enumerate(("red", "green", "blue")):
            colour = [200 if n == number else 30 for n in range(3)]
            for n in range(count):
                picture(base / "photos" / split / name / f"{n}.png", plain(colour, 6 + n, 8))
    for name, word in (("bad", "awful"), ("good", "great")):
        for n in range(12):
            write(base / "reviews" / name / f"{n}.txt", f"A {word} film, number {n}.")
    write(base / "house.csv", f"area,town,rooms,price\n{ROWS}")
    random = np.random.default_rng(0)
    np.savez(base / "arrays.npz", x=random.standard_normal((60, 4)), y=np.arange(60) % 3)
    return {
        "image_folder": (f"dataset.data_dir={base}/photos", "dataset.size=[8,8]", "model=cnn", "model.filters=[4]"),
        "text_folder": (f"dataset.data_dir={base}/reviews", "model=text", "dataset.tokens=6", "dataset.vocabulary=40"),
        "csv": (f"dataset.data_dir={base}/house.csv", "dataset.target=price"),
        "npz": (f"dataset.data_dir={base}/arrays.npz",),
        "tfrecord": (
            f"dataset.data_dir={base}/t*.tfrecord",
            "dataset.features={x: {shape: [2]}, label: {dtype: int64}}",
            *("dataset.input=x", "dataset.target=label", "dataset.classes=3"),
        ),
    }


def trained(base: Path, plans: dict[str, Plan]) -> dict[str, Any]:
    """By dataset: (the losses of 12 updates, what the saved model gives for raw inputs, and those)."""
    import tensorflow as tf

    from scaleflow.worker.build import build_training
    from tests.training.fake_engine import ignore, take

    for n in range(2):
        written(base / f"t{n}.tfrecord", [numbered(i) for i in range(n * 20, n * 20 + 20)])
    found = {}
    for name, plan in plans.items():
        built = build_training(plan, ignore)
        losses = take(built.engine, built.feeds.train, 12).losses
        built.export(base / "exported" / name)
        saved = tf.saved_model.load(str(base / "exported" / name / "saved_model"))
        if name == "csv":
            with np.load(base / "exported" / name / "input_example.npz", allow_pickle=True) as arrays:
                raw = dict(arrays)
        else:
            raw = np.load(base / "exported" / name / "input_example.npy", allow_pickle=True)
        if name == "image_folder":  # the example has the files, as text
            raw = saved.decode(tf.constant([base64.b64decode(each) for each in raw]))
        served = saved.serve(tf.nest.map_structure(tf.constant, raw)).numpy()
        found[name] = losses, served, tf.nest.flatten(raw), built.facts.counts
    return found


@pytest.mark.slow
def test_files_of_every_kind_train_and_are_served_raw(
    isolated: Callable[..., Any], plan: Callable[..., Plan], tmp_path: Path
) -> None:
    plans = {
        name: plan(f"dataset={name}", *words, "training.batch_size=8", "hardware=cpu", "optimizer.learning_rate=0.01")
        for name, words in files(tmp_path).items()
    }
    found = isolated(trained, tmp_path, plans)
    shapes = {"image_folder": (8, 8, 3), "text_folder": (), "csv": (), "npz": (4,), "tfrecord": (2,)}
    widths = {"image_folder": 3, "text_folder": 1, "csv": 1, "npz": 3, "tfrecord": 3}
    for name, (losses, outputs, raw, counts) in found.items():
        assert min(losses[-3:]) < losses[0], name
        assert {each.shape[1:] for each in raw} == {shapes[name]}, name
        assert outputs.shape == (len(raw[0]), widths[name]), name
        assert np.isfinite(outputs).all(), name
        assert set(counts) == {"train", "validation", "test"}, name
    assert found["image_folder"][2][0].dtype == np.uint8
    assert [each.dtype.kind for each in found["csv"][2]] == ["f", "f", "U"]


@pytest.mark.slow
def test_the_command_trains_on_a_file_and_refuses_a_bad_row(command: Command) -> None:
    path = write(command.folder / "house.csv", f"area,town,rooms,price\n{ROWS}1,2,3,\n")
    words = ("dataset=csv", "dataset.data_dir=house.csv", "dataset.target=price", "training.epochs=1", "tracking=none")
    refused = command(*words, "dataset.on_bad_example=raise")
    assert refused.returncode == 2
    assert "have no target price" in refused.stderr
    assert f"{path.name}, row 91" in refused.stderr
    assert "Traceback" not in refused.stderr
    ended = command(*words, "dataset.on_bad_example=skip", "strategy=mirrored", "hardware.logical_devices=2")
    assert ended.returncode == 0, ended.stderr
    assert "dataset: left out: in 'train', 1 of " in ended.stdout + ended.stderr
