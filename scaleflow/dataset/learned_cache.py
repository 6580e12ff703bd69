"""What runs learn of data files, such as numbers of rows, types and means: learned once, kept for later runs."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from scaleflow.dataset.cache_files import find_cache_folder, identify_file, name_entry, write_whole
from scaleflow.dataset.object_store import identify_in_store
from scaleflow.object_store import is_store_address

#: The ending of the files of the cache, and the most of them. Beyond that, those are deleted that were not used for
#: the longest time.
SUFFIX = ".learned.jsonl"
MOST_ENTRIES = 1000

#: How long a process waits for another one that learns the same. Then it learns it, too.
WAIT_SECONDS = 600.0

#: Libraries whose versions may change what is learned, besides the code of this package.
LIBRARIES = ("keras", "numpy", "pyarrow")


class Entry(NamedTuple):
    """A file of the cache: the day on which the value was learned, as ISO 8601, and the value."""

    day: str
    value: Any


class LearnedCache:
    """What was learned of the files of a dataset, in `dataset.cache_dir`.

    A file has two lines of JSON: what it is, with the digest of the second line; and the value. Its name is a
    fingerprint of what the value depends on. No problem with the cache is an error: the value is learned then.

    Args:
        cache_dir: `dataset.cache_dir`; null means `scaleflow/learned` in the user's cache folder.
        data_dir: `dataset.data_dir`.

    Raises:
        ConfigError: if `cache_dir` is not a path.
    """

    def __init__(self, cache_dir: Any, data_dir: Any) -> None:
        self._folder = find_cache_folder(cache_dir, "learned")
        self._data_dir = data_dir
        self._store_files: dict[str, tuple[int, int | None]] | None = None
        self._days: dict[str, str] = {}  # what was in the cache -> the day on which it was learned
        self._problems: list[str] = []

    def recall(self, what: str, files: Sequence[str], options: Any, learn: Callable[[], Any]) -> Any:
        """Returns what `learn` returns, from the cache if an earlier call has learned it.

        If several processes ask for the same, one of them learns.

        Args:
            what: a word for it, in notes.
            files: what it is learned from: paths or addresses, which may be in messages that are part of the value.
            options: all else that the value depends on; equal options have an equal `repr`.
            learn: returns plain values that JSON can hold; they are returned after a round trip through JSON.
        """
        identity = self._identify(files)
        if identity is None:
            return json.loads(json.dumps(learn()))
        path = self._folder / f"{name_entry(repr((what, fingerprint_code(), identity, options)))}{SUFFIX}"
        entry = self._load(path)
        if entry is None:
            with self._lock(path):
                entry = self._load(path)  # of a process that had the lock before
                if entry is None:
                    text = json.dumps(learn())
                    self._keep(path, what, text)
                    return json.loads(text)
        self._days[what] = min(entry.day, self._days.get(what, entry.day))
        return entry.value

    @property
    def notes(self) -> list[str]:
        """Lines for the user: what came from the cache, and what is wrong with it."""
        lines = [f"{problem} (dataset.cache_dir)" for problem in dict.fromkeys(self._problems)]
        if self._days:
            *others, last = self._days
            what = f"{', '.join(others)} and {last}" if others else last
            lines.append(f"{what} of {self._data_dir} from the cache (learned {min(self._days.values())})")
        return lines

    def _identify(self, files: Sequence[str]) -> list[Any] | None:
        """Returns what changes with the files; None if that is unknown."""
        if not is_store_address(self._data_dir):
            try:
                return [(path, *identify_file(path)) for path in files]
            except OSError:  # reading the file will say it better
                return None
        if self._store_files is None:
            self._store_files = identify_in_store(self._data_dir)
        found = [(path, *self._store_files.get(path, (0, None))) for path in files]
        return found if all(changed is not None for *_, changed in found) else None

    def _load(self, path: Path) -> Entry | None:
        try:
            head, _, text = path.read_text("utf-8").partition("\n")
            about = json.loads(head)
            if about["digest"] != digest_text(text):
                raise ValueError
            entry = Entry(str(about["learned"]), json.loads(text))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._problems.append(f"{path} cannot be read: {error.strerror or error}")
            return None
        except (ValueError, KeyError, TypeError):
            self._problems.append(f"{path} is damaged; what it says is learned again")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # it was used
        return entry

    def _keep(self, path: Path, what: str, text: str) -> None:
        about = {
            "what": what,
            "of": str(self._data_dir),
            "learned": datetime.date.today().isoformat(),
            "digest": digest_text(text),
        }
        try:
            write_whole(path, [f"{json.dumps(about)}\n{text}".encode()])
            entries = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda each: each.stat().st_mtime)
            for old in entries[:-MOST_ENTRIES]:
                old.unlink(missing_ok=True)
        except FileNotFoundError:  # another process has deleted an old entry
            return
        except OSError as error:
            self._report_unwritable(error)

    @contextlib.contextmanager
    def _lock(self, path: Path) -> Iterator[None]:
        """Excludes other processes that learn the same, if the folder can be written."""
        file = path.with_suffix(".lock")
        lock = FileLock(file, timeout=WAIT_SECONDS)
        try:
            if str(self._folder).startswith("~"):
                raise OSError("there is no home folder")
            self._folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            self._problems.append(f"another process learns the same of {self._data_dir} for {WAIT_SECONDS:.0f} s")
            yield
            return
        except OSError as error:
            self._report_unwritable(error)
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)  # who waits for it finds the entry, or learns and writes the same
            lock.release()

    def _report_unwritable(self, error: OSError) -> None:
        reason = error.strerror or error
        self._problems.append(
            f"what is learned of {self._data_dir} is not kept for later runs, because {self._folder} cannot be "
            f"written: {reason}"
        )


def digest_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@functools.cache
def fingerprint_code() -> str:
    """Returns a digest of the code that learns: of this package, and the versions of the libraries that it uses."""
    digest = hashlib.blake2b(repr([version(name) for name in LIBRARIES]).encode(), digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
