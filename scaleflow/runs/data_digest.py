"""Computes digests of a run's data files and of its splits, and caches them in the user's folder. No TensorFlow."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from scaleflow.files.cache import Cache, encode_entry
from scaleflow.interfaces.events import DatasetDescribed
from scaleflow.runs.event_log import EventReader
from scaleflow.runs.folder import RunFolder

#: Up to this total size, files are digested completely. That takes one core 2 s, less than the import of TensorFlow.
WHOLE_BYTES = 2 << 30

#: Above that total, each large file is sampled: `PIECES` pieces of `PIECE_BYTES`, spread evenly. It takes a few ms.
PIECES = 64
PIECE_BYTES = 16 << 10

#: At most this many files are listed, digested and cached for one folder. Opening them takes about 5 s.
MAX_FILES = 100_000

#: The suffix of cache files. Each holds the digests of the files below one folder.
SUFFIX = ".digests.jsonl"

#: Up to this many files, the run's folder records a digest per file; above it, a digest per folder.
MAX_NAMED = 1000

#: A digest is cached only if the file is at least this old: a second change at once could leave the time unchanged.
SETTLED_SECONDS = 2.0

#: The first word of a digest says whether it covers the whole file or a sample.
WHOLE = "all"
SAMPLED = "sample"

#: Names that do not count as data. Hidden files and the folders of runs do not count either.
NO_DATA = ("mlruns", "mlartifacts", "__pycache__")
NO_DATA_SUFFIXES = (".py", ".pyc", ".db", ".db-journal", ".db-wal", ".db-shm", ".db.lock")


class FileState(NamedTuple):
    """The path, size and times of a file: any change of the file changes one of them."""

    path: str  # absolute
    size: int  # in bytes
    changed: int  # when the content last changed, in nanoseconds
    #: When the file's status last changed. Unlike `changed`, which `cp -p` sets, tools cannot set it.
    status_changed: int

    @classmethod
    def read(cls, path: str) -> FileState:
        status = os.stat(path)  # noqa: PTH116  (three times as fast as Path, for folders of many files)
        return cls(os.path.abspath(path), status.st_size, status.st_mtime_ns, status_changed=status.st_ctime_ns)  # noqa: PTH100

    @property
    def numbers(self) -> list[int]:
        """The size and the times."""
        return [self.size, self.changed, self.status_changed]

    @property
    def is_settled(self) -> bool:
        """Whether the file is old enough for the cache."""
        return max(self.changed, self.status_changed) < (time.time() - SETTLED_SECONDS) * 1e9


def digest_files(paths: Iterable[str]) -> dict[str, str]:
    """Returns the digest of the content of each file. The keys are the paths as passed.

    A digest is `all:` and 32 hexadecimal digits. If all files together exceed `WHOLE_BYTES`, files of more than 1 MiB
    get `sample:` and a digest of their size and a sample of their content. Unreadable files, and addresses in object
    stores, are left out.
    """
    states: dict[str, FileState] = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            states[path] = FileState.read(path)
    if not states:
        return {}
    total = sum(state.size for state in states.values())
    limit = WHOLE_BYTES if total <= WHOLE_BYTES else PIECES * PIECE_BYTES
    cache = DigestCache(os.path.commonpath([state.path for state in states.values()]))
    digests: dict[str, str] = {}
    for path, state in states.items():
        covers = WHOLE if state.size <= limit else SAMPLED
        digest = cache.find(state, covers)
        if digest is not None:
            digests[path] = digest
            continue
        with contextlib.suppress(OSError):
            digest = f"{covers}:{hash_file(path, state.size, covers)}"
            digests[path] = digest
            if state.is_settled and FileState.read(path) == state:  # it did not change meanwhile
                cache.add(state, covers, digest)
    cache.write()
    return digests


class DigestCache:
    """The cached digests of the files below a folder. A digest is valid until the file's size or a time changes."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._cache = Cache(None, "digests")
        self._path = self._cache.locate_file(folder, SUFFIX)
        entry = self._cache.read_entry(self._path)
        #: The size, the times and the digest of each file, by coverage and path
        self._values: dict[str, Any] = {} if entry is None else entry.value
        self._is_changed = False

    def find(self, state: FileState, covers: str) -> str | None:
        """Returns the digest of a file; None if it is not cached or the file has changed."""
        *numbers, digest = self._values.get(f"{covers}:{state.path}", [""])
        return str(digest) if numbers == state.numbers else None

    def add(self, state: FileState, covers: str, digest: str) -> None:
        """Adds a digest, which `write` will store."""
        self._values[f"{covers}:{state.path}"] = [*state.numbers, digest]
        self._is_changed = True

    def write(self) -> None:
        """Writes the cache if it has new digests. Without a cache, later calls read the files again."""
        if not self._is_changed:
            return
        newest = list(self._values.items())[-MAX_FILES:]
        text = json.dumps(dict(newest))
        with contextlib.suppress(OSError):
            self._cache.write_once(
                self._path, lambda: [encode_entry(text, what="digests", of=self._folder)], lambda _: False
            )


