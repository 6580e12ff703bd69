"""How the user types scaleflow's commands, for messages that name one."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def name_command(name: str = "") -> str:
    """Returns a command that can be typed: `scaleflow NAME`, or `python -m scaleflow NAME` if there is no such script.

    Without a name it is that of a run.
    """
    script = find_console_script("scaleflow")
    start = "python -m scaleflow" if script is None else script
    return f"{start} {name}" if name else start


def find_console_script(name: str) -> str | None:
    """Returns the word that runs a console script of this interpreter: its name if it is on the PATH, else its path
    beside the script that was typed; None for a process of `python` whose script is not on the PATH.
    """
    found = shutil.which(name)
    typed = sys.orig_argv[1].removesuffix("scaleflow") + name if is_console_script(sys.orig_argv) else None
    own = Path(sys.executable).with_name(name) if typed is None else Path(typed)
    if found is not None and Path(found).resolve() == own.resolve():
        return name
    return None if typed is None else shlex.quote(typed)


def is_console_script(words: Sequence[str]) -> bool:
    """Returns whether a process's words, with the interpreter, are those of the script `scaleflow`."""
    return [Path(word).name for word in words[1:2]] == ["scaleflow"]
