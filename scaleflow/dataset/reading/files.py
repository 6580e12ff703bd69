"""Finds data files and their splits, in folders and object stores; draws test examples.

The launcher uses it: no TensorFlow.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import numpy as np

from scaleflow.errors import ConfigError, find_similar, read_reason
from scaleflow.files.object_store import call_store, connect, split_address

#: The split that the name of a folder, or the beginning of the name of a file, denotes.
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

#: Suffixes of pictures.
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")

#: Suffixes of texts.
TEXT_SUFFIXES = (".txt",)

#: Suffixes of TFRecord files.
RECORD_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")

#: What may follow the suffix of a data file: `.tfrecord-00000-of-00004`, `.csv.gz`. A `.csv.bak` is no data file.
AFTER_SUFFIX = re.compile(r"(-\d+(-of-\d+)?|\.(gz|gzip|zlib|zst|bz2|lz4))+$")

#: Key of files whose names denote no split.
ALL = "all"

#: Rows of a table that are drawn together, so that a draw of very many rows takes little time and memory.
DRAWN_TOGETHER = 65_536

#: Default fraction of the examples in the test split, if file names denote no splits.
TEST_FRACTION = 0.2


def expand_data_dir(data_dir: Any) -> Path:
    """Returns `dataset.data_dir` with `~` expanded. Raises ConfigError if it is not a path."""
    if not isinstance(data_dir, str) or not data_dir.strip():
        raise ConfigError(f"dataset.data_dir={data_dir}: expected a path")
    return Path(os.path.expanduser(data_dir))  # noqa: PTH111  (Path.expanduser raises for an unknown user)


def find_data_dir(data_dir: Any) -> Path:
    path = expand_data_dir(data_dir)
    if not path.is_dir():
        reason = "is a file, expected a folder" if path.exists() else f"there is no such folder{suggest_path(path)}"
        raise ConfigError(f"dataset.data_dir={data_dir}: {reason}")
    return path


def find_files(data_dir: Any, suffixes: Sequence[str]) -> dict[str, list[str]]:
    """Returns the sorted files of each split, or all of them as `all` if their names denote no splits.

    Args:
        data_dir: a file, a glob, or a folder. In a folder, subfolders `train`, `validation` (or `val`), `test`, or
            files whose names begin with these words, are the splits.
        suffixes: lower-case suffixes. Names in a folder must have one of them: see `has_suffix`.

    Raises:
        ConfigError: if there is no file, or there are splits without `train`.
    """
    path = expand_data_dir(data_dir)
    matches = match_files(str(path), f"dataset.data_dir={data_dir}")
    if matches is not None:
        return {ALL: matches}
    names = (name for name in walk_files(path) if has_suffix(name, suffixes))
    return divide_files(data_dir, ((name, Path(name).relative_to(path)) for name in names), suffixes)


def match_files(path: str, label: str) -> list[str] | None:
    """Returns the sorted files that a path or a glob denotes; None if it is a folder.

    Raises ConfigError if no file matches. The message begins with `label`.
    """
    if Path(path).is_file():
        return [path]
    if Path(path).is_dir():
        return None
    matches = sorted(name for name in glob.glob(path, recursive=True) if Path(name).is_file())  # noqa: PTH207
    if not matches:
        has_magic = glob.has_magic(path)
        reason = "no file matches it" if has_magic else f"there is no such file or folder{suggest_path(Path(path))}"
        raise ConfigError(f"{label}: {reason}")
    return matches


def suggest_path(path: Path) -> str:
    """Returns `; did you mean data/house.csv?` with the name that is most similar to a missing path, or ""."""
    with contextlib.suppress(OSError):
        similar = find_similar(path.name, os.listdir(path.parent))  # noqa: PTH208  (names only)
        if similar:
            return f"; did you mean {path.with_name(similar)}?"
    return ""


def divide_files(data_dir: Any, names: Iterable[tuple[str, PurePath]], suffixes: Sequence[str]) -> dict[str, list[str]]:
    """Divides files, given with their paths relative to the data folder, into splits as `find_files` describes."""
    files: dict[str, list[str]] = {}
    others: list[str] = []
    for name, relative in names:
        split = split_of(relative)
        files.setdefault(split, []).append(name) if split else others.append(name)
    if not files and not others:
        raise ConfigError(f"dataset.data_dir={data_dir}: there is no file that ends in {' or '.join(suffixes)}")
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


def find_split_folders(base: Path) -> dict[str, Path]:
    """Returns the folder of each split; {} if the folder contains the class folders directly."""
    folders: dict[str, Path] = {}
    for path in sorted(base.iterdir()):
        split = SPLITS.get(path.name.lower())
        if split and path.is_dir():
            if split in folders:
                raise ConfigError(
                    f"dataset.data_dir={base}: {folders[split].name} and {path.name} are both the {split} split; "
                    "remove one of them"
                )
            folders[split] = path
    if folders and "train" not in folders:
        raise ConfigError(
            f"dataset.data_dir={base}: found {' and '.join(sorted(folders))}, but no folder train; add it, or name "
            "the folders after classes only"
        )
    return {split: folders[split] for split in ("train", "validation", "test") if split in folders}


def class_names(base: Path, wanted: Sequence[str]) -> tuple[str, ...]:
    """Returns the class names: all folders, sorted, or the wanted ones."""
    available = list_folders(base)
    for name in wanted:
        if name not in available:
            raise ConfigError(
                f"dataset.classes: there is no folder {base / name}; the folders are {', '.join(available)}"
            )
    names = tuple(wanted or available)
    if len(names) < 2:
        raise ConfigError(
            f"dataset.data_dir: {base} has {len(names)} folder(s), expected one folder for each of at least two classes"
        )
    return names


def list_folders(base: Path) -> list[str]:
    return sorted(path.name for path in base.iterdir() if path.is_dir() and not path.name.startswith("."))


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
    """Returns whether a name ends with a suffix; the number of a shard, or the suffix of a compression, may follow."""
    return AFTER_SUFFIX.sub("", Path(name).name.lower()).endswith(tuple(suffixes))


def describe_unused(unused: Counter[str], suffixes: Sequence[str]) -> tuple[str, ...]:
    """Returns a note about files that are not read, by suffix. It returns nothing if all files are read."""
    if not unused:
        return ()
    counts = ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in unused.most_common(5))
    count = unused.total()
    return (
        f"dataset.data_dir: {count:,} file{'s are' if count > 1 else ' is'} not used ({counts}): files that end in "
        f"{', '.join(suffixes)} are read; convert what should be",
    )


def list_splits(files: Mapping[str, Sequence[str]], test: float) -> tuple[str, ...]:
    """Returns the names of the splits. If files name no splits, there is a test split unless its fraction is 0."""
    if ALL not in files:
        return tuple(files)
    return ("train", "test") if test else ("train",)


def draw_rows(
    count: int, fraction: float, seeds: Sequence[int], together: int = DRAWN_TOGETHER
) -> np.ndarray[Any, Any]:
    """Draws a fraction of examples: [count] bool. The same share is drawn of each `together` examples."""
    drawn = np.zeros(count, bool)
    for group, first in enumerate(range(0, count, max(1, together))):
        end = min(first + together, count)
        random = np.random.default_rng([*seeds, group] if group else list(seeds))
        chosen = random.permutation(end - first)[: round(end * fraction) - round(first * fraction)]
        drawn[first + chosen] = True
    return drawn


KEY = "dataset.data_dir"

#: Maximum number of ETags that are read. Each one takes a request.
MAX_ETAGS = 200

#: Requests that are sent in parallel.
REQUESTS = 16


def find_in_store(address: str, suffixes: Sequence[str]) -> dict[str, list[str]]:
    """Returns the addresses of the files of each split, or all of them as `all`, as `find_files` does for a folder.

    Args:
        address: `s3://BUCKET/PATH` and the like: a file, a glob, or a prefix.
        suffixes: names below a prefix must have one of them: see `has_suffix`.

    Raises ConfigError if there is no such file, or if the store does not answer or refuses the request.
    """
    root, names = list_in_store(KEY, address)
    if root in names or root != split_address(KEY, address)[1]:
        by_split = {ALL: names}
    else:
        relative = [(name, PurePosixPath(name).relative_to(root)) for name in names if has_suffix(name, suffixes)]
        by_split = divide_files(address, relative, suffixes)
    scheme = address.partition("://")[0]
    addresses: dict[str, list[str]] = {}
    for split, names_of_split in by_split.items():
        addresses[split] = [f"{scheme}://{name}" for name in names_of_split]
    return addresses


def list_in_store(key: str, address: str) -> tuple[str, list[str]]:
    """Returns the folder that an address is in, and the sorted paths of its files without the scheme.

    It leaves out files below a prefix if their names, or the names of their folders, begin with a dot. Raises
    ConfigError about `key` if there is no file.
    """
    scheme, path = split_address(key, address)
    root = find_root(address, key)
    names = [info.path for info in call_store(key, address, lambda: list_files(scheme, root))]
    if root != path:
        names = [name for name in names if matches_glob(name.split("/"), path.split("/"))]
    elif names != [root]:
        names = [name for name in names if "/." not in name]
    if not names:
        raise ConfigError(f"{key}={address}: there is no such file or prefix")
    return root, names


def matches_glob(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Returns whether the parts of a path match the parts of a glob.

    As for `glob.glob`, `**` is any number of folders, and `*` matches no name that begins with a dot.
    """
    if not parts or not patterns:
        return not parts and not patterns
    is_visible = patterns[0].startswith(".") or not parts[0].startswith(".")
    if patterns[0] == "**":
        return matches_glob(parts, patterns[1:] or ["*"]) or (is_visible and matches_glob(parts[1:], patterns))
    is_match = is_visible and fnmatch.fnmatchcase(parts[0], patterns[0])
    return is_match and matches_glob(parts[1:], patterns[1:])


