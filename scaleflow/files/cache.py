"""Files in the user's cache folder: where they are, what identifies the files that they are made from, how they appear.

The tokens of a corpus and what is learned of a table are kept there for later runs, jobs of sweeps and workers.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.files.object_store import is_store_address


def find_cache_folder(cache_dir: Any, name: str) -> Path:
    """Returns `dataset.cache_dir`, or the folder `name` of scaleflow in the user's cache folder if it is null.

    It need not exist. Without a home folder it begins with `~`. Raises ConfigError if `cache_dir` is not a path.
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


def name_entry(key: str) -> str:
    """Returns the name of the file for a key: 32 hexadecimal digits."""
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Writes a file that appears when it is whole."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            for content in parts:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
