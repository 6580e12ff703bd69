"""Files in one folder per class: the code that `image_folder` and `text_folder` share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from scaleflow.dataset.reading.class_names import describe_outputs
from scaleflow.dataset.reading.files import (
    class_names,
    describe_unused,
    draw_test_examples,
    find_data_dir,
    find_split_folders,
    has_suffix,
    list_folders,
    walk_files,
)
from scaleflow.errors import ConfigError
from scaleflow.interfaces import EarlierState, Outputs, Stream, extend_classes
from scaleflow.interfaces.options import Seed, TestFraction, Words, check_options

ClassKind = Literal["auto", "classification", "binary"]


@dataclass(frozen=True)
class LabeledFiles:
    """Paths of files, and the class index of each."""

    paths: list[str]
    labels: np.ndarray[Any, Any]
    unused: Counter[str] = field(default_factory=Counter)  # other files of the folders, by their suffix


class ClassFolders:
    """Base of sources with one folder per class: finds the files of each class, and describes the targets.

    It reads the files with one of the lower-case `suffixes`. The classes that use it describe the other arguments.

    Raises ConfigError if a folder is missing or empty, or an option is invalid.
    """

    @check_options("dataset")
    def __init__(
        self,
        data_dir: Any,
        suffixes: Sequence[str],
        classes: Words | None,
        kind: ClassKind,
        test: TestFraction,
        split_seed: Seed,
        earlier: EarlierState | None,
    ) -> None:
        self._seed, selected = split_seed, classes or ()
        base = find_data_dir(data_dir)
        folders = find_split_folders(base)
        self.outputs = describe_classes(folders.get("train", base), selected, kind, earlier)
        names, unknown = self.outputs.names or (), self.outputs.ignore
        label = partial(label_files, names=names, suffixes=suffixes, is_whole=not selected, unknown=unknown)
        self._files = {
            split: label(path, is_train=split == "train" and earlier is None)
            for split, path in (folders or {"train": base}).items()
        }
        unused = sum((each.unused for each in self._files.values()), Counter())
        self.notes = describe_unused(unused, suffixes)
        if not folders:
            self._files = draw_test_files(self._files["train"], test, self._seed)

    @property
    def splits(self) -> Collection[str]:
        return tuple(self._files)

    def load(self, split: str) -> Stream:
        """Returns records (path, class index), in an order drawn with the seed."""
        files = self._files[split]
        order = np.random.default_rng([self._seed, 1]).permutation(len(files.paths))
        paths = np.array(files.paths, dtype=object)[order]
        records = tf.data.Dataset.from_tensor_slices((tf.constant(paths, tf.string), files.labels[order]))
        outputs = self.outputs

        def decode(path: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return self.read(path), tf.reshape(tf.cast(label, outputs.target_dtype), outputs.target_shape)

        return Stream(records, len(paths), decode, lambda path, _: path.decode(errors="replace"))

    def read(self, path: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError


def describe_classes(base: Path, selected: Sequence[str], kind: ClassKind, earlier: EarlierState | None) -> Outputs:
    """Describes the target: the classes of an earlier run if there was one, or else those of the folders."""
    known = None if earlier is None else earlier.find_outputs()
    if earlier is not None and known is not None and known.names:
        return extend_classes(known, selected or list_folders(base)) if earlier.extends else known
    names = class_names(base, selected)
    if kind == "binary" and len(names) != 2:
        raise ConfigError(
            f"dataset.kind=binary: there are {len(names)} classes ({', '.join(names[:5])}, ...), expected 2; use "
            "dataset.kind=classification, or choose two with dataset.classes"
        )
    return describe_outputs(kind, len(names), names)


def label_files(
    base: Path,
    names: Sequence[str],
    suffixes: Sequence[str],
    *,
    is_train: bool,
    is_whole: bool,
    unknown: int | None = None,
) -> LabeledFiles:
    """Lists the files of each class folder, at any depth; `names` are the classes in the order of their indices.

    If it `is_train`, every class must have files; if it `is_whole`, no other class folders may exist, unless `unknown`
    is their label.
    """
    others = [name for name in list_folders(base) if name not in names] if is_whole else []
    if others and unknown is None:
        raise ConfigError(
            f"dataset.data_dir: {base / others[0]} is not a class of the training split ({', '.join(names)}); remove "
            "the folder, or add it to the training split"
        )
    paths: list[str] = []
    counts, unused = [], Counter[str]()
    for name in (*names, *others):
        found = list(walk_files(base / name))
        class_paths = [path for path in found if has_suffix(path, suffixes)]
        unused.update(Path(path).suffix.lower() for path in found if not has_suffix(path, suffixes))
        if not class_paths and is_train:
            raise ConfigError(
                f"dataset.data_dir: the class folder {base / name} has no file that ends in {', '.join(suffixes)}; "
                "add files, remove the folder, or list the other classes in dataset.classes"
            )
        paths += class_paths
        counts.append(len(class_paths))
    if not paths:
        raise ConfigError(f"dataset.data_dir: {base} has no file that ends in {', '.join(suffixes)}")
    labels = [*range(len(names)), *[unknown or 0] * len(others)]
    return LabeledFiles(paths, np.repeat(np.array(labels, np.int32), counts), unused)


def draw_test_files(whole: LabeledFiles, part: float, seed: int) -> dict[str, LabeledFiles]:
    """Splits files into train and test, with the same test fraction in each class; no test split for 0."""
    if not part:
        return {"train": whole}
    is_test = np.zeros(len(whole.labels), bool)
    for label in np.unique(whole.labels):
        of_class = np.flatnonzero(whole.labels == label)
        is_test[of_class[draw_test_examples(len(of_class), part, seed)]] = True
    if not is_test.any():
        raise ConfigError(
            f"dataset.test={part:g}: leaves no file to test on; use a larger fraction, or 0 for no test split"
        )
    return {"train": take_files(whole, ~is_test), "test": take_files(whole, is_test)}


def take_files(whole: LabeledFiles, chosen: np.ndarray[Any, Any]) -> LabeledFiles:
    return LabeledFiles([whole.paths[i] for i in np.flatnonzero(chosen)], whole.labels[chosen])
