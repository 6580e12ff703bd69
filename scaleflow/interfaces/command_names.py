"""Finds how the user types scaleflow's commands, for messages that name a command."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def name_command(name: str = "") -> str:
    """Returns a command that can be typed: `scaleflow NAME`, or `python -m scaleflow NAME` if there is no such script.

    Without a name it is the command that starts a run.
    """
    script = find_console_script("scaleflow")
    start = "python -m scaleflow" if script is None else script
    return f"{start} {name}" if name else start


def find_console_script(name: str) -> str | None:
    """Returns the word that runs a console script of this interpreter.

    It is the script's name if the PATH finds it, otherwise its path next to the script that was typed. Returns None if
    this process was started as `python` and the PATH does not find the script.
    """
    on_path = shutil.which(name)
    typed = sys.orig_argv[1].removesuffix("scaleflow") + name if is_console_script(sys.orig_argv) else None
    own = Path(sys.executable).with_name(name) if typed is None else Path(typed)
    if on_path is not None and Path(on_path).resolve() == own.resolve():
        return name
    return None if typed is None else shlex.quote(typed)


def is_console_script(words: Sequence[str]) -> bool:
    """Returns whether a process was started by the script `scaleflow`. Its words include the interpreter."""
    return [Path(word).name for word in words[1:2]] == ["scaleflow"]
