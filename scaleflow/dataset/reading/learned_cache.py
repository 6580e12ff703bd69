"""A cache of facts about data files, such as numbers of rows, types and means. Later runs need not learn them again."""

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

#: Distributions whose versions may change the facts. The code of this package may change them as well.
DISTRIBUTIONS = ("scaleflow", "tensorflow", "keras", "numpy", "pyarrow")


class LearnedCache:
    """Facts that runs learned about the files of a dataset, in `dataset.cache_dir`.

    A file has two lines of JSON: a description with the digest of the second line, and the value. Its name is a
    fingerprint of everything that the value depends on. A problem with the cache is no error: the value is then learned
    again.

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
        self._days: dict[str, str] = {}  # kind of fact that came from the cache -> the day when it was learned
        self._learned: set[str] = set()  # the kinds of facts that this process has learned

    def recall(self, what: str, files: Sequence[str], options: Any, learn: Callable[[], Any]) -> Any:
        """Returns the result of `learn`, from the cache if an earlier call has learned it.

        If several processes ask for the same result, one of them learns it.

        Args:
            what: a word for the kind of fact, in notes.
            files: paths or addresses of the files that `learn` reads. Messages in the value may name them.
            options: everything else that the value depends on. Equal options have an equal `repr`.
            learn: returns plain values that JSON can hold. They are returned after a round trip through JSON.
        """
        identity = self._identify(files)
        if identity is None:
            return json.loads(json.dumps(learn()))
        text: str | None = None  # the value as JSON, if it is learned here
        entry: Entry | None = None

        def write() -> Iterator[bytes]:
            nonlocal text
            text = json.dumps(learn())
            yield encode_entry(text, what=what, of=str(self._data_dir))

        def is_complete(path: Path) -> bool:
            nonlocal entry
            entry = self._cache.read_entry(path)
            return entry is not None

        path = self._cache.locate_file(repr((what, CODE, identity, options)), SUFFIX)
        try:
            self._cache.write_once(path, write, is_complete)
        except OSError as error:
            if text is None:
                text = json.dumps(learn())
            self._cache.problems.append(
                f"what is learned of {self._data_dir} is not kept for later runs, because {self._cache.folder} cannot "
                f"be written: {error.strerror or error}"
            )
        if entry is None:
            assert text is not None
            self._learned.add(what)
            return json.loads(text)
        self._days[what] = min(entry.day, self._days.get(what, entry.day))
        return entry.value

    @property
    def notes(self) -> list[str]:
        """Lines for the user about problems with the cache, and about the facts that came from it."""
        lines = [f"{problem} (dataset.cache_dir)" for problem in dict.fromkeys(self._cache.problems)]
        days = {what: day for what, day in self._days.items() if what not in self._learned}
        if not days:
            return lines
        *others, last = days
        kinds = f"{', '.join(others)} and {last}" if others else last
        lines.append(f"{kinds} of {self._data_dir} from the cache (learned {min(days.values())})")
        return lines

    def _identify(self, files: Sequence[str]) -> list[Any] | None:
        """Returns values that change with the contents of the files; None if there are no such values."""
        if is_store_address(self._data_dir):
            return self._identify_in_store(files)
        try:
            # Tools can set the time of the last change (`cp -p`, archives), but not the time of the file's status.
            return [(path, *identify_file(path), Path(path).stat().st_ctime_ns) for path in files]
        except OSError:  # the reader of the file raises a better error
            return None

    def _identify_in_store(self, files: Sequence[str]) -> list[Any] | None:
        """Returns such values for addresses in an object store. Asks the store once."""
        if self._store_files is None:
            try:
                self._store_files = identify_in_store(self._data_dir)
            except ConfigError:  # the reader of the files raises a better error
                self._store_files = {}
        identities: list[Any] = []
        for path in files:
            size, changed = self._store_files.get(path, (0, None))
            if changed is None:
                return None
            identities.append((path, size, changed))
        return identities


def fingerprint_code() -> str:
    """Returns a digest of the code of `scaleflow.dataset`, and of the versions of the libraries that it uses."""
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


#: It is computed at the import, because a long process keeps its code when files and packages change.
CODE = fingerprint_code()
