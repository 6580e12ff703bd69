"""How the user types scaleflow's commands, for messages that name one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def name_command(name: str = "") -> str:
    """Returns a command to type: `scaleflow NAME` if this process is the console script's, else
    `python -m scaleflow.NAME`.

    Args:
        name: of the command; empty for a run.
    """
    start, separator = ("scaleflow", " ") if is_console_script(sys.orig_argv) else ("python -m scaleflow", ".")
    return separator.join(filter(None, (start, name)))


def is_console_script(words: Sequence[str]) -> bool:
    """Returns whether a process's words, with the interpreter, are those of the script `scaleflow`."""
    return [Path(word).name for word in words[1:2]] == ["scaleflow"]
