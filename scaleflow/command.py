"""What the commands share: their words, how they refuse, how they end."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from scaleflow.secret_masking import mask_secrets

FAILED, REFUSED = 1, 2


def refuse(message: str) -> int:
    """Says why nothing is done; gives the exit code."""
    print(f"scaleflow: {to_printable(str(mask_secrets(message)))}", file=sys.stderr)
    return REFUSED


def to_printable(message: str) -> str:
    """At most two lines, with what can't be printed of the words that were typed in escapes."""
    lines = message.split("\n")
    shown = ["".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line) for line in lines]
    return ("\n" if len(shown) <= 2 else "\\n").join(shown)


def exit_process(code: int) -> NoReturn:
    """Ends the process without taking apart, module by module, what MLflow imported: half a second or more.

    Where a launcher of Hydra's has left processes of `multiprocessing`, as joblib's does, Python itself has to end: it
    tells them before it waits for them.
    """
    processes = sys.modules.get("multiprocessing")
    if processes is not None and processes.active_children():
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it is gone
            stream.flush()
    os._exit(code)


def split_overrides(words: list[str]) -> list[str]:
    """Replaces `--overrides 'a=1 b=2'` by its words: MLflow hands a parameter on as one."""
    if "--overrides" not in words[:-1]:
        return words
    at = words.index("--overrides")
    return [*words[:at], *shlex.split(words[at + 1]), *words[at + 2 :]]


def quote_nan_option(words: Sequence[str]) -> list[str]:
    """Quotes the option of `debug=nan`, which Hydra would take for a number."""
    return [re.sub(r"(?<=[=,])nan(?=,|$)", "'nan'", word) if word.startswith("debug=") else word for word in words]


def take_keys_of_run(words: Sequence[str]) -> list[str]:
    """With `resume=RUN`, has Hydra take keys that only the options of that run have: `model.filters=8` of a cnn.

    A key that the run does not have either is refused when its config is read.
    """
    if not any(word.lstrip("+").startswith("resume=") for word in words):
        return list(words)
    return [f"++{word}" if re.match(r"(?!hydra\.)\w+(\.\w+)+=", word) else word for word in words]
