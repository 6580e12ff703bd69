"""The small files that datasets read."""

from __future__ import annotations

import csv
from pathlib import Path

#: Examples of each.
COUNT = 50

LETTERS = ("alpha beta gamma", "delta beta", "gamma alpha omega delta alpha", "omega", "beta delta gamma beta alpha")


def make_files(folder: str) -> None:
    """All of them; in a process that has TensorFlow."""
    import numpy as np
    import tensorflow as tf

    draw = np.random.default_rng(0)
    path = Path(folder)
    path.mkdir()
    with (path / "table.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["size", "place", "age", "answer"])
        for index in range(COUNT):
            age = "" if index % 9 == 4 else round(draw.normal(), 3)
            table.writerow(
                [round(draw.normal(), 3), "north" if index % 3 else "south", age, "yes" if index % 2 else "no"]
            )
    series = draw.normal(size=(COUNT, 5, 3)).astype("float32")
    np.savez(path / "arrays.npz", x=series, y=draw.integers(3, size=COUNT))
    other = np.random.default_rng(1)
    parts = {"row": other.normal(size=(COUNT, 6)), "series": series, "weight": other.uniform(0, 2, COUNT)}
    np.savez(path / "dicts.npz", kind=other.integers(3, size=COUNT), amount=other.normal(size=(COUNT, 2)), **parts)
    for index in range(COUNT):
        text = path / "texts" / ("good", "bad", "other")[index % 3] / f"{index}.txt"
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text(f"{LETTERS[index % 5]} {LETTERS[(index * 7) % 5]}\n")
        picture = path / "pictures" / ("cat", "dog")[index % 2] / f"{index}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(256, size=(9, 10, 3)).astype("uint8")
        picture.write_bytes(tf.io.encode_png(pixels).numpy())
    (path / "records").mkdir()
    with tf.io.TFRecordWriter(str(path / "records" / "all.tfrecord")) as writer:
        for index in range(COUNT):
            pixels = draw.integers(256, size=64).astype("uint8").tobytes()
            feature = {
                "pixels": tf.train.Feature(bytes_list=tf.train.BytesList(value=[pixels])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[index % 3])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
