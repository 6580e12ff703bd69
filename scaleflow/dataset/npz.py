"""Dataset source: arrays in a NumPy `.npz` file."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np

from scaleflow.dataset.reading.division import Division, find_keys, find_strata, is_by_target, read_keys
from scaleflow.dataset.reading.files import TEST_FRACTION, expand_data_dir, suggest_path
from scaleflow.dataset.reading.targets import check_finite_targets, find_mean_and_deviation, is_wide
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, DivisionKeys, EarlierState, Inputs, Kind, Outputs, Split, map_leaves
from scaleflow.interfaces.options import Seed, TestFraction, Words, check_option, check_options, to_list

#: Suffix of an array's name -> its split.
ENDINGS: Mapping[str, str] = {"_train": "train", "_val": "validation", "_validation": "validation", "_test": "test"}

#: `kind: auto` rejects integers that are not below this: they are probably not classes.
MAX_CLASSES = 10_000

#: A note takes whole floats for possible classes if they have at most this many different values.
MAX_WHOLE_VALUES = 100

#: Floats that are examined first. Targets that are amounts nearly always differ from 0 and 1 there.
SAMPLED_VALUES = 1000

Array = np.ndarray[Any, Any]

#: The kind of a target in an option.
AutoKind = Literal["auto", "classification", "binary", "multi_label", "regression"]

#: The arrays of a split by name.
Part = Mapping[str, Array]


class DrawnPart(NamedTuple):
    """A split of arrays."""

    arrays: Part
    chosen: Array | None  # its rows of the arrays, [n] bool. None: all
    keys: DivisionKeys  # of all examples of the arrays


class Npz:
    """Reads inputs and targets from arrays such as x_train, y_train, x_test, y_test, or x and y.

    Uncompressed arrays (`numpy.savez`) are memory-mapped, so only the used parts are read. They stay mapped unless
    `dataset.cache` reads them into memory, their dtype is converted, or some of their examples are held out. Inputs
    keep their dtype, except that float16, bool and float64 become float32. float64 stays if float32 would round it too
    much. Such targets are scaled, as in tables. The model scales uint8 images to [0, 1].

    Args:
        earlier: the learned state of an earlier run, with the kinds of its targets.

    conf/dataset/npz.yaml describes the other arguments.

    Raises:
        ConfigError: if the file or an array is missing, is not numeric, or does not fit the others.
    """

    @check_options("dataset")
    def __init__(
        self,
        data_dir: str,
        inputs: str | Sequence[str] = "x",
        targets: str | Sequence[str] = "y",
        weights: str | None = None,
        kind: str | Mapping[str, str] = "auto",
        test: TestFraction = TEST_FRACTION,
        split_seed: Seed = 0,
        earlier: EarlierState | None = None,
        split: Split | None = None,
    ) -> None:
        self._input_names = parse_names(inputs, "dataset.inputs")
        self._target_names = parse_names(targets, "dataset.targets")
        kinds = parse_kinds(kind, targets)
        self._weights = weights
        arrays = open_arrays(data_dir)
        rule = split or Split("random")
        names = [*to_list(inputs), *to_list(targets), *to_list(weights or [])]
        parts = find_parts(data_dir, arrays, names, keys=[*find_keys(rule).values()])
        notes: list[str] = []

        def describe_input(name: str) -> Inputs:
            return describe_inputs(data_dir, name, {split: part[name] for split, part in parts.items()})

        def describe_target(name: str) -> Outputs:
            arrays = {split: part[name] for split, part in parts.items()}
            for (
                split,
                array,
            ) in arrays.items():  # before a test split is drawn, so that messages have the rows of the file
                of_split = "" if split == "all" else f" of {split!r}"
                check_finite_targets(f"targets {name!r}{of_split}", array)
            if earlier is not None:
                known = earlier.find_outputs("" if isinstance(targets, str) else name)
                if known is not None:
                    described = describe_array_outputs(find_kind(kinds[name], known), list(arrays.values()))
                    return replace(described, scaling=known.scaling)
            kind = resolve_kind(kinds[name], arrays)
            described = describe_array_outputs(kind, list(arrays.values()))
            if kinds[name] == "auto" and kind == "regression":
                notes.append(describe_whole_floats(name, list(arrays.values())))
            return described

        self.inputs = map_leaves(describe_input, self._input_names)
        self.outputs = map_leaves(describe_target, self._target_names)
        self.notes = tuple(note for note in notes if note)
        single = self.outputs if isinstance(targets, str) else None
        self._splits = divide_parts(
            parts, Division(rule, test, split_seed), lambda part: read_part_keys(part, rule, targets, outputs=single)
        )

    @property
    def splits(self) -> Collection[str]:
        return tuple(self._splits)

    def load(self, split: str) -> Arrays:
        arrays, chosen, keys = self._splits[split]

        def take(name: str) -> Array:
            return arrays[name] if chosen is None else arrays[name][chosen]

        def take_input(name: str, described: Inputs) -> Array:
            array = take(name)
            if array.dtype == described.dtype:
                return array  # a memory-mapped array stays so
            return np.asarray(array, described.dtype)

        def take_target(name: str, described: Outputs) -> Array:
            return convert_targets(described, np.asarray(take(name)))

        return Arrays(
            map_leaves(take_input, self._input_names, self.inputs),
            map_leaves(take_target, self._target_names, self.outputs),
            None if self._weights is None else np.asarray(take(self._weights)),
            rows=None if chosen is None else np.flatnonzero(chosen),
            **vars(keys if chosen is None else keys.select(chosen)),
        )


def parse_names(names: Any, key: str) -> Any:
    """Returns the structure of names: one name, or a dict from each name of a list to itself."""
    if isinstance(names, str) and names:
        return names
    check_option(names, Words | None, key)
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"{key}={names}: expected the name of an array, or a list of different names")
    return {name: name for name in names}


def parse_kinds(kind: Any, targets: str | Sequence[str]) -> dict[str, AutoKind]:
    """Returns the kind of each target by its name, or `auto`."""
    names = to_list(targets)
    kinds = dict.fromkeys(names, "auto") | dict(kind) if isinstance(kind, Mapping) else dict.fromkeys(names, kind)
    unknown = set(kinds) - set(names)
    if unknown:
        raise ConfigError(f"dataset.kind.{min(unknown)}: there is no such target; the targets are {', '.join(names)}")
    for value in kinds.values():
        check_option(value, AutoKind, "dataset.kind")
    return kinds


def read_part_keys(part: Part, rule: Split, targets: Any, outputs: Outputs | None) -> DivisionKeys:
    """Reads the values that divide the examples of a part. `outputs` describes a single target."""
    keys = read_keys(rule, part.__getitem__, lambda row: f"example {row}")
    if outputs is None or not (is_by_target(rule) or (rule.by == "auto" and outputs.is_one_class)):
        return keys
    classes = convert_targets(outputs, np.asarray(part[targets]))
    return replace(keys, strata=find_strata(np.ravel(classes), outputs))


def divide_parts(
    parts: Mapping[str, Part], division: Division, read: Callable[[Part], DivisionKeys]
) -> dict[str, DrawnPart]:
    """Draws splits from arrays that are not divided. `read` returns the values that divide the examples of a part."""
    if set(parts) != {"all"}:
        return {split: DrawnPart(part, None, read(part)) for split, part in parts.items()}
    part = parts["all"]
    keys = read(part)
    count = len(next(iter(part.values())))
    drawn: dict[str, DrawnPart] = {}
    for split, mask in division.draw(keys, count, count).items():
        if mask.any():
            drawn[split] = DrawnPart(part, None if mask.all() else mask, keys)
    return drawn


def open_arrays(data_dir: Any, key: str = "dataset.data_dir") -> dict[str, Array]:
    """Returns the arrays of a file by name. Arrays that are not compressed are memory-mapped.

    `key` is the config key that names the file, for messages.
    """
    path = expand_data_dir(data_dir)
    arrays: dict[str, Array] = {}
    with open_archive(data_dir, key) as archive:
        for info in archive.infolist():
            if info.filename.endswith(".npy"):
                arrays[info.filename.removesuffix(".npy")] = open_member(path, archive, info, key=key)
    return arrays


@contextlib.contextmanager
def open_archive(data_dir: Any, key: str = "dataset.data_dir") -> Iterator[zipfile.ZipFile]:
    path = expand_data_dir(data_dir)
    if not path.is_file():
        raise ConfigError(
            f"{key}={data_dir}: there is no such file; expected a file that numpy.savez has written{suggest_path(path)}"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise ConfigError(f"{key}={data_dir}: is not a complete .npz file ({error})") from error


def open_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, key: str) -> Array:
    with archive.open(info) as file:
        try:
            shape, fortran, dtype = read_array_header(file)
            if dtype.hasobject:
                raise ConfigError(
                    f"{key}={path}: the array {info.filename.removesuffix('.npy')} contains Python "
                    "objects, which scaleflow does not load; save it with a numeric dtype"
                )
            if info.compress_type == zipfile.ZIP_STORED and shape and 0 not in shape:
                start = member_offset(path, info) + file.tell()
                return np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")
            file.seek(0)
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
        except ValueError as error:
            raise ConfigError(f"{key}={path}: {info.filename} cannot be read ({error})") from error


def read_array_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Reads (shape, whether it is in Fortran order, dtype) from the beginning of an array."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def member_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Returns the place of the data of an uncompressed member, after its local header of variable length."""
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        name_bytes = int.from_bytes(file.read(2), "little")
        extra_bytes = int.from_bytes(file.read(2), "little")
    return info.header_offset + 30 + name_bytes + extra_bytes


