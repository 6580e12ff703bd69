"""Shell completion of commands and flags, in front of Hydra's, which completes groups, options and keys of a run."""

import contextlib
import io
import os
import re
from collections.abc import Sequence

from scaleflow.commands.table import list_commands, run_named_command
from scaleflow.compat.hydra import make_flag_parser
from scaleflow.interfaces.features import Command
from scaleflow.launcher.command_exit import JSON

#: The environment variable with the line that the shell completes.
LINE = "COMP_LINE"

#: A flag in a help page or a usage line, and its value: one of some words, or any.
FLAG = re.compile(r"(?:^ +(?:-\w, )?|\[)(--[\w-]+)(?: ({[^}]*}|[A-Z_]+))?", re.M)

#: The mark of a command that takes overrides, in its usage line or Hydra's.
OVERRIDES = re.compile(r"\[(KEY=VALUE|overrides) \.\.\.\]")

#: The choices of a command's first word, in its help page.
FIRST = re.compile(r"^  ({.*?})", re.M)


def complete_line() -> bool:
    """Prints the possible continuations of the line that the shell completes.

    Returns whether these are all. Otherwise Hydra completes an override, after words that Hydra does not know were
    removed from the line.
    """
    line = os.environ[LINE]
    words = [word for word in line.split()[1:] if word != JSON]
    word = "" if line.endswith(" ") or not words else words.pop()
    command = list_commands().get(words[0]) if words else None
    page = make_flag_parser().format_usage() if command is None else read_help(command)
    choices = list_choices(page, words[command is not None :], word)
    if choices is not None:
        print(*choices, sep="\n")
        return True
    if not words:
        print(*list_commands(), sep="\n")
    if command is not None:
        words = [override for override in words if "=" in override]
    os.environ[LINE] = " ".join(["scaleflow", *words, word])
    return False


def list_choices(page: str, words: Sequence[str], word: str) -> list[str] | None:
    """Returns the continuations of a command's words, with `word` to complete; None if an override follows."""
    flags = dict(FLAG.findall(page))
    value = flags.get(words[-1]) if words else None
    if value:
        return split_choices(value)
    if word.startswith("-"):
        return list(flags)
    first = FIRST.search(page)
    if not words and first:
        return split_choices(first[1])
    return None if OVERRIDES.search(page) else []


def split_choices(value: str) -> list[str]:
    """Returns the words of `{a,b}`; empty for `PATH`, where the shell completes file names."""
    return value.strip("{}").split(",") if "{" in value else []


def read_help(command: Command) -> str:
    """Returns a command's help page."""
    with contextlib.redirect_stdout(io.StringIO()) as page, contextlib.suppress(SystemExit):
        run_named_command(command, ["--help"])
    return page.getvalue()
