"""Files of examples: which belong to which split, and which examples are held out for the test."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.records import to_record
from scaleflow.errors import ConfigError

#: Names of folders, and beginnings of files' names, that say which split they hold.
SPLITS: Mapping[str, str] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}

#: A file's name that begins with that of a split: `train.csv`, `test-00000-of-00004.tfrecord`.
SPLIT_PREFIX = re.compile(rf"({'|'.join(SPLITS)})(?=[-_.0-9]|$)", re.IGNORECASE)

#: Stands for the splits of files whose names tell of none.
ALL = "all"

#: Of several files so many are read at once, each in blocks of so many records.
INTERLEAVED, BLOCK = 8, 16

#: The part of the examples that is the test split where the files name none.
TEST_FRACTION = 0.2


def expand_data_dir(data_dir: Any) -> str:
    """What `dataset.data_dir` says, with `~` expanded.

    Raises:
        ConfigError: if it is no path.
    """
    if not isinstance(data_dir, str) or not data_dir.strip():
        raise ConfigError(f"dataset.data_dir={data_dir}: expected a path")
    return os.path.expanduser(data_dir.strip())  # noqa: PTH111  (a Path would take a glob's trailing slash)


def find_data_dir(data_dir: Any) -> Path:
    """`dataset.data_dir` as a folder that is there."""
    path = Path(expand_data_dir(data_dir))
    if not path.is_dir():
        reason = "is a file, expected a folder" if path.exists() else "there is no such folder"
        raise ConfigError(f"dataset.data_dir={data_dir}: {reason}")
    return path


def find_files(data_dir: Any, suffixes: Sequence[str]) -> dict[str, list[str]]:
    """The files of each split, sorted; where their names tell of no splits, all of them are `all`.

    Args:
        data_dir: a file, a glob, or a folder; in a folder, subfolders `train`, `validation` (or `val`), `test`, or
            files whose names begin so, are the splits.
        suffixes: what a file's name in a folder has to contain behind a dot, in lower case.

    Raises:
        ConfigError: if there is no file, or there are splits without `train`.
    """
    path = Path(expand_data_dir(data_dir))
    if path.is_file():
        return {ALL: [str(path)]}
    if path.is_dir():
        return find_in_folder(data_dir, path, suffixes)
    if glob.has_magic(str(path)):
        found = sorted(name for name in glob.glob(str(path), recursive=True) if Path(name).is_file())  # noqa: PTH207
        if not found:
            raise ConfigError(f"dataset.data_dir={data_dir}: no file matches it")
        return {ALL: found}
    raise ConfigError(f"dataset.data_dir={data_dir}: there is no such file or folder")


def find_in_folder(data_dir: Any, path: Path, suffixes: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    loose: list[str] = []
    for name in walk_files(path):
        if not has_suffix(name, suffixes):
            continue
        split = split_of(Path(name).relative_to(path))
        found.setdefault(split, []).append(name) if split else loose.append(name)
    if not found and not loose:
        raise ConfigError(f"dataset.data_dir={data_dir}: there is no file with {' or '.join(suffixes)} in its name")
    if not found:
        return {ALL: loose}
    if "train" not in found:
        raise ConfigError(
            f"dataset.data_dir={data_dir}: there is {' and '.join(sorted(found))} and no train; name a folder or the "
            "files so that they begin with train"
        )
    if loose:
        raise ConfigError(
            f"dataset.data_dir={data_dir}: {loose[0]} belongs to no split, and others do; move it away, or name it so "
            "that it begins with train, validation or test"
        )
    return found


def split_of(path: Path) -> str | None:
    """The split that a file's folder or name tells of, relative to the data's folder."""
    first = path.parts[0]
    if len(path.parts) > 1:
        return SPLITS.get(first.lower())
    match = SPLIT_PREFIX.match(first)
    return SPLITS[match[1].lower()] if match else None


def walk_files(path: Path) -> Iterable[str]:
    """Every file below a folder, sorted; hidden ones left out."""
    for base, folders, names in os.walk(path, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield str(Path(base, name))


def has_suffix(name: str, suffixes: Sequence[str]) -> bool:
    base = Path(name).name.lower()
    return any(base.endswith(suffix) or f"{suffix}-" in base or f"{suffix}." in base for suffix in suffixes)


# ---------------------------------------------------------------------------------------------
# Records of several files
# ---------------------------------------------------------------------------------------------


def interleave_files(files: Sequence[str], records: Any, block: int = BLOCK) -> tf.data.Dataset:
    """The records of all files, several files read at once, always in the same order.

    Args:
        files: in the order of their numbers.
        records: traced, (a file's number int64, its path) -> a dataset of its records.
        block: so many of one file's follow each other.
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
    """The splits that there are, where a part of files without any may be the test's."""
    return tuple(files) if ALL not in files else ("train", "test") if test else ("train",)


def divide_records(
    records: tf.data.Dataset, count: int, split: str, test: float, seed: int
) -> tuple[tf.data.Dataset, int]:
    """The records of one split where the files name none: which are the test's is drawn by the seed.

    Returns:
        (the split's records, how many they are).
    """
    held_out = round(count * test)
    if not held_out:
        return (records, count) if split == "train" else (records.take(0), 0)
    size = held_out if split == "test" else count - held_out
    return draw(records, count, held_out, (seed, 0x7E57), split == "test"), size


def draw(
    records: tf.data.Dataset, count: int, held_out: int, seeds: tuple[int, int], is_held_out: bool
) -> tf.data.Dataset:
    """The records that are held out, or the others, in their order.

    Args:
        records: of fixed shapes, the same at each iteration.
        count: how many there are.
        held_out: how many of them are held out.
        seeds: decide which.
        is_held_out: gives the ones that are held out.
    """
    last = tf.constant(max(count - 1, 1), tf.int64)
    words = tf.constant(seeds, tf.int64)

    def chosen(portion: tf.Tensor, *record: Any) -> Any:
        numbers = portion * BLOCK + tf.range(tf.shape(tf.nest.flatten(record)[0], tf.int64)[0])
        is_drawn = tf.random.experimental.index_shuffle(numbers, words, last) < held_out
        is_in = is_drawn if is_held_out else tf.logical_not(is_drawn)
        return tf.nest.map_structure(lambda each: tf.boolean_mask(each, is_in), to_record(record))

    portions = records.batch(BLOCK).enumerate().map(lambda portion, *record: chosen(portion, *record))
    size = held_out if is_held_out else count - held_out
    return portions.unbatch().apply(tf.data.experimental.assert_cardinality(size))


def draw_test_examples(count: int, fraction: float, seed: int) -> np.ndarray[Any, Any]:
    """Which of so many examples are the test's: [count] bool."""
    chosen = np.zeros(count, bool)
    chosen[np.random.default_rng([seed, 0x7E57]).permutation(count)[: round(count * fraction)]] = True
    return chosen


# ---------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------


def parse_fraction(value: Any, key: str = "dataset.test") -> float:
    """A part of the examples, in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"{key}={value}: expected a number from 0 to less than 1")
    return float(value)


def parse_count(value: Any, key: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key}={value}: expected an integer, at least {least}")
    return value


def parse_choice(value: Any, key: str, options: Sequence[str]) -> str:
    if value not in options:
        raise ConfigError(f"{key}={value}: expected one of {', '.join(options)}")
    return str(value)


def parse_words(value: Any, key: str) -> list[str]:
    """A list of names; null is an empty one."""
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(word, str) for word in value):
        raise ConfigError(f"{key}={value}: expected a list such as [a, b]")
    return list(value)
