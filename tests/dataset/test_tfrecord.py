from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dataset.files import examples, holds, names, prepared, refused

IMAGE = {"image": {"kind": "image", "size": [2, 3]}, "label": {"dtype": "int64"}}
NUMBER = {"x": {"shape": [2]}, "label": {"dtype": "int64"}}


def example(**features: Any) -> bytes:
    """A serialized tf.train.Example: bytes, floats and integers by what they are."""
    import tensorflow as tf

    def feature(value: Any) -> Any:
        values = value if isinstance(value, list) else [value]
        if isinstance(values[0], bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        if isinstance(values[0], float):
            return tf.train.Feature(float_list=tf.train.FloatList(value=values))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    made = {name: feature(value) for name, value in features.items()}
    return bytes(tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString())


def numbered(number: int, label: int | None = None) -> bytes:
    return example(x=[float(number), -float(number)], label=number % 3 if label is None else label)


def written(path: Path, records: list[bytes], compression: str = "") -> Path:
    import tensorflow as tf

    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path), compression) as file:
        for record in records:
            file.write(record)
    return path


def make(data_dir: Path, features: Mapping[str, Any] = NUMBER, **changes: Any) -> Any:
    from scaleflow.dataset.tfrecord import TFRecord

    return TFRecord(str(data_dir), features, **{"input": "x", "target": "label", "classes": 3, **changes})


# ---------------------------------------------------------------------------------------------
# What is read
# ---------------------------------------------------------------------------------------------


def features(base: Path) -> dict[str, Any]:
    """By the kind of the feature: what the inputs are, the first example."""
    import tensorflow as tf

    picture = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
    halves = np.array([0.5, 1.5], np.float16)
    record = example(
        image=tf.io.encode_png(picture).numpy(),
        pixels=picture.tobytes(),
        halves=halves.tobytes(),
        words=[5, 6],
        many=[1, 2, 3, 4],
        x=[0.5, 2.5],
        label=[2],
        yes=1,
        labels=[1, 0, 1],
    )
    path = written(base / "all.tfrecord", [record])
    spec = {
        "image": {"kind": "image", "size": [2, 3]},
        "pixels": {"kind": "raw", "shape": [2, 3, 3]},
        "halves": {"kind": "raw", "shape": [2], "dtype": "float16"},
        "words": {"kind": "padded", "shape": [3], "dtype": "int64"},
        "many": {"kind": "padded", "shape": [3], "dtype": "int64"},
        "x": {"shape": [2]},
        "label": {"shape": [1], "dtype": "int64"},
        "yes": {"dtype": "int64"},
        "labels": {"shape": [3], "dtype": "int64"},
    }
    found: dict[str, Any] = {}
    for name in ("image", "pixels", "halves", "words", "many", "x"):
        source = make(path, spec, input=name, test=0)
        found[name] = source.inputs, examples(source, "train")[0][0]
    for name, kind in (("label", "classification"), ("yes", "binary"), ("labels", "multi_label"), ("x", "regression")):
        source = make(path, spec, target=name, kind=kind, classes=3 if name == "label" else None, test=0)
        found[f"target {name}"] = source.outputs, examples(source, "train")[1][0]
    return found


