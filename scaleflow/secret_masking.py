"""Secrets are masked before anything is written or shown: in config files, params, tags, events, logs.

What is one is known by its key (`password`, `hf_token`, `api_key`), by where it comes from (`${secret:NAME}`, or
`${oc.env:NAME}` of a variable with such a name, and every such variable there is), by where it stands (the credentials
of a URI), or by its looks (the tokens that big services hand out). A value that was once known to be a secret is masked
wherever it turns up.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

MASK = "****"

_WORDS = (
    "password|passwd|passphrase|pwd|secret|credential|token|bearer|authorization|connection_?string|"
    "(?:api|access|private|secret|encryption|signing|ssh|account|shared|master|storage|auth|service|license|hmac)_?key"
)
_SECRET_KEY = re.compile(rf"(?:^|[_\W])(?P<word>{_WORDS})s?$", re.I)

#: Tokens of text, and counts of them.
_OF_TEXT = re.compile(
    r"(?:^|[_\W])(?:oov|pad|padding|mask|unk|unknown|bos|eos|cls|sep|start|end|special|stop|max|min|num|n|vocab)"
    r"_?tokens?$",
    re.I,
)
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?|true|false|null", re.I)

# Those that begin with any number of characters begin where these do: else a long word takes its length squared.
_USER_IN_URI = re.compile(r"(?<![\w+.-])(?P<scheme>[a-z][\w+.-]*://)(?P<user>[^/\s]*)@", re.I)
_SIGNED = re.compile(r"(?P<key>[?&](?:sig|signature|x-amz-[\w-]+|x-goog-[\w-]+|awsaccesskeyid)=)[^&\s'\"]+", re.I)
_VALUE = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
#: `password=sesame` in a text.
_ASSIGNED = re.compile(
    rf"(?<![\w.+~@-])(?P<key>[\w.+~@-]*(?:{_WORDS})s?)=(?P<value>{_VALUE}|[^\s&;,'\")\]}}]*[^\s&;,:'\")\]}}])", re.I
)
#: `{password: sesame}` as it is typed, and `{'password': 'sesame'}` as Python and JSON show it.
_INSIDE = re.compile(
    rf"(?P<lead>(?:(?<!\$)\{{|,)\s*['\"]?)(?P<key>[\w.-]*(?:{_WORDS})s?)(?P<colon>['\"]?\s*:\s*)(?P<value>{_VALUE}|[^,}}\]]+)",
    re.I,
)
_BEARER = re.compile(r"(?P<kind>\b(?:bearer|basic)\s+)[\w.~+/-]{8,}=*", re.I)
_LOOKS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[\w-]{10,}|dapi[0-9a-f]{32}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)",
    re.S,
)
#: Under the key `key`, which may be that of a column.
_RANDOM = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9_+=-]{20,}")
#: What a config takes from the environment.
_FROM_ENVIRONMENT = re.compile(r"\$\{\s*(?P<way>secret|oc\.env)\s*:\s*(?P<name>\w+)\s*(?:,(?P<default>[^}]*))?\}")

#: Shorter ones are masked where they are known by their key, and not wherever they turn up.
SHORTEST = 4
SHORTEST_OF_ENVIRONMENT = 8

_known: set[str] = set()


# ---------------------------------------------------------------------------------------------
# What is a secret
# ---------------------------------------------------------------------------------------------


def is_secret(key: str, value: object = "") -> bool:
    """Whether a key says that what is under it is one: `api_key`, `dbPassword`; not `max_tokens` nor `key_dim`."""
    key = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key)
    found = _SECRET_KEY.search(key)
    if found is None:
        is_key = re.search(r"(?:^|\W)key$", key, re.I) is not None
        return is_key and isinstance(value, str) and _RANDOM.fullmatch(value) is not None
    if found["word"].lower() == "token":
        is_number = isinstance(value, int | float) or (isinstance(value, str) and _NUMBER.fullmatch(value))
        return not (is_number or _OF_TEXT.search(key))
    return True


def remember_secrets(values: Iterable[str]) -> None:
    """Values that are masked from now on, wherever they turn up in this process."""
    new = {value for value in values if len(value) >= SHORTEST and not _NUMBER.fullmatch(value) and value != MASK}
    if not new <= _known:
        _known.update(new)
        _compile_known.cache_clear()


def known_in(text: str) -> list[str]:
    """The known secrets that a JSON text holds, for the process that gets this text. Not to be written anywhere."""
    return sorted(value for value in _known if json.dumps(value)[1:-1] in text)


def find_secrets(raw: Any, plain: Any, key: str = "") -> Iterator[str]:
    """The secrets of a config.

    Args:
        raw: with its interpolations, as plain containers.
        plain: the same, resolved.
        key: the last part of the key that it is under.
    """
    if isinstance(plain, Mapping):
        for name, value in plain.items():
            yield from find_secrets(raw.get(name) if isinstance(raw, Mapping) else None, value, str(name))
    elif isinstance(plain, list | tuple):
        others = raw if isinstance(raw, list | tuple) and len(raw) == len(plain) else [None] * len(plain)
        for one, value in zip(others, plain, strict=True):
            yield from find_secrets(one, value, key)
    elif plain is not None:
        if is_secret(key, plain):
            yield str(plain)
        yield from find_secrets_in_text(raw if isinstance(raw, str) else "", str(plain))


def find_secrets_in_text(raw: str, plain: str) -> Iterator[str]:
    """What a text takes from the environment, and the password of a URI."""
    for found in _FROM_ENVIRONMENT.finditer(raw):
        if found["way"] == "secret" or is_secret(found["name"]):
            yield os.environ.get(found["name"]) or (found["default"] or "").strip(" '\"")
    for found in _USER_IN_URI.finditer(plain):
        yield found["user"].partition(":")[2]


def find_typed_secrets(words: Sequence[str]) -> Iterator[str]:
    """The secrets among overrides, as they were typed."""
    for word in words:
        key, _, value = word.partition("=")
        if is_secret(key, value):
            yield from (value, *(part.strip(" '\"") for part in value.strip("[]").split(",")))
        for found in _INSIDE.finditer(value):
            if is_secret(found["key"], found["value"]):
                yield found["value"].strip(" '\"")
        yield from find_secrets_in_text(word, word)


def find_environment_secrets() -> Iterator[str]:
    """The values of variables whose names say that they are secrets."""
    for name, value in os.environ.items():
        if is_secret(name, value) and len(value) >= SHORTEST_OF_ENVIRONMENT and not is_path(value):
            yield value


def is_path(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def resolve_secret(name: str) -> str:
    """`${secret:NAME}` in a config: a variable of the environment, masked wherever its value turns up."""
    if name not in os.environ:
        raise KeyError(f"the environment variable {name} is not set")
    remember_secrets([os.environ[name]])
    return os.environ[name]


def register_resolver() -> None:
    """Teaches OmegaConf `${secret:NAME}`."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("secret", resolve_secret, replace=True)


