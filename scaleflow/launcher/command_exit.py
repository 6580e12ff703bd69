"""How this process's command ends: its exit code, its error messages, and its answer for `--json`."""

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from scaleflow.interfaces.secret_masking import mask_secrets

FINISHED, FAILED, REFUSED, NOT_PROMOTED, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143

#: The flag of every command that asks for one JSON object as the last line of standard output.
JSON = "--json"


class Answer:
    """The answer of a command for `--json`, in addition to its exit code.

    Attributes:
        read: returns the values. It is called at the end of the command, and only with `--json`.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.read: Callable[[], Mapping[str, Any]] = dict
        self.error: str | None = None


#: The answer of this process's command.
ANSWER = Answer()


def raise_interruption(code: int, why: str) -> None:
    """Raises KeyboardInterrupt or SystemExit, if the exit code of a command says that SIGINT or SIGTERM ended it."""
    if code == INTERRUPTED:
        raise KeyboardInterrupt(why)
    if code == TERMINATED:
        raise SystemExit(code)


def print_refusal(message: str) -> int:
    """Prints why the command does nothing; returns the exit code."""
    write_error(to_printable(str(mask_secrets(message))))
    return REFUSED


def write_error(text: str) -> None:
    """Prints an error to standard error, if that can be written."""
    ANSWER.error = text
    with contextlib.suppress(OSError):
        print(f"scaleflow: {text}", file=sys.stderr, flush=True)


def to_printable(message: str) -> str:
    """Returns a message on at most two lines, with characters that cannot be printed as escapes."""
    lines = message.split("\n")
    escaped = ["".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line) for line in lines]
    return ("\n" if len(escaped) <= 2 else "\\n").join(escaped)
