"""Secrets are masked before anything is written: in config files, params and tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "****"

_WORDS = "password|passwd|token|secret|credentials?|api_?key|access_?key|private_?key|secret_?key"
_SECRET_KEY = re.compile(rf"(^|[_\W])({_WORDS})s?$", re.I)
_USER_IN_URI = re.compile(r"(?P<scheme>[a-z][\w+.-]*://)[^/\s]*@", re.I)
#: In a typed `{key: value}`.
_SECRET_INSIDE = re.compile(rf"(?P<key>[{{,]\s*[\w.]*({_WORDS})s?\s*:\s*)[^,}}]+", re.I)


def masked(value: Any, key: str = "") -> Any:
    """A copy of a config, in which what is secret by its key or is a URI's credentials reads `****`."""
    if isinstance(value, Mapping):
        return {k: masked(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [masked(v, key) for v in value]
    if value is not None and value != "" and _SECRET_KEY.search(key):
        return MASK
    return _USER_IN_URI.sub(rf"\g<scheme>{MASK}@", value) if isinstance(value, str) else value


def masked_override(override: str) -> str:
    """An override as it was typed, its value masked where `masked` would."""
    key, equals, value = override.partition("=")
    if not equals:
        return override
    shown = masked(value, key.lstrip("+~").rpartition(".")[2])
    return f"{key}=" + _SECRET_INSIDE.sub(rf"\g<key>{MASK}", shown)
