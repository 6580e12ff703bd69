"""Caches files for later runs, in the user's cache folder or in `dataset.cache_dir`."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from scaleflow.errors import ConfigError
from scaleflow.files.object_store import is_store_address

#: When a file is added, files that were not used for this number of days are deleted.
KEPT_DAYS = 90

#: Seconds to wait for another process that writes the same file. After that, this process writes it itself.
WAIT_SECONDS = 3600.0


class Entry(NamedTuple):
    """A cached value, and the day on which it was computed (ISO 8601)."""

    day: str
    value: Any


class Cache:
    """A folder of cached files. The first process that needs a file writes it.

    The name of a file is a digest of its key, which contains everything that the file's content depends on.

    Args:
        cache_dir: `dataset.cache_dir`; None: the folder `scaleflow/name` in the user's cache folder.
        name: the name of the folder.

    Attributes:
        problems: messages about damaged or unreadable entries.

    Raises:
        ConfigError: if `cache_dir` is not a path.
    """

    def __init__(self, cache_dir: Any, name: str) -> None:
        self.folder = find_cache_folder(cache_dir, name)
        self.problems: list[str] = []

    def locate_file(self, key: str, suffix: str) -> Path:
        """Returns the path of the file for a key. The file may not exist yet."""
        return self.folder / f"{digest_key(key)}{suffix}"

    def write_once(
        self, path: Path, write: Callable[[], Iterable[bytes]], is_complete: Callable[[Path], bool] | None = None
    ) -> None:
        """Writes a file of the cache, unless it is already complete. It gets its name when all of it is written.

        If several processes ask for the same file, one of them writes it. Raises OSError if it cannot be written.

        Args:
            path: the file, from `locate_file`.
            write: yields the content.
            is_complete: returns whether the file need not be written. None: it is complete if it exists.
        """
        is_complete = is_complete or mark_used
        if is_complete(path):
            return
        if str(self.folder).startswith("~"):
            raise OSError("there is no home folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        has_waited = False
        try:
            # If this file system has no locks, each process writes the file.
            with contextlib.suppress(OSError, NotImplementedError):
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    has_waited = True
                    with contextlib.suppress(Timeout):
                        lock.acquire(timeout=WAIT_SECONDS)
            if is_complete(path):  # another process has written it
                return
            # The other process failed. Without the lock, all waiting processes try now, not one after the other.
            if has_waited:
                lock.release()
            write_atomically(path, write())
            self._delete_old(path.name.partition(".")[2])
        finally:
            with contextlib.suppress(OSError):
                lock.release()

    def read_entry(self, path: Path) -> Entry | None:
        """Returns the entry that `encode_entry` wrote; None if the file is missing, unreadable or damaged."""
        try:
            head, _, text = path.read_text("utf-8").partition("\n")
            description = json.loads(head)
            if description["digest"] != digest_text(text):
                raise ValueError
            entry = Entry(str(description["learned"]), json.loads(text))
            mark_used(path)
            return entry
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.problems.append(f"{path} cannot be read: {error.strerror or error}")
        except (ValueError, KeyError, TypeError):
            self.problems.append(f"{path} is damaged; what it says is learned again")
        return None

    def _delete_old(self, suffix: str) -> None:
        """Deletes files with a suffix, and locks, that no run has used for `KEPT_DAYS`."""
        oldest = time.time() - KEPT_DAYS * 86_400
        file_pattern = re.compile(rf"[0-9a-f]{{32}}\..*({re.escape(suffix)}|lock)")
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process may delete it at the same time
                if file_pattern.fullmatch(path.name) and path.stat().st_mtime < oldest:
                    path.unlink()


def mark_used(path: Path) -> bool:
    """Sets the file's time of last use to now. Returns whether it exists."""
    with contextlib.suppress(OSError):
        os.utime(path)
    return path.exists()


def encode_entry(text: str, **description: str) -> bytes:
    """Encodes an entry: a line of JSON with the description, the day and the digest of `text`, and then `text`.

    Args:
        text: the value as JSON.
        description: facts about the value, for people who look at the file.
    """
    head = {**description, "learned": datetime.date.today().isoformat(), "digest": digest_text(text)}
    return f"{json.dumps(head)}\n{text}".encode()


def digest_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def find_cache_folder(cache_dir: Any, name: str) -> Path:
    """Returns `dataset.cache_dir`, or if it is null the folder `scaleflow/name` in the user's cache folder.

    The folder may not exist yet. Without a home folder, the path starts with `~`. Raises ConfigError if `cache_dir` is
    not a path.
    """
    if cache_dir is not None and (not isinstance(cache_dir, str) or not cache_dir.strip()):
        raise ConfigError(f"dataset.cache_dir={cache_dir}: expected a path or null")
    if is_store_address(cache_dir):
        raise ConfigError(f"dataset.cache_dir={cache_dir}: expected the path of a folder, not an address")
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache_dir or f"{home}/scaleflow/{name}"))  # noqa: PTH111


def identify_file(path: str) -> tuple[str, int, int]:
    """Returns the resolved path of a file, its size in bytes, and the time of its last change in nanoseconds."""
    status = Path(path).stat()
    return str(Path(path).resolve()), status.st_size, status.st_mtime_ns


def digest_key(key: str) -> str:
    """Returns the digest of a key: 32 hexadecimal digits. It is the name of the key's file."""
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def write_atomically(path: Path, contents: Iterable[bytes]) -> None:
    """Writes a file under a temporary name and renames it, so that no process sees an incomplete file."""
    partial_file = path.with_suffix(f".{os.getpid()}.part")
    try:
        with partial_file.open("wb") as file:
            for content in contents:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial_file.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial_file.unlink(missing_ok=True)
