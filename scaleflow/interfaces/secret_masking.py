"""Masks secrets in everything that is written or shown: config files, params, tags, events, logs.

A value is a secret because of its key (`password`, `hf_token`, `api_key`), its source (`${secret:NAME}`,
`${oc.env:NAME}`, or any environment variable with such a name), its position (the credentials in a URI), or its format
(tokens of well-known services). A known secret is masked wherever it occurs.

In code and in settings files the text keeps its lines and its quotes, so that a masked module can be imported, and a
masked patch can be applied. Some files are secret as a whole.
"""

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

MASK = "****"

#: The words at the end of a key that mark its value as a secret.
SECRET_WORDS = (
    "password|passwd|passphrase|pwd|secret|credential|token|bearer|authorization|connection_?string|"
    "(?:api|access|private|secret|encryption|signing|ssh|account|shared|master|storage|auth|service|license|hmac)_?key"
)
_SECRET_KEY = re.compile(rf"(?:^|[_\W])(?P<word>{SECRET_WORDS})s?$", re.I)

#: Keys about text tokens and their counts, which are not secrets.
_OF_TEXT = re.compile(
    r"(?:^|[_\W])(?:oov|pad|padding|mask|unk|unknown|bos|eos|cls|sep|start|end|special|stop|max|min|num|n|vocab)"
    r"_?tokens?$",
    re.I,
)
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?|true|false|null", re.I)

# A pattern that starts with a repetition has a lookbehind, so that a search in a long word is not quadratic.
_USER_IN_URI = re.compile(r"(?<![\w+.-])(?P<scheme>[a-z][\w+.-]*://)(?P<user>[^/\s]*)@", re.I)
_SIGNED = re.compile(r"(?P<key>[?&](?:sig|signature|x-amz-[\w-]+|x-goog-[\w-]+|awsaccesskeyid)=)[^&\s'\"]+", re.I)
_VALUE = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
#: `password=sesame` in a text.
_ASSIGNED = re.compile(
    rf"(?P<lead>(?<![\w.+~@-])(?P<key>[\w.+~@-]*(?:{SECRET_WORDS})s?)=)(?P<value>{_VALUE}|[^\s&;,'\")\]}}]*[^\s&;,:'\")\]}}])",
    re.I,
)
#: `{password: sesame}` as in an override, and `{'password': 'sesame'}` as in Python and JSON.
_INSIDE = re.compile(
    rf"(?P<lead>(?:(?<!\$)\{{|,)\s*['\"]?(?P<key>[\w.-]*(?:{SECRET_WORDS})s?)['\"]?\s*:\s*)(?P<value>{_VALUE}|[^,}}\]]+)",
    re.I,
)
_BEARER = re.compile(r"(?P<kind>\b(?:bearer|basic)\s+)[\w.~+/-]{8,}=*", re.I)
_LOOKS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}"
    r"|https://hooks\.slack\.com/[\w/-]+|xox[abprs]-[\w-]{10,}|dapi[0-9a-f]{32}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)",
    re.S,
)
#: A random string. A value of a key named `key` is a secret only if it matches, since `key` may also be a column.
_RANDOM = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9_+=-]{20,}")
#: An interpolation that reads an environment variable.
_FROM_ENVIRONMENT = re.compile(r"\$\{\s*(?P<way>secret|oc\.env)\s*:\s*(?P<name>\w+)\s*(?:,(?P<default>[^}]*))?\}")

#: Shorter secrets are masked only under their own key, not wherever they occur.
SHORTEST = 4
SHORTEST_OF_ENVIRONMENT = 8

_known: set[str] = set()


def is_secret(key: str, value: object = "") -> bool:
    """Returns whether a key's value is a secret: true for `api_key` and `dbPassword`, not for `max_tokens` or
    `key_dim`.
    """
    key = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key)
    match = _SECRET_KEY.search(key)
    if match is None:
        is_key = re.search(r"(?:^|\W)key$", key, re.I) is not None
        return is_key and isinstance(value, str) and _RANDOM.fullmatch(value) is not None
    if match["word"].lower() == "token":
        is_number = isinstance(value, int | float) or (isinstance(value, str) and _NUMBER.fullmatch(value))
        return not (is_number or _OF_TEXT.search(key))
    return True


def remember_secrets(values: Iterable[str]) -> None:
    """Makes this process mask values wherever they occur from now on, except short strings and numbers."""
    new = {value for value in values if len(value) >= SHORTEST and not _NUMBER.fullmatch(value) and value != MASK}
    if not new <= _known:
        _known.update(new)
        _compile_known.cache_clear()


def find_known_secrets(text: str) -> list[str]:
    """Returns the known secrets in a JSON text, for the process that receives the text. Never write them to a file."""
    return sorted(value for value in _known if json.dumps(value)[1:-1] in text)


