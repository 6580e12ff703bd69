"""Files in one folder per class: the code that `image_folder` and `text_folder` share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import tensorflow as tf

from scaleflow.dataset.reading.division import Division, is_by_target, read_path_keys
from scaleflow.dataset.reading.files import (
    class_names,
    describe_unused,
    draw_rows,
    find_data_dir,
    find_split_folders,
    has_suffix,
    list_folders,
    walk_files,
)
from scaleflow.dataset.reading.targets import describe_outputs
from scaleflow.errors import ConfigError
from scaleflow.interfaces import DivisionKeys, EarlierState, Outputs, Split, Stream, extend_classes
from scaleflow.interfaces.options import Seed, TestFraction, Words, check_options

ClassKind = Literal["auto", "classification", "binary"]


@dataclass(frozen=True)
class LabeledFiles:
    """Paths of files, and the class index of each."""

    paths: list[str]
    labels: np.ndarray[Any, Any]
    keys: DivisionKeys = field(default_factory=DivisionKeys)
    unused: Counter[str] = field(default_factory=Counter)  # other files of the folders, by their suffix


class ClassFolders:
    """Base of sources with one folder per class: finds the files of each class, and describes the targets.

    It reads the files with one of the lower-case `suffixes`. The classes that use it describe the arguments.

    Raises ConfigError if a folder is missing or empty, or an option is invalid.
    """

    suffixes: ClassVar[Sequence[str]]

    @check_options("dataset")
    def __init__(
        self,
        data_dir: Any,
        classes: Words | None,
        kind: ClassKind,
        test: TestFraction,
        split_seed: Seed,
        earlier: EarlierState | None,
        split: Split | None,
    ) -> None:
        self._seed = split_seed
        selected = classes or ()
        base = find_data_dir(data_dir)
        folders = find_split_folders(base)
        self.outputs = describe_classes(folders.get("train", base), selected, kind, earlier=earlier)
        names = self.outputs.names or ()
        unknown = self.outputs.ignore
        label = partial(label_files, names=names, suffixes=self.suffixes, is_whole=not selected, unknown=unknown)
        self._files: dict[str, LabeledFiles] = {}
        unused: Counter[str] = Counter()
        for name, path in (folders or {"train": base}).items():
            self._files[name] = label(path, is_train=name == "train" and earlier is None)
            unused += self._files[name].unused
        self.notes = describe_unused(unused, self.suffixes)
        rule = split or Split("random")
        keyed = {}
        for name, labelled_files in self._files.items():
            keyed[name] = replace(labelled_files, keys=read_file_keys(rule, base, labelled_files))
        self._files = keyed if folders else draw_test_files(keyed["train"], Division(rule, test, self._seed))

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

        keys = vars(files.keys.select(order))
        return Stream(records, len(paths), decode, name=lambda path, _: path.decode(errors="replace"), **keys)

    def read(self, path: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError


def describe_classes(base: Path, selected: Sequence[str], kind: ClassKind, earlier: EarlierState | None) -> Outputs:
    """Describes the target. The classes come from an earlier run, or else from the names of the folders."""
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
    """Lists the files of each class folder, at any depth. `names` are the classes in the order of their indices.

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
    counts: list[int] = []
    unused: Counter[str] = Counter()
    for name in (*names, *others):
        class_paths = []
        for path in walk_files(base / name):
            if has_suffix(path, suffixes):
                class_paths.append(path)
            else:
                unused[Path(path).suffix.lower()] += 1
        if not class_paths and is_train:
            raise ConfigError(
                f"dataset.data_dir: the class folder {base / name} has no file that ends in {', '.join(suffixes)}; "
                "add files, remove the folder, or list the other classes in dataset.classes"
            )
        paths += class_paths
        counts.append(len(class_paths))
    if not paths:
        raise ConfigError(f"dataset.data_dir: {base} has no file that ends in {', '.join(suffixes)}")
    label_of_others = 0 if unknown is None else unknown  # without `unknown` there are no others
    labels = [*range(len(names)), *[label_of_others] * len(others)]
    return LabeledFiles(paths, np.repeat(np.array(labels, np.int32), counts), unused=unused)


def read_file_keys(rule: Split, base: Path, files: LabeledFiles) -> DivisionKeys:
    """Returns the values that divide files. With `auto` and `random`, splits have the same share of each class."""
    keys = read_path_keys(rule, base, files.paths)
    if rule.by not in ("auto", "random") and not is_by_target(rule):
        return keys
    strata = files.labels - min(0, files.labels.min())  # from 0 on: the label of unknown classes can be -1
    return replace(keys, strata=strata)


def draw_test_files(whole: LabeledFiles, division: Division) -> dict[str, LabeledFiles]:
    """Divides files into splits. There is no test split if its fraction is 0."""
    if division.rule.by not in ("auto", "random") and not is_by_target(division.rule):
        masks = division.draw(whole.keys, len(whole.labels))
        return {name: take_files(whole, mask) for name, mask in masks.items()}
    if not division.test:
        return {"train": whole}
    is_test = np.zeros(len(whole.labels), bool)
    for label in np.unique(whole.labels):
        of_class = np.flatnonzero(whole.labels == label)
        drawn = draw_rows(len(of_class), division.test, (division.seed, 0x7E57), together=len(of_class))
        is_test[of_class[drawn]] = True
    if not is_test.any():
        raise ConfigError(
            f"dataset.test={division.test:g}: leaves no file to test on; use a larger fraction, or 0 for no test split"
        )
    return {"train": take_files(whole, ~is_test), "test": take_files(whole, is_test)}


def take_files(whole: LabeledFiles, chosen: np.ndarray[Any, Any]) -> LabeledFiles:
    return LabeledFiles(
        [whole.paths[i] for i in np.flatnonzero(chosen)], whole.labels[chosen], whole.keys.select(chosen)
    )
