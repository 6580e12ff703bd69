"""Finds data files and their splits, draws test examples, and checks the options of file datasets."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.records import to_record
from scaleflow.errors import ConfigError

#: Names of folders and prefixes of file names -> the split that they denote.
SPLITS: Mapping[str, str] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}

#: Matches file names that begin with the name of a split: `train.csv`, `test-00000-of-00004.tfrecord`.
SPLIT_PREFIX = re.compile(rf"({'|'.join(SPLITS)})(?=[-_.0-9]|$)", re.IGNORECASE)

#: Key of files whose names denote no split.
ALL = "all"

#: Number of files that are read in parallel, and of consecutive records from each.
INTERLEAVED, BLOCK = 8, 16

#: Default fraction of the examples in the test split, if file names denote no splits.
TEST_FRACTION = 0.2


def expand_data_dir(data_dir: Any) -> Path:
    """Returns `dataset.data_dir` with `~` expanded. Raises ConfigError if it is not a path."""
    if not isinstance(data_dir, str) or not data_dir.strip():
        raise ConfigError(f"dataset.data_dir={data_dir}: expected a path")
    return Path(os.path.expanduser(data_dir.strip()))  # noqa: PTH111  (Path.expanduser raises for an unknown user)


def find_data_dir(data_dir: Any) -> Path:
    path = expand_data_dir(data_dir)
    if not path.is_dir():
        reason = "is a file, expected a folder" if path.exists() else "there is no such folder"
        raise ConfigError(f"dataset.data_dir={data_dir}: {reason}")
    return path


def find_files(data_dir: Any, suffixes: Sequence[str]) -> dict[str, list[str]]:
    """Returns the sorted files of each split, or all of them as `all` if their names denote no splits.

    Args:
        data_dir: a file, a glob, or a folder. In a folder, subfolders `train`, `validation` (or `val`), `test`, or
            files whose names begin with these words, are the splits.
        suffixes: lower-case suffixes; names in a folder must end with one, or contain it before a `-` or `.`.

    Raises ConfigError if there is no file, or there are splits without `train`.
    """
    path = expand_data_dir(data_dir)
    if path.is_file():
        return {ALL: [str(path)]}
    if path.is_dir():
        return find_in_folder(data_dir, path, suffixes)
    if glob.has_magic(str(path)):
        matches = sorted(name for name in glob.glob(str(path), recursive=True) if Path(name).is_file())  # noqa: PTH207
        if not matches:
            raise ConfigError(f"dataset.data_dir={data_dir}: no file matches it")
        return {ALL: matches}
    raise ConfigError(f"dataset.data_dir={data_dir}: there is no such file or folder")


def find_in_folder(data_dir: Any, path: Path, suffixes: Sequence[str]) -> dict[str, list[str]]:
    names = (name for name in walk_files(path) if has_suffix(name, suffixes))
    return divide_files(data_dir, ((name, Path(name).relative_to(path)) for name in names), suffixes)


def divide_files(data_dir: Any, names: Iterable[tuple[str, PurePath]], suffixes: Sequence[str]) -> dict[str, list[str]]:
    """Divides files, given with their paths relative to the data folder, into splits as `find_files` describes."""
    files: dict[str, list[str]] = {}
    others: list[str] = []
    for name, relative in names:
        split = split_of(relative)
        files.setdefault(split, []).append(name) if split else others.append(name)
    if not files and not others:
        raise ConfigError(f"dataset.data_dir={data_dir}: there is no file with {' or '.join(suffixes)} in its name")
    if not files:
        return {ALL: others}
    if "train" not in files:
        raise ConfigError(
            f"dataset.data_dir={data_dir}: found {' and '.join(sorted(files))}, but no train; rename a folder or the "
            "files so that their names begin with train"
        )
    if others:
        raise ConfigError(
            f"dataset.data_dir={data_dir}: {others[0]} belongs to no split, but other files do; move it, or rename it "
            "so that its name begins with train, validation or test"
        )
    return files


def split_of(path: PurePath) -> str | None:
    """Returns the split that a path denotes, relative to the data folder."""
    first = path.parts[0]
    if len(path.parts) > 1:
        return SPLITS.get(first.lower())
    match = SPLIT_PREFIX.match(first)
    return SPLITS[match[1].lower()] if match else None


def walk_files(path: Path) -> Iterable[str]:
    """Yields every file below a folder in a fixed order, except hidden ones."""
    for base, folders, names in os.walk(path, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield str(Path(base, name))


def has_suffix(name: str, suffixes: Sequence[str]) -> bool:
    base = Path(name).name.lower()
    return any(base.endswith(suffix) or f"{suffix}-" in base or f"{suffix}." in base for suffix in suffixes)


def interleave_files(files: Sequence[str], records: Any, block: int = BLOCK) -> tf.data.Dataset:
    """Reads the records of several files in parallel, `block` consecutive ones of each, always in the same order.

    `records` maps (index of the file int64, path) to a dataset of its records. Traced.
    """
    numbered = tf.data.Dataset.from_tensor_slices(
        (tf.range(len(files), dtype=tf.int64), tf.constant(list(files), tf.string))
    )
    return numbered.interleave(
        records,
        cycle_length=min(INTERLEAVED, len(files)),
        block_length=block,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


def list_splits(files: Mapping[str, Sequence[str]], test: float) -> tuple[str, ...]:
    """Returns the names of the splits; without named splits there is `test` only if its fraction is not 0."""
    return tuple(files) if ALL not in files else ("train", "test") if test else ("train",)


def divide_records(
    records: tf.data.Dataset, count: int, split: str, test: float, seed: int
) -> tuple[tf.data.Dataset, int]:
    """Returns the records of one split and their number, if file names denote no splits. `seed` draws the test
    records.
    """
    held_out = round(count * test)
    if not held_out:
        return (records, count) if split == "train" else (records.take(0), 0)
    size = held_out if split == "test" else count - held_out
    return draw(records, count, held_out, (seed, 0x7E57), split == "test"), size


def draw(
    records: tf.data.Dataset, count: int, held_out: int, seeds: tuple[int, int], is_held_out: bool
) -> tf.data.Dataset:
    """Returns the `held_out` of `count` records that the seeds select, or all others, in their order.

    The records have fixed shapes and are the same at each iteration.
    """
    max_index = tf.constant(max(count - 1, 1), tf.int64)
    seed = tf.constant(seeds, tf.int64)

    def chosen(portion: tf.Tensor, *record: Any) -> Any:
        indices = portion * BLOCK + tf.range(tf.shape(tf.nest.flatten(record)[0], tf.int64)[0])
        is_drawn = tf.random.experimental.index_shuffle(indices, seed, max_index) < held_out
        is_selected = is_drawn if is_held_out else tf.logical_not(is_drawn)
        return tf.nest.map_structure(lambda each: tf.boolean_mask(each, is_selected), to_record(record))

    blocks = records.batch(BLOCK).enumerate().map(lambda portion, *record: chosen(portion, *record))
    size = held_out if is_held_out else count - held_out
    return blocks.unbatch().apply(tf.data.experimental.assert_cardinality(size))


def draw_test_examples(count: int, fraction: float, seed: int) -> np.ndarray[Any, Any]:
    """Returns which examples form the test split: [count] bool."""
    is_test = np.zeros(count, bool)
    is_test[np.random.default_rng([seed, 0x7E57]).permutation(count)[: round(count * fraction)]] = True
    return is_test


def parse_fraction(value: Any, key: str = "dataset.test") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        hint = "; scaleflow.evaluate --split all evaluates every example" if value == 1 else ""
        raise ConfigError(f"{key}={value}: expected a number from 0 to less than 1{hint}")
    return float(value)


def parse_count(value: Any, key: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key}={value}: expected an integer, at least {least}")
    return value


def parse_flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value}: expected true or false")
    return value


def is_shape(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)


def parse_choice(value: Any, key: str, options: Sequence[str]) -> str:
    if value not in options:
        raise ConfigError(f"{key}={value}: expected one of {', '.join(options)}")
    return str(value)


def parse_words(value: Any, key: str) -> list[str]:
    """Returns a list of strings; [] for null."""
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(word, str) for word in value):
        raise ConfigError(f"{key}={value}: expected a list such as [a, b]")
    return list(value)
