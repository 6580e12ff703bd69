"""Masks secrets in code and in files of settings, and tells which files are secrets as a whole.

The text keeps its lines and its quotes, so that a masked module can be imported, and a masked patch be applied.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate

from scaleflow.interfaces.secret_masking import MASK, SECRET_WORDS, SHORTEST, is_secret, mask_text

#: The names of files that are secrets.
SECRET_FILES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pgpass", ".pypirc", ".npmrc", ".git-credentials"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.asc", "*.gpg", "*.tfstate"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "credentials", "credentials.*", "*credentials*.json"),
    *("secret", "secrets", "secret.*", "secrets.*", "*service?account*.json", ".htpasswd", "kubeconfig"),
)
_SECRET_FILE = re.compile(rf"(?!.*\.py$)(?:{'|'.join(map(translate, SECRET_FILES))})")

#: The ends of the names of files in which a line can be `password: sesame`.
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
    """Whether a file looks by its name as if it held secrets."""
    return _SECRET_FILE.match(path.rpartition("/")[2].lower()) is not None


def mask_code(text: str, path: str) -> str:
    """Masks the secrets in the text of a file, which keeps its number of lines."""
    return "\n".join(mask_lines(text.split("\n"), path))


def mask_lines(lines: Sequence[str], path: str) -> list[str]:
    """Masks the secrets in the lines of a file; returns as many lines."""
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
