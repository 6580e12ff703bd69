"""A folder to each class: what image_folder and text_folder share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.files import (
    SPLITS,
    draw_test_examples,
    find_data_dir,
    has_suffix,
    parse_choice,
    parse_count,
    parse_fraction,
    parse_words,
    walk_files,
)
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Outputs, Stream

KINDS = ("auto", "classification", "binary")


@dataclass(frozen=True)
class LabeledFiles:
    """Files, and the class of each by its number."""

    paths: list[str]
    labels: np.ndarray[Any, Any]


class ClassFolders:
    """Files that lie in a folder to each class, and what their targets are.

    Args:
        data_dir: holds folders `train`, and perhaps `validation` (or `val`) and `test`, with the classes' folders
            in them; or the classes' folders themselves.
        suffixes: of the files that count, in lower case; others are left alone.
        classes: the folders to use, in this order; null means all of them, sorted.
        kind: `auto` is binary for two classes, else classification.
        test: the part of each class that is the test split, where there are no folders of splits.
        split_seed: decides which part.

    Raises:
        ConfigError: if a folder is missing or empty, or an option makes no sense.
    """

    def __init__(
        self, data_dir: Any, suffixes: Sequence[str], classes: Any, kind: Any, test: Any, split_seed: Any
    ) -> None:
        self._seed = parse_count(split_seed, "dataset.split_seed")
        wanted = parse_words(classes, "dataset.classes")
        base = find_data_dir(data_dir)
        folders = find_split_folders(base)
        self.names = class_names(folders.get("train", base), wanted)
        self.outputs = outputs_of(kind, self.names)
        part = parse_fraction(test)
        if folders:
            self._found = {
                split: label_files(path, self.names, suffixes, is_train=split == "train", is_whole=not wanted)
                for split, path in folders.items()
            }
        else:
            whole = label_files(base, self.names, suffixes, is_train=True, is_whole=not wanted)
            self._found = divide_files(whole, part, self._seed)

    @property
    def splits(self) -> Collection[str]:
        return tuple(self._found)

    def stream(self, split: str, decode: Callable[[tf.Tensor], tf.Tensor]) -> Stream:
        """The records (path, number of the class) of a split, in an order drawn by the seed.

        Args:
            decode: traced: a path -> the raw input.
        """
        found = self._found[split]
        order = np.random.default_rng([self._seed, 1]).permutation(len(found.paths))
        paths = np.array(found.paths, dtype=object)[order]
        records = tf.data.Dataset.from_tensor_slices((tf.constant(paths, tf.string), found.labels[order]))
        is_binary = self.outputs.kind == "binary"

        def decode_record(path: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return decode(path), tf.cast(label[None], tf.float32) if is_binary else label

        return Stream(records, len(paths), decode_record, lambda path, _: path.decode(errors="replace"))


def find_split_folders(base: Path) -> dict[str, Path]:
    """The folders of splits in a folder; none, where it holds the classes themselves."""
    found: dict[str, Path] = {}
    for path in sorted(base.iterdir()):
        split = SPLITS.get(path.name.lower())
        if split and path.is_dir():
            if split in found:
                raise ConfigError(
                    f"dataset.data_dir={base}: {found[split].name} and {path.name} are both the {split} split"
                )
            found[split] = path
    if found and "train" not in found:
        raise ConfigError(f"dataset.data_dir={base}: there is {' and '.join(sorted(found))} and no folder train")
    return {split: found[split] for split in ("train", "validation", "test") if split in found}


def class_names(base: Path, wanted: Sequence[str]) -> tuple[str, ...]:
    """The names of the classes: of the folders, sorted, or those that are wanted."""
    there = sorted(path.name for path in base.iterdir() if path.is_dir() and not path.name.startswith("."))
    for name in wanted:
        if name not in there:
            raise ConfigError(f"dataset.classes: there is no folder {base / name}; there is {', '.join(there)}")
    names = tuple(wanted or there)
    if len(names) < 2:
        raise ConfigError(
            f"dataset.data_dir: {base} has {len(names)} folder(s), expected one to each of several classes"
        )
    return names


def outputs_of(kind: Any, names: tuple[str, ...]) -> Outputs:
    """What the targets are, for so many classes."""
    parse_choice(kind, "dataset.kind", KINDS)
    if kind == "binary" and len(names) != 2:
        raise ConfigError(
            f"dataset.kind=binary: there are {len(names)} classes ({', '.join(names[:5])}, ...), expected 2"
        )
    if kind == "binary" or (kind == "auto" and len(names) == 2):
        return Outputs("binary", (1,), names)
    return Outputs("classification", (len(names),), names)


def label_files(
    base: Path, names: Sequence[str], suffixes: Sequence[str], *, is_train: bool, is_whole: bool
) -> LabeledFiles:
    """The files of each class in a folder, below which they may lie at any depth.

    Args:
        is_train: every class has to have files.
        is_whole: there may be no other classes.
    """
    there = sorted(path.name for path in base.iterdir() if path.is_dir() and not path.name.startswith("."))
    for name in there if is_whole else ():
        if name not in names:
            raise ConfigError(f"dataset.data_dir: {base / name} is no class of the training split ({', '.join(names)})")
    paths: list[str] = []
    counts = []
    for name in names:
        found = [path for path in walk_files(base / name) if has_suffix(path, suffixes)]
        if not found and is_train:
            raise ConfigError(
                f"dataset.data_dir: the class folder {base / name} has no file that ends in {', '.join(suffixes)}; "
                "fill it, remove it, or name the others in dataset.classes"
            )
        paths += found
        counts.append(len(found))
    if not paths:
        raise ConfigError(f"dataset.data_dir: {base} has no file that ends in {', '.join(suffixes)}")
    return LabeledFiles(paths, np.repeat(np.arange(len(names), dtype=np.int32), counts))


def divide_files(whole: LabeledFiles, part: float, seed: int) -> dict[str, LabeledFiles]:
    """train, and test where that is asked for: the same part of each class."""
    if not part:
        return {"train": whole}
    is_test = np.zeros(len(whole.labels), bool)
    for label in np.unique(whole.labels):
        of_class = np.flatnonzero(whole.labels == label)
        is_test[of_class[draw_test_examples(len(of_class), part, seed)]] = True
    if not is_test.any():
        raise ConfigError(
            f"dataset.test={part:g}: leaves no file to test on; use a larger part, or 0 for no test split"
        )
    return {"train": take_files(whole, ~is_test), "test": take_files(whole, is_test)}


def take_files(whole: LabeledFiles, chosen: np.ndarray[Any, Any]) -> LabeledFiles:
    return LabeledFiles([whole.paths[i] for i in np.flatnonzero(chosen)], whole.labels[chosen])
