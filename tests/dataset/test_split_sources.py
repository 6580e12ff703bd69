"""`dataset.split` by group, for each source: no group is in two splits, and each row is in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Dataset, Inputs, Outputs, Split, Stream, Target

N = 120
GROUPS = np.random.default_rng(0).permutation(np.repeat(np.arange(24), 5))
X = np.stack([GROUPS, np.arange(N)], axis=1).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 2, N)
NAMES = np.array([f"p{group}" for group in GROUPS])


class Own:
    inputs, outputs, splits = Inputs((2,)), Outputs("binary", (1,)), ("train",)

    def __init__(self, streams: bool, **keys: Any) -> None:
        self._streams, self._keys = streams, keys

    def load(self, split: str) -> Arrays | Stream:
        import tensorflow as tf

        targets = Y[:, None].astype(np.float32)
        if not self._streams:
            return Arrays(X, targets, **self._keys)
        return Stream(tf.data.Dataset.from_tensor_slices((X, targets)), N, **self._keys)


def open_npz(folder: Path, split: Split) -> Any:
    from scaleflow.dataset.npz import Npz

    np.savez(folder / "a.npz", x=X, y=Y, g=NAMES)
    return Npz(str(folder / "a.npz"), split=split)


def open_records(folder: Path, split: Split) -> Any:
    import tensorflow as tf

    from scaleflow.dataset.tfrecord import TFRecord

    feature = tf.train.Feature
    with tf.io.TFRecordWriter(str(folder / "a.tfrecord")) as writer:
        for x, y, name in zip(X, Y, NAMES, strict=True):
            values = {
                "x": feature(float_list=tf.train.FloatList(value=x)),
                "y": feature(int64_list=tf.train.Int64List(value=[y])),
                "g": feature(bytes_list=tf.train.BytesList(value=[name.encode()])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=values)).SerializeToString())
    specs = {
        "x": {"shape": [2], "dtype": "float32"},
        "y": {"shape": [], "dtype": "int64"},
        "g": {"shape": [], "dtype": "string"},
    }
    return TFRecord(str(folder), specs, "x", "y", classes=2, split=split)


def open_pictures(folder: Path, split: Split) -> Any:
    import tensorflow as tf

    from scaleflow.dataset.image_folder import ImageFolder

    for name in "ab":
        (folder / name).mkdir()
    for place, (group, y) in enumerate(zip(GROUPS, Y, strict=True)):
        picture = tf.io.encode_png(np.full((2, 2, 3), group, np.uint8)).numpy()
        (folder / "ab"[y] / f"{NAMES[place]}_{place}.png").write_bytes(picture)
    rows = [f"{'ab'[y]}/{NAMES[place]}_{place}.png,{NAMES[place]}" for place, y in enumerate(Y)]
    (folder / "metadata.csv").write_text("\n".join(["file_name,g", *rows]))
    return ImageFolder(str(folder), (2, 2), split=split)


Open = Callable[[Path, Split], Any]


@pytest.mark.parametrize(
    ("make", "split", "cache"),
    [
        (open_npz, Split("group", "g"), "auto"),
        (open_records, Split("group", "g"), "none"),
        (open_records, Split("hash", "g"), "auto"),
        (open_pictures, Split("group", pattern=r"(p\d+)_"), "auto"),
        (open_pictures, Split("group", "g"), "auto"),
        (lambda folder, split: Own(False, groups=NAMES), Split("group"), "auto"),
        (lambda folder, split: Own(False, groups=GROUPS * 10**12), Split("group"), "auto"),
        (lambda folder, split: Own(True, groups=NAMES), Split("hash"), "none"),
    ],
)
def test_no_group_is_in_two_splits(make: Open, split: Split, cache: Any, tmp_path: Path) -> None:
    from scaleflow.dataset.batches.splits import prepare_splits

    options = Dataset(Target("dataset", "x"), split=split, cache=cache)
    prepared = prepare_splits(make(tmp_path, split), options, 0, preprocesses=False)
    groups = [rows.read(np.arange(len(rows)))[0].reshape(len(rows), -1)[:, 0] for rows in prepared.raw.values()]
    assert sum(map(len, groups)) == N
    assert len({*np.concatenate(groups)}) == sum(len({*each}) for each in groups) == 24
    assert prepared.learned is not None
    assert prepared.learned.split["by"] == split.by


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "gives groups in its Arrays or Stream"),
        ({"groups": np.array(["a"])}, "1 groups for 120 examples"),
        ({"groups": np.where(GROUPS == 3, np.nan, GROUPS)}, "5 missing values, the first in example"),
    ],
)
def test_groups_of_an_own_dataset_that_do_not_fit_are_refused(keys: dict[str, Any], words: str) -> None:
    from scaleflow.dataset.batches.splits import prepare_splits

    with pytest.raises(ConfigError, match=words):
        prepare_splits(Own(False, **keys), Dataset(Target("dataset", "x"), split=Split("group")), 0)


@pytest.mark.parametrize("form", ["%d/%m/%Y", "%m/%d/%Y"])
def test_the_times_of_a_table_are_read_as_dataset_dates_says(form: str, tmp_path: Path) -> None:
    from scaleflow.dataset.table import Table

    days = np.datetime64("2024-01-01") + np.random.default_rng(2).permutation(N)
    days = np.array([day if day.astype(object).day < 13 else day - 20 for day in days])  # two readings each
    rows = [f"{day.astype(object):{form}},{n},{Y[n]}" for n, day in enumerate(days)]
    (tmp_path / "a.csv").write_text("\n".join(["day,x,y", *rows]), encoding="utf-8")
    table = Table(str(tmp_path / "a.csv"), "y", dates=form, split=Split("time", "day"), cache_dir=str(tmp_path))
    train, test = (days[table.load(split).read(np.arange(9))[0]["x"].astype(int)] for split in ("train", "test"))
    assert train.max() < test.min()