def find_secrets(raw: Any, plain: Any, key: str = "") -> Iterator[str]:
    """Yields the secrets in a config: `raw` has its interpolations, `plain` is resolved, both as plain containers.

    `key` is the last part of this value's key.
    """
    if isinstance(plain, Mapping):
        for name, value in plain.items():
            yield from find_secrets(raw.get(name) if isinstance(raw, Mapping) else None, value, str(name))
    elif isinstance(plain, list | tuple):
        raw_items = raw if isinstance(raw, list | tuple) and len(raw) == len(plain) else [None] * len(plain)
        for raw_item, value in zip(raw_items, plain, strict=True):
            yield from find_secrets(raw_item, value, key)
    elif plain is not None:
        if is_secret(key, plain):
            yield str(plain)
        yield from find_secrets_in_text(raw if isinstance(raw, str) else "", str(plain))


def find_secrets_in_text(raw: str, plain: str) -> Iterator[str]:
    """Yields the secrets that `raw` reads from the environment, and the passwords of URIs in `plain`."""
    for match in _FROM_ENVIRONMENT.finditer(raw):
        if match["way"] == "secret" or is_secret(match["name"]):
            yield os.environ.get(match["name"]) or (match["default"] or "").strip(" '\"")
    for match in _USER_IN_URI.finditer(plain):
        yield match["user"].partition(":")[2]


def reads_secret(text: str) -> bool:
    """Returns whether an interpolation reads a secret from the environment."""
    matches = _FROM_ENVIRONMENT.finditer(text)
    return any(match["way"] == "secret" or is_secret(match["name"]) for match in matches)


def find_typed_secrets(words: Sequence[str]) -> Iterator[str]:
    """Yields the secrets in overrides."""
    for word in words:
        key, _, value = word.partition("=")
        if is_secret(key, value):
            yield from (value, *(part.strip(" '\"") for part in value.strip("[]").split(",")))
        for match in _INSIDE.finditer(value):
            if is_secret(match["key"], match["value"]):
                yield match["value"].strip(" '\"")
        yield from find_secrets_in_text(word, word)


def find_environment_secrets() -> Iterator[str]:
    """Yields the values of environment variables whose names mark them as secrets, except short ones and paths."""
    for name, value in os.environ.items():
        if is_secret(name, value) and len(value) >= SHORTEST_OF_ENVIRONMENT and not is_path(value):
            yield value