def find_root(address: str, key: str = KEY) -> str:
    """Returns the bucket of an address with its path, or with the folders of it before the first `*`, `?` or `[`."""
    path = split_address(key, address)[1]
    base = re.split(r"[*?\[]", path, maxsplit=1)[0]
    root = base if base == path else base.rpartition("/")[0]
    if not root:
        raise ConfigError(f"{key}={address}: expected the name of a bucket without * and ?")
    return root


def list_files(scheme: str, root: str) -> list[Any]:
    """Returns the files that are below a prefix, or the prefix if it is a file, as sorted `pyarrow.fs.FileInfo`."""
    from pyarrow import fs

    system = connect(scheme)
    one = system.get_file_info(root)
    if one.type == fs.FileType.File:
        return [one]
    infos = system.get_file_info(fs.FileSelector(root, recursive=True))
    return sorted((info for info in infos if info.type == fs.FileType.File), key=lambda info: info.path)


def identify_in_store(address: str) -> dict[str, tuple[int, int | None]]:
    """Returns the size of each file in bytes, and the time of its last change in nanoseconds if the store tells.

    The files are those that `find_in_store` may return, by their addresses.
    """
    scheme = split_address(KEY, address)[0]
    infos = call_store(KEY, address, lambda: list_files(scheme, find_root(address)))
    return {f"{scheme}://{info.path}": (info.size, info.mtime_ns) for info in infos}


