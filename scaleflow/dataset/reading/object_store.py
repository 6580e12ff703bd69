"""Finds and opens the files of a dataset in object stores: `s3://`, `gs://` and `abfs://`."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any

from scaleflow.dataset.reading.files import ALL, divide_files, has_suffix
from scaleflow.errors import ConfigError
from scaleflow.files.object_store import call_store, connect, split_address

KEY = "dataset.data_dir"

#: An ETag takes a request. So many are asked for, at most, so many at a time.
MOST_ETAGS, REQUESTS = 200, 16


def find_in_store(address: str, suffixes: Sequence[str]) -> dict[str, list[str]]:
    """Returns the addresses of the files of each split, or all of them as `all`, as `find_files` does for a folder.

    Args:
        address: `s3://BUCKET/PATH` and the like: a file, a glob, or a prefix.
        suffixes: one of which the names below a prefix must have, see `has_suffix`.

    Raises ConfigError if there is no such file, or if the store does not answer or refuses the request.
    """
    root, names = list_in_store(KEY, address)
    if root in names or root != split_address(KEY, address)[1]:
        by_split = {ALL: names}
    else:
        relative = [(name, PurePosixPath(name).relative_to(root)) for name in names if has_suffix(name, suffixes)]
        by_split = divide_files(address, relative, suffixes)
    scheme = address.partition("://")[0]
    return {split: [f"{scheme}://{name}" for name in each] for split, each in by_split.items()}


def list_in_store(key: str, address: str) -> tuple[str, list[str]]:
    """Returns the folder that an address is in, and the sorted paths of its files without the scheme.

    Files below a prefix whose names, or whose folders' names, begin with a dot are left out. Raises ConfigError, which
    names `key`, if there is no file.
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
    """Returns whether the parts of a path match those of a glob, as `glob.glob` does: `**` is any number of folders,
    and `*` matches no name that begins with a dot.
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
    """Returns the ETags of the first `MOST_ETAGS` files, by their addresses. Raises ConfigError if that fails."""

    def read(address: str) -> str:
        metadata = open_in_store(address).metadata()
        return next((os.fsdecode(value).strip('"') for key, value in metadata.items() if key.lower() == "etag"), "")

    def read_all() -> dict[str, str]:
        with ThreadPoolExecutor(REQUESTS) as pool:
            return dict(zip(asked, pool.map(read, asked), strict=True))

    asked = addresses[:MOST_ETAGS]
    return call_store(KEY, asked[0], read_all) if asked else {}


def open_in_store(address: str) -> Any:
    """Opens a file for reading at any position."""
    scheme, _, path = address.partition("://")
    return connect(scheme).open_input_file(path)