def find_parts(data_dir: Any, arrays: Part, names: Sequence[str], keys: Sequence[str] = ()) -> dict[str, Part]:
    """Returns the arrays of each split by name, or of `all` if the names have no suffixes.

    The arrays `keys` divide the examples. They may be texts or dates.
    """
    endings = find_endings(data_dir, list(arrays), [*names, *keys])
    return {split: find_arrays(data_dir, arrays, names, ending=ending, keys=keys) for split, ending in endings.items()}


def find_endings(data_dir: Any, available: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Returns the suffix of the names of each split, or "" of `all`. Raises ConfigError if an array is missing."""
    first = names[0]
    endings: dict[str, str] = {}
    for ending, split in ENDINGS.items():
        if first + ending in available:
            if split in endings:
                raise ConfigError(
                    f"dataset.data_dir={data_dir}: both {first}_val and {first}_validation exist; remove one of them"
                )
            endings[split] = ending
    if not endings and first in available:
        endings["all"] = ""
    if "train" not in endings and "all" not in endings:
        raise ConfigError(
            f"dataset.data_dir={data_dir}: there is no array {first}_train or {first}; the arrays are "
            f"{', '.join(available) or 'none'}; set dataset.inputs and dataset.targets to their names"
        )
    for ending in endings.values():
        for name in names:
            if name + ending not in available:
                raise ConfigError(
                    f"dataset.data_dir={data_dir}: there is no array {name + ending}; the arrays are "
                    f"{', '.join(available)}"
                )
    return endings


def check_names(data_dir: Any, names: Sequence[str]) -> None:
    """Rejects a file without arrays of these names. It reads the table of contents only."""
    with open_archive(data_dir) as archive:
        find_endings(data_dir, [name.removesuffix(".npy") for name in archive.namelist()], names)


def find_arrays(
    data_dir: Any, arrays: Part, names: Sequence[str], ending: str, keys: Sequence[str] = ()
) -> dict[str, Array]:
    """Returns the arrays of one split."""
    first = names[0] + ending
    examples = len(arrays[first]) if arrays[first].ndim else 0
    arrays_by_name: dict[str, Array] = {}
    for name in (*names, *keys):
        array = arrays[name + ending]
        is_valid = array.dtype.kind in "biuf" and array.ndim > 0
        if name in keys:
            is_valid = array.dtype.kind in "biufUSM" and array.ndim == 1
        if not is_valid:
            raise ConfigError(
                f"dataset.data_dir={data_dir}: the array {name + ending} is {array.dtype} of shape {array.shape}, "
                "expected numbers, [examples, ...]"
            )
        if len(array) != examples:
            raise ConfigError(
                f"dataset.data_dir={data_dir}: {first} has {examples} examples, but {name + ending} has {len(array)}"
            )
        arrays_by_name[name] = array
    if not examples:
        raise ConfigError(f"dataset.data_dir={data_dir}: {first} is empty")
    return arrays_by_name


def describe_inputs(data_dir: Any, name: str, arrays: Mapping[str, Array]) -> Inputs:
    """Describes an array of inputs, which must have the same shape and dtype in all splits."""
    specs = {split: (x.shape[1:], x.dtype) for split, x in arrays.items()}
    if len(set(specs.values())) > 1:
        description = ", ".join(f"{dtype} {shape} in {split}" for split, (shape, dtype) in specs.items())
        raise ConfigError(f"dataset.data_dir={data_dir}: the array {name} differs between the splits: {description}")
    shape, dtype = next(iter(specs.values()))
    if dtype == np.uint8 and len(shape) >= 2:
        return Inputs(shape, "uint8", scale=1 / 255)
    is_exact = dtype == np.float64 and any(map(is_wide, arrays.values()))
    return Inputs(shape, "float32" if dtype.kind in "fb" and not is_exact else dtype.name)


def find_few_values(arrays: Sequence[Array]) -> set[int]:
    """Returns the values of arrays of floats if they are 0 and 1, or -1 and 1. Else the set is empty."""
    for pair in ((0, 1), (-1, 1)):
        if all(has_only(array, pair) for array in arrays):
            occurring: set[int] = set()
            for value in pair:
                if any((array == value).any() for array in arrays):
                    occurring.add(value)
            return occurring if len(occurring) == 2 else set()
    return set()


def has_only(array: Array, values: tuple[int, int]) -> bool:
    """Returns whether an array has no other values. A sample is examined first, because that mostly suffices."""
    sample = np.ravel(array)[:SAMPLED_VALUES]
    return bool(np.isin(sample, values).all() and np.isin(array, values).all())


def describe_whole_floats(name: str, arrays: Sequence[Array]) -> str:
    """Returns a note if targets of floats may be the numbers of classes: all whole numbers from 0 up. Else ""."""
    values: set[float] = set()
    for array in arrays:
        if array.dtype.kind != "f" or array.size != len(array):
            return ""
        sample = np.ravel(array)[:SAMPLED_VALUES]
        if not (np.isfinite(sample).all() and (sample == np.trunc(sample)).all()):
            return ""
        values.update(np.unique(array).tolist())
    are_consecutive = values == set(map(float, range(len(values))))
    if not are_consecutive or not 3 <= len(values) <= MAX_WHOLE_VALUES:
        return ""
    return (
        f"dataset.kind=auto: the targets {name} are floats that are all whole numbers from 0 to {len(values) - 1}, and "
        "train as amounts; set dataset.kind=classification if they are classes"
    )


def resolve_kind(kind: AutoKind, targets: Mapping[str, Array]) -> Kind:
    """Returns the kind of the targets. `auto` derives it from the targets of all splits."""
    if kind != "auto":
        return kind
    arrays = list(targets.values())
    is_row = any(y.ndim > 1 and y.shape[1:] != (1,) for y in arrays)
    if any(y.dtype.kind == "f" for y in arrays):
        values = find_few_values(arrays)
        if values == {-1, 1}:
            raise ConfigError(
                "dataset.kind=auto: all targets are -1 or 1; if they are two classes, store them as 0 and 1; if they "
                "are amounts, set dataset.kind=regression"
            )
        if values != {0, 1}:
            return "regression"
    low = min(int(y.min()) for y in arrays)
    high = max(int(y.max()) for y in arrays)
    if is_row and (low, high) == (0, 1):
        if all((y.reshape(len(y), -1).sum(axis=1) == 1).all() for y in arrays):
            raise ConfigError(
                "dataset.kind=auto: each row of the targets has a single 1; use dataset.kind=classification if it "
                "marks the class, dataset.kind=multi_label for labels, or dataset.kind=regression for amounts"
            )
        return "multi_label"
    if is_row or low < 0 or high >= MAX_CLASSES:
        raise ConfigError(
            f"dataset.kind=auto: the targets are integers from {low} to {high}, of shape {arrays[0].shape[1:]} each; "
            "set dataset.kind to what they mean"
        )
    return "binary" if high <= 1 else "classification"


def find_kind(kind: AutoKind, known: Outputs) -> Kind:
    """Returns the kind of the targets if an earlier run knows it. 0 and 1 may be two of several classes."""
    if kind != "auto" and kind != known.kind:
        return kind
    return "classification" if known.is_one_class else known.kind


def describe_array_outputs(kind: Kind, targets: list[Array]) -> Outputs:
    shape = targets[0].shape[1:] or (1,)
    if any((y.shape[1:] or (1,)) != shape for y in targets):
        raise ConfigError("dataset: the targets of the splits differ in shape")
    if kind == "classification":
        if shape != (1,):  # one-hot
            for y in targets:
                one_hot_classes(y)
            return Outputs(kind, shape)
        if any(y.dtype.kind == "f" and not np.array_equal(y, np.trunc(y)) for y in targets):
            raise ConfigError("dataset.kind=classification: the targets are floats, expected integers from 0 up")
        return Outputs(kind, (max(2, 1 + max(int(y.max()) for y in targets)),))
    if kind == "binary" and shape != (1,):
        raise ConfigError(f"dataset.kind=binary: the targets have the shape {shape} each, expected one number")
    if kind != "regression" or not is_wide(np.reshape(targets[0], -1)):
        return Outputs(kind, shape)
    return Outputs(kind, shape, scaling=find_mean_and_deviation(np.reshape(targets[0], -1).astype(np.float64)))


def convert_targets(outputs: Outputs, targets: Array) -> Array:
    """Converts targets to [n] int32 for classes, else to [n, *outputs.shape] of `outputs.target_dtype`."""
    if outputs.kind == "classification" and targets.shape[1:] == outputs.shape != (1,):
        targets = one_hot_classes(targets)
    return targets.reshape(len(targets), *outputs.target_shape).astype(outputs.target_dtype)


def one_hot_classes(targets: Array) -> Array:
    """Returns the class of each one-hot row."""
    rows = targets.reshape(len(targets), -1)
    invalid = np.flatnonzero((rows != 0).sum(axis=1) != 1)
    if len(invalid):
        raise ConfigError(
            f"dataset.kind=classification: row {invalid[0]} of the targets does not have exactly one 1; expected [n] "
            "integers or [n, classes] with one 1 in each row"
        )
    return np.asarray(rows.argmax(axis=1))