def is_path(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def resolve_secret(name: str) -> str:
    """Resolves `${secret:NAME}` to an environment variable. Its value is masked from now on."""
    if name not in os.environ:
        raise KeyError(f"the environment variable {name} is not set")
    remember_secrets([os.environ[name]])
    return os.environ[name]


def register_resolver() -> None:
    """Registers `${secret:NAME}` with OmegaConf."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("secret", resolve_secret, replace=True)


def mask_secrets(value: Any, key: str = "") -> Any:
    """Returns a copy of a config or a text with each secret replaced by `****`."""
    if isinstance(value, Mapping):
        return {k: mask_secrets(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [mask_secrets(v, key) for v in value]
    if value is not None and value != "" and is_secret(key, value) and not is_interpolation(value):
        return MASK
    return mask_text(value) if isinstance(value, str) else value


def is_interpolation(value: object) -> bool:
    """Returns whether a value only refers to an environment variable. It stays readable, so that it can be resolved."""
    match = _FROM_ENVIRONMENT.fullmatch(value) if isinstance(value, str) else None
    return match is not None and match["default"] is None


def mask_text(text: str) -> str:
    """Masks known secrets in a text, and secrets that are recognizable by position or format."""
    known = _compile_known()
    if known:
        text = known.sub(MASK, text)
    text = _USER_IN_URI.sub(rf"\g<scheme>{MASK}@", text)
    text = _SIGNED.sub(rf"\g<key>{MASK}", text)
    text = _LOOKS.sub(MASK, _BEARER.sub(rf"\g<kind>{MASK}", text))
    text = _FROM_ENVIRONMENT.sub(_mask_default, text)
    return _INSIDE.sub(_mask_value, _ASSIGNED.sub(_mask_value, text))


def mask_override(override: str) -> str:
    """Masks the value of an override; see `mask_secrets`."""
    key, equals, value = override.partition("=")
    if not equals:
        return mask_text(override)
    return f"{key}={mask_secrets(value, key.lstrip('+~').rpartition('.')[2])}"


def _mask_value(match: re.Match[str]) -> str:
    value = match["value"].strip("'\"")
    must_mask = is_secret(match["key"], value) and value != MASK and not match["value"].startswith("${")
    return match["lead"] + MASK if must_mask else match[0]


def _mask_default(match: re.Match[str]) -> str:
    if match["default"] is None or not (match["way"] == "secret" or is_secret(match["name"])):
        return match[0]
    return f"${{{match['way']}:{match['name']},{MASK}}}"


@functools.cache
def _compile_known() -> re.Pattern[str] | None:
    """Returns a pattern of all known secrets and their single lines, also in the escaped forms of JSON, Python and
    URIs.
    """
    forms: set[str] = set()
    for value in _known:
        lines = [line for line in value.splitlines() if len(line) >= SHORTEST_OF_ENVIRONMENT]
        for text in (value, *lines):
            forms |= {text, json.dumps(text)[1:-1], repr(text)[1:-1], quote(text, safe=""), quote(text)}
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None


class MaskedStream:
    """A stream that masks secrets in each piece of text written to it."""

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


#: The names of files that are secrets.
SECRET_FILES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pgpass", ".pypirc", ".npmrc", ".git-credentials"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.asc", "*.gpg", "*.tfstate"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "credentials", "credentials.*", "*credentials*.json"),
    *("secret", "secrets", "secret.*", "secrets.*", "*service?account*.json", ".htpasswd", "kubeconfig"),
)
_SECRET_FILE = re.compile(rf"(?!.*\.py$)(?:{'|'.join(map(translate, SECRET_FILES))})")

#: Suffixes of files that may have lines such as `password: sesame`.
SETTINGS = (".yaml", ".yml", ".ini", ".cfg", ".conf", ".toml", ".properties", ".txt", ".sh", ".md")

_KEY = rf"(?P<key>(?<![\w.-])[\w.-]*(?:{SECRET_WORDS})s?)"
_LITERAL = r"(?P<quote>\"\"\"|'''|\\\"|\"|')(?P<value>(?:(?!(?P=quote))(?:\\[\s\S]|[^\\]))*)(?P=quote)"
#: `api_key: str = "sesame"`, `"api_key": "sesame"`, `environ["API_KEY"] = "sesame"`; also within a notebook's JSON.
_IN_CODE = re.compile(
    rf"(?P<lead>{_KEY}(?:\\?['\"])?\]?\s*(?::\s*[\w.|\[\] ]+?\s*=|[=!]=|[=:])\s*[rbfu]{{0,2}}){_LITERAL}", re.I
)
_IN_CALL = re.compile(rf"(?P<lead>(?:get|setdefault|env)\(\s*['\"]{_KEY}['\"]\s*,\s*[rbfu]{{0,2}}){_LITERAL}", re.I)
#: `password: sesame`, a line of settings.
_IN_SETTINGS = re.compile(
    rf"^(?P<lead>[\s-]*(?:export\s+)?['\"]?{_KEY}['\"]?[^\S\n]*[:=][^\S\n]*)(?P<value>(?![#'\"$&*|>\[{{])\S[^#\n]*?)(?=\s*(?:\s#|$))",
    re.I | re.M,
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S)


def is_secret_file(path: str) -> bool:
    """Whether a file's name suggests that it contains secrets."""
    return _SECRET_FILE.match(path.rpartition("/")[2].lower()) is not None


def mask_code(text: str, path: str) -> str:
    """Masks the secrets in the text of a file. The number of lines stays the same."""
    return "\n".join(mask_lines(text.split("\n"), path))


def mask_lines(lines: Sequence[str], path: str) -> list[str]:
    """Masks the secrets in the lines of a file. Returns the same number of lines."""
    text = "\n".join(lines)
    text = _PRIVATE_KEY.sub(lambda match: MASK + "\n" * match[0].count("\n"), text)
    text = _IN_CALL.sub(_mask_literal, _IN_CODE.sub(_mask_literal, text))
    if path.lower().endswith(SETTINGS):
        text = _IN_SETTINGS.sub(_mask_setting, text)
    masked = mask_text(text).split("\n")
    return masked if len(masked) == len(lines) else [mask_text(line) for line in text.split("\n")]


def _mask_literal(match: re.Match[str]) -> str:
    if not _is_masked(match["key"], match["value"]):
        return match[0]
    return match["lead"] + match["quote"] + MASK + "\n" * match["value"].count("\n") + match["quote"]


def _mask_setting(match: re.Match[str]) -> str:
    return match["lead"] + MASK if _is_masked(match["key"], match["value"]) else match[0]


def _is_masked(key: str, value: str) -> bool:
    if len(value) < SHORTEST or value.startswith("${") or value.lower() in ("null", "none", "true", "false"):
        return False
    is_of_text = re.search("token", key, re.I) and not re.fullmatch(r"[\w.~+/=:-]{6,}", value)  # a word, or <pad>
    return is_secret(key, value) and not is_of_text
