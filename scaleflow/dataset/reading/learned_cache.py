"""What runs learn of data files, such as numbers of rows, types and means: learned once, kept for later runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scaleflow.dataset.reading.files import identify_in_store
from scaleflow.errors import ConfigError
from scaleflow.files.cache import Cache, Entry, encode_entry, identify_file
from scaleflow.files.object_store import is_store_address

#: The ending of the files of the cache.
SUFFIX = ".learned.jsonl"

#: Distributions whose versions may change what is learned, besides the code of this package.
DISTRIBUTIONS = ("scaleflow", "tensorflow", "keras", "numpy", "pyarrow")


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
        self._cache = Cache(cache_dir, "learned")
        self._data_dir = data_dir
        self._store_files: dict[str, tuple[int, int | None]] | None = None
        self._days: dict[str, str] = {}  # what was in the cache -> the day on which it was learned
        self._learned: set[str] = set()  # what was learned here

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
        learned: list[str] = []
        entry: Entry | None = None

        def write() -> Iterator[bytes]:
            learned.append(json.dumps(learn()))
            yield encode_entry(learned[0], what=what, of=str(self._data_dir))

        def is_good(path: Path) -> bool:
            nonlocal entry
            entry = self._cache.load(path)
            return entry is not None

        try:
            self._cache.make(self._cache.place(repr((what, CODE, identity, options)), SUFFIX), write, is_good)
        except OSError as error:
            learned = learned or [json.dumps(learn())]
            self._cache.problems.append(
                f"what is learned of {self._data_dir} is not kept for later runs, because {self._cache.folder} cannot "
                f"be written: {error.strerror or error}"
            )
        if entry is None:
            self._learned.add(what)
            return json.loads(learned[0])
        self._days[what] = min(entry.day, self._days.get(what, entry.day))
        return entry.value

    @property
    def notes(self) -> list[str]:
        """Lines for the user: what came from the cache, and what is wrong with it."""
        lines = [f"{problem} (dataset.cache_dir)" for problem in dict.fromkeys(self._cache.problems)]
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
