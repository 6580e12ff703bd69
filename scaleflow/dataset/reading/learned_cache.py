"""What runs learn of data files, such as numbers of rows, types and means: learned once, kept for later runs."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from scaleflow.dataset.reading.object_store import identify_in_store
from scaleflow.errors import ConfigError
from scaleflow.files.object_store import find_cache_folder, identify_file, is_store_address, name_entry, write_whole

#: The ending of the files of the cache, and the most of them. Beyond that, those are deleted that were not used for
#: the longest time.
SUFFIX = ".learned.jsonl"
MAX_ENTRIES = 1000

#: How long a process waits for another one that learns the same. Then it learns it, too.
WAIT_SECONDS = 3600.0

#: Distributions whose versions may change what is learned, besides the code of this package.
DISTRIBUTIONS = ("scaleflow", "tensorflow", "keras", "numpy", "pyarrow")


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
        self._learned: set[str] = set()  # what was learned here
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
        path = self._folder / f"{name_entry(repr((what, CODE, identity, options)))}{SUFFIX}"
        entry = self._load(path)
        if entry is None:
            with self._lock(path) as has_waited:
                entry = self._load(path)  # of a process that had the lock before
                if entry is None and not has_waited:
                    return self._learn(path, what, learn)
        if entry is None:  # that process has failed; those that waited do not fail one after the other
            return self._learn(path, what, learn)
        self._days[what] = min(entry.day, self._days.get(what, entry.day))
        return entry.value

    def _learn(self, path: Path, what: str, learn: Callable[[], Any]) -> Any:
        self._learned.add(what)
        text = json.dumps(learn())
        self._keep(path, what, text)
        return json.loads(text)

    @property
    def notes(self) -> list[str]:
        """Lines for the user: what came from the cache, and what is wrong with it."""
        lines = [f"{problem} (dataset.cache_dir)" for problem in dict.fromkeys(self._problems)]
        days = {what: day for what, day in self._days.items() if what not in self._learned}
        if days:
            *others, last = days
            what = f"{', '.join(others)} and {last}" if others else last
            lines.append(f"{what} of {self._data_dir} from the cache (learned {min(days.values())})")
        return lines

    def _identify(self, files: Sequence[str]) -> list[Any] | None:
        """Returns what changes with the files; None if that is unknown."""
        if not is_store_address(self._data_dir):
            try:
                # Tools can set the time of the last change (`cp -p`, archives), but not that of the file's status.
                return [(path, *identify_file(path), Path(path).stat().st_ctime_ns) for path in files]
            except OSError:  # reading the file will say it better
                return None
        if self._store_files is None:
            try:
                self._store_files = identify_in_store(self._data_dir)
            except ConfigError:  # only the cache needs this; reading the files will say it better
                self._store_files = {}
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
        if not self._folder.is_dir():  # it cannot be made, or was just deleted
            return
        try:
            write_whole(path, [f"{json.dumps(about)}\n{text}".encode()])
        except OSError as error:
            self._report_unwritable(error)
            return
        with contextlib.suppress(OSError):  # other processes delete, too
            entries = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda each: each.stat().st_mtime)
            for old in entries[:-MAX_ENTRIES]:
                with contextlib.suppress(OSError):
                    old.unlink(missing_ok=True)
                    old.with_suffix(".lock").unlink(missing_ok=True)

    @contextlib.contextmanager
    def _lock(self, path: Path) -> Iterator[bool]:
        """Excludes other processes that learn the same, where files can be locked; yields whether it waited for one."""
        lock = FileLock(path.with_suffix(".lock"))
        has_waited = False
        try:
            if str(self._folder).startswith("~"):
                raise OSError("there is no home folder")
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._report_unwritable(error)
            yield False
            return
        try:
            lock.acquire(timeout=0)
        except Timeout:
            has_waited = True
            with contextlib.suppress(Timeout, OSError):  # after the longest time it learns, too
                lock.acquire(timeout=WAIT_SECONDS)
        except (OSError, NotImplementedError):  # nothing can be locked here: each process learns
            pass
        try:
            yield has_waited
        finally:
            with contextlib.suppress(OSError):
                lock.release()

    def _report_unwritable(self, error: OSError) -> None:
        reason = error.strerror or error
        self._problems.append(
            f"what is learned of {self._data_dir} is not kept for later runs, because {self._folder} cannot be "
            f"written: {reason}"
        )


def digest_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def fingerprint_code() -> str:
    """Returns a digest of the code that learns: of `scaleflow.dataset`, and the versions of what it uses."""
    digest = hashlib.blake2b(repr([find_version(name) for name in DISTRIBUTIONS]).encode(), digest_size=16)
    for path in sorted(Path(__file__).parents[1].rglob("[!.]*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def find_version(name: str) -> str | None:
    """Returns the version of a distribution; None if it is installed under another name, such as a nightly build."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


#: Computed at the import: a process that runs for long keeps its code when files and packages are changed.
CODE = fingerprint_code()
