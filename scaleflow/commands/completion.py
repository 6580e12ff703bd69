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

#: The environment variable with the line that a shell completes.
LINE = "COMP_LINE"

#: A flag in a page of help or in its usage, and the value that it takes: one of some words, or any.
FLAG = re.compile(r"(?:^ +(?:-\w, )?|\[)(--[\w-]+)(?: ({[^}]*}|[A-Z_]+))?", re.M)

#: That a command takes overrides, in its usage and in Hydra's.
OVERRIDES = re.compile(r"\[(KEY=VALUE|overrides) \.\.\.\]")

#: The words in a page of help of which one comes first.
FIRST = re.compile(r"^  ({.*?})", re.M)


def complete_line() -> bool:
    """Prints what can follow in the line that a shell completes.

    Returns whether that is all. If not, Hydra completes an override. The line is then without what Hydra does not know.
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
        words = [each for each in words if "=" in each]
    os.environ[LINE] = " ".join(["scaleflow", *words, word])
    return False


def list_choices(page: str, words: Sequence[str], word: str) -> list[str] | None:
    """Returns what can follow the words after a command's name, and completes `word`; None if that is an override."""
    flags = dict(FLAG.findall(page))
    if words and (value := flags.get(words[-1])):
        return split_choices(value)
    if word.startswith("-"):
        return list(flags)
    if not words and (first := FIRST.search(page)):
        return split_choices(first[1])
    return None if OVERRIDES.search(page) else []


def split_choices(value: str) -> list[str]:
    """Returns the words of `{a,b}`; none for `PATH`, where the shell completes names of files."""
    return value.strip("{}").split(",") if "{" in value else []


def read_help(command: Command) -> str:
    """Returns a command's page of help."""
    with contextlib.redirect_stdout(io.StringIO()) as page, contextlib.suppress(SystemExit):
        run_named_command(command, ["--help"])
    return page.getvalue()