def hash_file(path: str, size: int, covers: str) -> str:
    """Returns the digest of a file of `size` bytes. Raises OSError if it cannot be read."""
    with Path(path).open("rb", buffering=0) as file:
        if covers == WHOLE:
            return hashlib.file_digest(file, new_digest).hexdigest()
        digest = new_digest(str(size).encode())
        for piece in range(PIECES):
            file.seek(piece * (size - PIECE_BYTES) // (PIECES - 1))
            digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def new_digest(content: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=16)


def group_by_folder(digests: Mapping[str, str]) -> dict[str, str]:
    """Returns the digests of files; above `MAX_NAMED` files, one digest per folder, whose path ends with a `/`."""
    if len(digests) <= MAX_NAMED:
        return dict(digests)
    folders: dict[str, list[str]] = {}
    for path, digest in sorted(digests.items()):
        folder, name = os.path.split(path)
        folders.setdefault(f"{folder}/", []).append(f"{name} {digest}")
    grouped = {}
    for folder, lines in folders.items():
        digest = new_digest("|".join(lines).encode()).hexdigest()
        grouped[folder] = f"{WHOLE}:{digest}"
    return grouped


def find_data_files(arguments: Mapping[str, Any]) -> list[str]:
    """Returns the files that the arguments of a dataset name, at most `MAX_FILES`.

    Args:
        arguments: the arguments of the dataset's `_target_`. `data_dir` is a file, a folder or a glob; with `name`, a
            folder of datasets. Another string counts if it is the path of a file, or has a `/` and is the path of a
            folder.
    """
    values = {}
    for key, value in arguments.items():
        if isinstance(value, str) and key != "cache_dir":
            values[key] = value.strip()
    data_dir = values.pop("data_dir", "")
    name = values.get("name")
    if data_dir and name:
        data_dir = str(Path(data_dir, re.split("[/:]", name)[0]))
    patterns = [data_dir]
    patterns += [value for value in values.values() if os.sep in value or os.path.isfile(value)]  # noqa: PTH113
    files = itertools.chain.from_iterable(list_data_files(pattern) for pattern in patterns)
    return list(dict.fromkeys(itertools.islice(files, MAX_FILES)))


def list_data_files(pattern: str) -> Iterator[str]:
    """Yields the data files that a path or a glob names, including files in subfolders, in a fixed order."""
    path = os.path.expanduser(pattern)  # noqa: PTH111  (Path.expanduser raises for an unknown user)
    paths = [path] if os.path.exists(path) else sorted(glob.iglob(path, recursive=True))  # noqa: PTH110, PTH207
    for place in paths:
        if os.path.isfile(place):  # noqa: PTH113
            yield place
        else:
            yield from walk_data(place)


def walk_data(folder: str) -> Iterator[str]:
    """Yields the data files in a folder and its subfolders."""
    for base, folders, names in walk_outside_runs(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", *NO_DATA)))
        for name in sorted(names):
            if not name.startswith(".") and not name.endswith(NO_DATA_SUFFIXES):
                yield os.path.join(base, name)  # noqa: PTH118


def walk_outside_runs(folder: str, follows_links: bool = True) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walks like `os.walk`, but skips the folders of runs and sweeps."""
    for base, folders, names in os.walk(folder, followlinks=follows_links):
        if not RunFolder.MARKS.isdisjoint(names):
            folders.clear()
            continue
        yield base, folders, names


#: The version of the digest computation. Digests of different versions are not compared.
DIGEST_VERSION = 3

#: What a digest covers: all values of the split, or the files that it is read from.
ALL_VALUES = "all"
FILES = "files"

#: By split name: `examples`, `digest`, `covers`, `version` and more.
SplitDigests = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Repetition:
    """What a run knows about the run that it repeats."""

    splits: SplitDigests = field(default_factory=dict)  # the digests of that run's data
    is_exact: bool = False  # whether other data refuses the run


def identify_split(digest: str, covers: str, files: Mapping[str, str]) -> dict[str, Any]:
    """Returns the digest of a split, its coverage, and the version of the computation.

    Args:
        digest: the digest of the examples that `covers` names.
        covers: `all`, or words for the covered part of the split.
        files: the digests of the files that the split is read from, by path. Paths count relative to their common
            folder, so that the folder can be moved.
    """
    if covers != ALL_VALUES and files:
        shared = os.path.commonpath(files)
        named = sorted((os.path.relpath(path, shared), file_digest) for path, file_digest in files.items())
        covers = describe_coverage(files)
        digest = hashlib.blake2b(json.dumps([digest, named]).encode(), digest_size=8).hexdigest()
    return {"digest": digest, "covers": covers, "version": DIGEST_VERSION}


def describe_coverage(files: Mapping[str, str]) -> str:
    """Describes the coverage of the digests of files."""
    if any(not digest.startswith(f"{WHOLE}:") for digest in files.values()):
        return "a sample of each large file"
    return FILES if len(files) < MAX_FILES else f"the first {MAX_FILES:,} files"


def read_split_digests(files: RunFolder) -> SplitDigests:
    """Returns the digests of the data of the run's last training; empty if it was never trained."""
    splits: SplitDigests = {}
    for event in EventReader(files.events).read():
        if isinstance(event, DatasetDescribed):
            splits = event.splits
    return splits


def list_split_changes(before: SplitDigests, now: SplitDigests) -> list[str]:
    """Lists which splits differ, and how. Digests that were computed in different ways are not compared."""
    changes = []
    for name in dict.fromkeys((*before, *now)):
        old = before.get(name)
        new = now.get(name)
        if old is None:
            changes.append(f"the split {name} is new")
        elif new is None:
            changes.append(f"the split {name} is gone")
        elif old["version"] != new["version"]:
            continue
        elif old["examples"] != new["examples"]:
            changes.append(f"{name} had {old['examples']:,} examples and has {new['examples']:,}")
        elif old["covers"] == new["covers"] and old["digest"] != new["digest"]:
            what = f"the files of {name} changed" if "file" in new["covers"] else f"values of {name} changed"
            changes.append(f"{what} ({new['examples']:,} examples as before)")
    return changes
