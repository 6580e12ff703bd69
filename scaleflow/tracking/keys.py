"""Converts keys to distinct names that MLflow accepts: replaces characters and shortens long names."""

import hashlib
import posixpath
import re
from collections import Counter
from collections.abc import Mapping

MAX_KEY = 250

#: Hexadecimal digits of the hash at the end of a shortened or duplicate name.
HASH_DIGITS = 8


def to_allowed_key(key: str) -> str:
    """Replaces characters that MLflow rejects in a key. Cuts a name that is too long and appends a hash."""
    name = re.sub(r"[^/\w.\- :]", "_", key) or "_"
    if name.startswith(("/", "..")) or posixpath.normpath(name) != name:
        name = name.replace("/", "_")  # MLflow accepts only normalized relative paths
    if name == "." or name.startswith(".."):
        name = name.replace(".", "_", 2)
    return name if len(name) <= MAX_KEY else add_suffix(name, key)


def add_suffix(name: str, key: str) -> str:
    """Appends a hash of the key, so that different keys get different names."""
    digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:HASH_DIGITS]
    return f"{name[: MAX_KEY - HASH_DIGITS - 1]}-{digest}"


def to_distinct_keys(values: Mapping[str, object]) -> dict[str, str]:
    """Returns the values as text, under distinct names that MLflow accepts.

    A key that MLflow accepts keeps its name. If other keys map to the same name, each of them gets a hash. So names do
    not depend on the order of the keys.
    """
    names = {key: to_allowed_key(key) for key in values}
    counts = Counter(names.values())
    distinct = {}
    for key, name in names.items():
        if key != name and counts[name] > 1:
            name = add_suffix(name, key)
        distinct[name] = str(values[key])
    return distinct


class MetricKeys(dict[str, str]):
    """Maps metric keys to distinct names as they arrive: the first key gets the plain name, later ones get a hash."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: set[str] = set()

    def __missing__(self, key: str) -> str:
        name = to_allowed_key(key)
        if name in self._taken:
            name = add_suffix(name, key)
        self._taken.add(name)
        self[key] = name
        return name
