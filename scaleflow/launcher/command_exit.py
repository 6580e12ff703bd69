"""Defines how a command ends: its exit code, its error messages, and its answer for `--json`."""

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scaleflow.interfaces.extras import TERMINATED as TERMINATED

FINISHED = 0
FAILED = 1
REFUSED = 2
NOT_PROMOTED = 3
INTERRUPTED = 130

#: The flag of every command that prints one JSON object as the last line of standard output.
JSON = "--json"


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int = FINISHED  # the exit code
    read: Callable[[], Mapping[str, Any]] = dict  # the values of `--json`; an `error` among them is already printed
    error: str = ""  # why the command did not succeed; the receiver of the outcome prints it


def raise_interruption(code: int, why: str) -> None:
    """Raises KeyboardInterrupt or SystemExit if a command's exit code means that SIGINT or SIGTERM ended it."""
    if code == INTERRUPTED:
        raise KeyboardInterrupt(why)
    if code == TERMINATED:
        raise SystemExit(code)


def find_interruption(error: BaseException | None) -> BaseException | None:
    """Returns the KeyboardInterrupt, or the SystemExit of SIGTERM, that was being handled when an error was raised.

    Returns None if there was none. A library that a signal interrupts may raise its own error: OmegaConf does while it
    restores its flags.
    """
    seen = set[int]()  # causes may form a cycle
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == TERMINATED):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def write_error(text: str) -> None:
    """Prints an error to standard error. Does nothing if standard error cannot be written."""
    with contextlib.suppress(OSError):
        print(f"scaleflow: {text}", file=sys.stderr, flush=True)


def to_printable(message: str) -> str:
    """Returns a message on at most two lines, with escapes for characters that cannot be printed."""
    lines = [escape_unprintable(line) for line in message.split("\n")]
    line_break = "\n" if len(lines) <= 2 else "\\n"
    return line_break.join(lines)


def escape_unprintable(text: str) -> str:
    """Returns a text with escapes for characters that cannot be printed."""
    escaped = ""
    for character in text:
        escaped += character if character.isprintable() else character.encode("unicode_escape").decode()
    return escaped
