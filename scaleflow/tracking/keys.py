"""Names as MLflow takes them: other characters replaced, long ones cut, and no two that become the same."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping

LONGEST_KEY = 250

#: Of what stands for the whole key where a name had to be cut, or would be another's.
DIGITS = 8


def to_allowed_key(key: str) -> str:
    """A key with what MLflow does not take in one replaced; one that is cut ends in what tells it from others."""
    name = re.sub(r"[^/\w.\- :]", "_", key) or "_"
    if name.startswith(("/", "..")) or posixpath.normpath(name) != name:
        name = name.replace("/", "_")  # it is a path to MLflow, and has to be a plain one
    if name == "." or name.startswith(".."):
        name = name.replace(".", "_", 2)
    return name if len(name) <= LONGEST_KEY else add_suffix(name, key)


def add_suffix(name: str, key: str) -> str:
    """A name that no other key has."""
    mark = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:DIGITS]
    return f"{name[: LONGEST_KEY - DIGITS - 1]}-{mark}"


def to_distinct_keys(values: Mapping[str, object]) -> dict[str, str]:
    """Values as text, by names that MLflow takes: as many as there were, each key's the same every time.

    A key that can stay as it is has its name; of others that would become the same, each gets a mark.
    """
    names = {key: to_allowed_key(key) for key in values}
    wanted: dict[str, int] = {}
    for key, name in names.items():
        wanted[name] = wanted.get(name, 0) + (2 if key == name else 1)
    result: dict[str, str] = {}
    for key, value in values.items():
        is_own = key == names[key] or wanted[names[key]] == 1
        result[names[key] if is_own else add_suffix(names[key], key)] = str(value)
    return result


class MetricKeys(dict[str, str]):
    """The names of metrics, which come one after the other: the first that becomes a name has it, others get a mark."""

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