def read_etags(addresses: Sequence[str]) -> dict[str, str]:
    """Returns the ETags of the first `MAX_ETAGS` files, by their addresses. Raises ConfigError if that fails."""

    def read(address: str) -> str:
        metadata = open_in_store(address).metadata()
        return next((os.fsdecode(value).strip('"') for key, value in metadata.items() if key.lower() == "etag"), "")

    def read_all() -> dict[str, str]:
        with ThreadPoolExecutor(REQUESTS) as pool:
            return dict(zip(asked, pool.map(read, asked), strict=True))

    asked = addresses[:MAX_ETAGS]
    return call_store(KEY, asked[0], read_all) if asked else {}


def open_in_store(address: str) -> Any:
    """Opens a file for reading at any position."""
    scheme, _, path = address.partition("://")
    return connect(scheme).open_input_file(path)


def read_metadata(folder: Path, name: str) -> Mapping[str, Any]:
    """Returns a column of `metadata.csv` in a folder, by the names of files in its column `file_name`."""
    from pyarrow import csv

    path = folder / "metadata.csv"
    if not path.is_file():
        raise ConfigError(
            f"dataset.split.column={name}: is read from {path}, which does not exist; write it, with the column "
            "file_name (relative to the folder) and this one, or use dataset.split.pattern"
        )
    try:
        table = csv.read_csv(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset.split.column={name}: {path} is no CSV file: {read_reason(error)}") from error
    for column in ("file_name", name):
        if column not in table.column_names:
            raise ConfigError(
                f"dataset.split.column={name}: {path} has no column {column}; it has {', '.join(table.column_names)}"
            )
    return dict(zip(table["file_name"].to_pylist(), table[name].to_pylist(), strict=True))