# ---------------------------------------------------------------------------------------------
# Masking
# ---------------------------------------------------------------------------------------------


def mask_secrets(value: Any, key: str = "") -> Any:
    """A copy of a config, or of a text, in which what is a secret reads `****`."""
    if isinstance(value, Mapping):
        return {k: mask_secrets(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [mask_secrets(v, key) for v in value]
    if value is not None and value != "" and is_secret(key, value) and not is_interpolation(value):
        return MASK
    return mask_text(value) if isinstance(value, str) else value


def is_interpolation(value: object) -> bool:
    """Whether it only says where in the environment a value is; that is kept, so that it is found there again."""
    found = _FROM_ENVIRONMENT.fullmatch(value) if isinstance(value, str) else None
    return found is not None and found["default"] is None


def mask_text(text: str) -> str:
    """A text without what in it is a secret by its place or its looks, or is known to be one."""
    if turning_up := _compile_known():
        text = turning_up.sub(MASK, text)
    text = _USER_IN_URI.sub(rf"\g<scheme>{MASK}@", text)
    text = _SIGNED.sub(rf"\g<key>{MASK}", text)
    text = _LOOKS.sub(MASK, _BEARER.sub(rf"\g<kind>{MASK}", text))
    text = _FROM_ENVIRONMENT.sub(_without_default, text)
    text = _ASSIGNED.sub(lambda found: _cover(found, f"{found['key']}="), text)
    return _INSIDE.sub(lambda found: _cover(found, found["lead"] + found["key"] + found["colon"]), text)


def mask_override(override: str) -> str:
    """An override as it was typed, its value masked where `mask_secrets` would."""
    key, equals, value = override.partition("=")
    if not equals:
        return mask_text(override)
    return f"{key}={mask_secrets(value, key.lstrip('+~').rpartition('.')[2])}"


def _cover(found: re.Match[str], lead: str) -> str:
    is_one = is_secret(found["key"], found["value"].strip("'\"")) and not found["value"].startswith("${")
    return lead + MASK if is_one else found[0]


def _without_default(found: re.Match[str]) -> str:
    if found["default"] is None or not (found["way"] == "secret" or is_secret(found["name"])):
        return found[0]
    return f"${{{found['way']}:{found['name']},{MASK}}}"


@functools.cache
def _compile_known() -> re.Pattern[str] | None:
    """Finds every known secret, also as JSON, Python, a URI or a traceback, line by line, would show it."""
    forms: set[str] = set()
    for value in _known:
        lines = [line for line in value.splitlines() if len(line) >= SHORTEST_OF_ENVIRONMENT]
        for text in (value, *lines):
            forms |= {text, json.dumps(text)[1:-1], repr(text)[1:-1], quote(text, safe=""), quote(text)}
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None


class MaskedStream:
    """A stream that what is written to goes through with its secrets masked, a piece at a time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(mask_text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