def test_features_are_parsed_as_the_spec_says(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(features, tmp_path)
    picture = np.arange(18).reshape(2, 3, 3)
    for name in ("image", "pixels"):
        inputs, image = found[name]
        assert (inputs.shape, inputs.dtype, inputs.scale) == ((2, 3, 3), "uint8", 1 / 255)
        np.testing.assert_array_equal(image, picture)
    assert found["halves"][0].dtype == "float16"
    assert found["halves"][1].tolist() == [0.5, 1.5]
    assert found["words"][0].shape == (3,)
    assert (found["words"][1].tolist(), found["many"][1].tolist()) == ([5, 6, 0], [1, 2, 3])
    assert (found["x"][0].scale, found["x"][1].tolist()) == (None, [0.5, 2.5])
    targets = {
        name: (outputs.kind, outputs.shape, target.tolist())
        for name, (outputs, target) in found.items()
        if name.startswith("target")
    }
    assert targets == {
        "target label": ("classification", (3,), 2),
        "target yes": ("binary", (1,), [1.0]),
        "target labels": ("multi_label", (3,), [1.0, 0.0, 1.0]),
        "target x": ("regression", (2,), [0.5, 2.5]),
    }


def several(base: Path) -> Any:
    """40 records in 4 files, in splits and without; compressed."""
    parts = [range(first, first + 10) for first in range(0, 40, 10)]
    for n, part in enumerate(parts):
        written(base / f"parts/data.tfrecord-{n:05}-of-00004", [numbered(i) for i in part])
        written(base / f"zipped/{n}.tfrecord.gz", [numbered(i) for i in part], "GZIP")
        written(base / f"splits/{'train' if n < 3 else 'test'}-{n}.tfrecord", [numbered(i) for i in part])

    def inputs(source: Any, split: str) -> list[int]:
        return [int(x[0]) for x in examples(source, split)[0]]

    whole, zipped = make(base / "parts"), make(base / "zipped", compression="gzip")
    named, matched = make(base / "splits"), make(base / "splits/t*-?.tfrecord", test=0)
    found = {split: inputs(whole, split) for split in whole.splits}
    again = {split: inputs(make(base / "parts"), split) for split in whole.splits}
    other = inputs(make(base / "parts", split_seed=1), "test")
    records = dict(zip(inputs(whole, "train"), names(whole, "train"), strict=True))
    return (
        found,
        again,
        other,
        {split: inputs(zipped, split) for split in zipped.splits},
        {split: inputs(named, split) for split in named.splits},
        {split: inputs(matched, split) for split in matched.splits},
        records,
    )


@pytest.mark.slow
def test_several_files_are_read_at_once_in_one_order_each_record_once(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    found, again, other, zipped, named, matched, records = isolated(several, tmp_path)
    assert sorted(found["train"] + found["test"]) == list(range(40))
    assert (len(found["train"]), len(found["test"])) == (32, 8)
    assert again == zipped == found
    assert sorted(other) != sorted(found["test"])
    assert named == {"test": list(range(30, 40)), "train": named["train"]}
    assert sorted(named["train"]) == list(range(30))
    assert sorted(matched["train"]) == list(range(40))
    for number, name in records.items():
        assert name == f"{tmp_path}/parts/data.tfrecord-{number // 10:05}-of-00004, record {number % 10}"


# ---------------------------------------------------------------------------------------------
# What cannot be
# ---------------------------------------------------------------------------------------------


def faulty(base: Path) -> dict[str, Any]:
    """By what is wrong: (the refusal, what is left with skip)."""
    good = [numbered(i) for i in range(10)]
    whole = written(base / "whole.tfrecord", good).read_bytes()
    (base / "cut").mkdir()
    (base / "cut/1.tfrecord").write_bytes(whole)
    (base / "cut/2.tfrecord").write_bytes(whole[:-5])
    damaged = bytearray(whole)
    damaged[len(whole) // 10 * 4 + 20] ^= 0xFF
    (base / "damaged.tfrecord").write_bytes(damaged)
    (base / "text.tfrecord").write_text("no record, and long enough for the head of one")
    written(base / "range.tfrecord", [*good[:4], numbered(0, 3), *good[4:]])
    written(base / "missing.tfrecord", [*good, example(x=[1.0, 2.0])])
    written(base / "input.tfrecord", [*good, example(x=[1.0], label=1)])
    written(base / "form.tfrecord", [*good, b"\xff\xff"])
    written(base / "compressed.tfrecord", good, "GZIP")
    found = {}
    for name in ("cut", "damaged", "text", "range", "missing", "input", "form", "compressed"):
        path = base / (name if name == "cut" else f"{name}.tfrecord")
        of = functools.partial(make, path, test=0)
        found[name] = prepared(of, cache="memory"), prepared(of, on_bad_example="skip", cache="memory")
    return found


@pytest.mark.slow
def test_records_that_cannot_be_read_are_named_or_left_out(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(faulty, tmp_path)
    lost = "the file is cut off or damaged from here on"
    target = "its target is missing, has another shape or dtype, or is out of range"
    wanted = {
        "cut": (f"{tmp_path}/cut/2.tfrecord, record 9: {lost}", 19, "1 of the 20"),
        "damaged": (f"{tmp_path}/damaged.tfrecord, record 4: {lost}", 4, "1 of the 5"),
        "range": (f"{tmp_path}/range.tfrecord, record 4: {target}", 10, "1 of the 11"),
        "missing": (f"{tmp_path}/missing.tfrecord, record 10: {target}", 10, "1 of the 11"),
        "form": (f"{tmp_path}/form.tfrecord, record 10: {target}", 10, "1 of the 11"),
    }
    for name, (words, left, said) in wanted.items():
        refusal, (counts, notes) = found[name]
        (note,) = [each for each in notes if "from the cache" not in each]
        assert words in refusal, refusal
        assert "dataset.on_bad_example=skip" in refusal
        assert counts == {"train": left}, name
        assert said in note, note
        assert words.partition(":")[0] in note, note
    refusal, (counts, _) = found["input"]  # which is looked at when it is decoded
    assert f"{tmp_path}/input.tfrecord, record 10" in refusal
    assert counts == {"train": 10}
    for name in ("text", "compressed"):
        for refusal in found[name]:
            assert f"{tmp_path}/{name}.tfrecord, record 0" in refusal
            assert lost in refusal


def refusals(base: Path) -> list[str]:
    path = written(base / "good.tfrecord", [numbered(i) for i in range(10)])
    written(base / "no_train/test.tfrecord", [numbered(0)])
    written(base / "loose/train.tfrecord", [numbered(0)])
    written(base / "loose/more.tfrecord", [numbered(0)])
    (base / "empty").mkdir()

    def of(**changes: Any) -> Callable[[], Any]:
        return functools.partial(make, **{"data_dir": path, **changes})

    def spec(**feature: Any) -> Callable[[], Any]:
        return of(features={"x": feature, "label": {"dtype": "int64"}})

    return refused(
        [
            of(data_dir=base / "nowhere"),
            of(data_dir=base / "nowhere*.tfrecord"),
            of(data_dir=base / "empty"),
            of(data_dir=base / "no_train"),
            of(data_dir=base / "loose"),
            of(features={}),
            of(features={"x": "float32"}),
            spec(kind="zip"),
            spec(size=[2, 2]),
            spec(kind="image"),
            spec(kind="padded", shape=[2, 2]),
            spec(dtype="float64"),
            spec(shape=2),
            of(input="y"),
            of(target="y"),
            of(kind="classification", classes=None),
            of(kind="regression"),
            of(names=["a", "b"]),
            of(target="x", kind="binary", classes=None),
            of(scale="big"),
            of(compression="zip"),
        ]
    )


def test_a_spec_that_does_not_describe_the_files_is_refused(isolated: Callable[..., Any], tmp_path: Path) -> None:
    holds(
        isolated(refusals, tmp_path),
        [
            ["dataset.data_dir", "nowhere: there is no such file or folder"],
            ["nowhere*.tfrecord: no file matches it"],
            ["there is no file that ends in .tfrecord or .tfrecords or .tfrec"],
            ["found test, but no train"],
            ["more.tfrecord belongs to no split"],
            ["dataset.features={}: expected a specification of each feature"],
            ["dataset.features.x=float32: expected keys"],
            ["dataset.features.x.kind=zip: expected one of fixed, padded, raw, image"],
            ["dataset.features.x.size: a feature of kind fixed accepts shape, dtype"],
            ["dataset.features.x.size: is missing"],
            ["dataset.features.x.shape=[2, 2]: a padded feature has the shape [length]"],
            ["dataset.features.x.dtype=float64: expected one of int64, float32, string"],
            ["dataset.features.x.shape=2: expected a list of sizes"],
            ["dataset.input=y: there is no such feature; dataset.features has x, label"],
            ["dataset.target=y: there is no such feature; dataset.features has x, label"],
            ["dataset.classes: is missing"],
            ["dataset.classes=3: is for kind=classification"],
            ["dataset.names=['a', 'b']: has 2 names, expected 3"],
            ["dataset.kind=binary: the target has the shape [2], expected one number"],
            ["dataset.scale=big"],
            ["dataset.compression=zip: expected one of none, gzip, zlib"],
        ],
    )
